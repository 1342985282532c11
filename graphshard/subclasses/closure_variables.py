"""Variables that methods of parameters read in addition to the shard; a program holds while they stay the same.

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self * SCALE, self.new_full((), config.offset + module.factor)), None

SCALE, config.offset, module.factor; variables that the method closes over, defaults of arguments, and what functions
that it names read. Numbers, strings and collections of them are compared by value, anything else by identity.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import dis
import functools
import inspect
import queue
import sys
import types
import weakref
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn

from graphshard.ir.subclasses import POST, PRE, identity_of, shard_in
from graphshard.utils.plain_values import MISSING, PLAIN
from graphshard.utils.source_lines import codes_of, is_users

# How many functions that name each other are looked into, and containers in each other.
_DEPTH = 3
# Larger collections are compared by identity.
_LARGEST = 64
# Larger ones are taken for tables, which do not change.
_LARGEST_SETTING = 1024
# Classes of Python whose objects hold what users set.
_SETTINGS = (
    *(types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList, collections.ChainMap),
    *(queue.Queue, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)
# Python's own, as reading others may fill them.
_CONTAINERS = (
    *(list, tuple, dict, set, frozenset),
    *(collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter),
)
# They hold numbers that code outside torch may change.
_ARRAYS = (bytearray, array.array, np.ndarray)
_VARIABLES = ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")
# What newer versions of Python write between reading a variable and its attribute.
_BETWEEN = ("CACHE", "COPY", "DUP_TOP", "PUSH_NULL", "EXTENDED_ARG")


class _Held:
    """An object that is compared by identity; it is kept alive, so that no other has its identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def relied_on(params: Iterable[tuple[torch.Tensor, nn.Module]]) -> tuple[Hashable, ...]:
    """What a program relies on of parameters that decide themselves what is gathered of them, to be compared.

    Args:
        params: with the modules that hold them; plain ones are ignored.
    """
    known: dict[types.FunctionType, Hashable] = {}
    found: list[Hashable] = []
    for param, owner in params:
        identity = identity_of(param)
        if identity is not None:
            functions = [_function_of(getattr(shard_in(param), name, None)) for name in (PRE, POST)]
            own = [f for f in functions if f is not None]
            known |= {function: read_by(function) for function in own if function not in known}
            found.append((identity, *(_read_of(owner, function) for function in own)))
    return *found, *known.values()


def read_by(method: Any, depth: int = _DEPTH) -> tuple[Hashable, ...]:
    """Return the variables that a user's method reads, and functions that it names, with their present values."""
    function = _function_of(method)
    return () if function is None else tuple(_variables(function, depth))


def _function_of(method: Any) -> types.FunctionType | None:
    """Return the user's function that a method runs, inside its decorators."""
    function = inspect.unwrap(getattr(method, "__func__", method)) if callable(method) else None
    users = isinstance(function, types.FunctionType) and is_users(function.__code__.co_filename)
    return function if users else None


def _variables(function: types.FunctionType, depth: int) -> Iterator[Hashable]:
    for kind, name, value in _reached(function):
        yield name, _told(value)
        if isinstance(value, types.FunctionType):
            yield from read_by(value, depth - 1) if depth else ()
        elif kind != "default":
            yield from _attributes(value, _chains_of(function, kind, name))


def _attributes(value: Any, chains: Collection[tuple[str, ...]]) -> Iterator[Hashable]:
    """What code names of an object, without running properties."""
    for name in dict.fromkeys(chain[0] for chain in chains if chain):
        inner = inspect.getattr_static(value, name, MISSING)
        yield name, _told(inner)
        yield from _attributes(inner, _following(chains, name))


def _read_of(owner: nn.Module, function: types.FunctionType) -> tuple[Hashable, ...]:
    """What a method may read of the module that it is told: attributes by the names in its code."""
    held = vars(owner)
    return tuple((name, _told(held[name])) for name in function.__code__.co_names if name in held)


def _told(value: Any, depth: int = _DEPTH) -> Hashable:
    if isinstance(value, PLAIN):
        return type(value), value
    if not _is_container(value) or not depth or len(value) > _LARGEST:
        return _Held(value)
    items = [part for item in value.items() for part in item] if isinstance(value, dict) else value
    made = frozenset if isinstance(value, (set, frozenset)) else tuple
    return type(value), made(_told(item, depth - 1) for item in items)


# --- what a function names ----------------------------------------------------------------------------------------


def _reached(function: types.FunctionType) -> Iterator[tuple[str, str, Any]]:
    """Yield variables, globals, attributes and defaults that a function has."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # not filled yet
            yield "cell", name, cell.cell_contents
    for (kind, name), chains in _named_in(function.__code__).items():
        is_global = kind == "global" and not name.startswith("__")
        value = function.__globals__.get(name, MISSING) if is_global else MISSING
        if value is not MISSING and (_may_change(value) or (_is_namespace(value) and any(_reached_in(value, chains)))):
            yield "global", name, value
    for name, value in vars(function).items():
        if not name.startswith("__") and _may_change(value):
            yield "attribute", name, value
    by_place = list(function.__code__.co_varnames[: function.__code__.co_argcount])
    defaults = function.__defaults__ or ()
    named = dict(zip(by_place[len(by_place) - len(defaults) :], defaults)) | (function.__kwdefaults__ or {})
    for name, value in named.items():
        if not isinstance(value, PLAIN) and _may_change(value):
            yield "default", name, value


def _reached_in(namespace: Any, chains: Collection[tuple[str, ...]]) -> Iterator[tuple[str, str, Any]]:
    """What the code that names these attributes of a module or class reaches there."""
    for name in dict.fromkeys(chain[0] for chain in chains if chain):
        value = MISSING if _is_computed(namespace, name) else getattr(namespace, name, MISSING)
        further = _is_namespace(value) and any(_reached_in(value, _following(chains, name)))
        if value is not MISSING and not name.startswith("__") and (further or _may_change(value)):
            yield "attribute", name, value


def _is_computed(namespace: Any, name: str) -> bool:
    """Whether a descriptor stands for an attribute of a class: it is not to be replaced."""
    bases = namespace.__mro__ if isinstance(namespace, type) else ()
    found = next((vars(base)[name] for base in bases if name in vars(base)), None)
    return hasattr(type(found), "__get__") and not isinstance(found, (types.FunctionType, staticmethod, classmethod))


def _chains_of(function: types.FunctionType, kind: str, name: str) -> Collection[tuple[str, ...]]:
    """The attributes that a function names of a variable: ("model", "SCALE") of `config.model.SCALE`."""
    return _named_in(function.__code__).get((kind, name), ())


def _following(chains: Collection[tuple[str, ...]], name: str) -> list[tuple[str, ...]]:
    """What is named of an attribute."""
    return [chain[1:] for chain in chains if chain[:1] == (name,) and len(chain) > 1]


def _is_namespace(value: Any) -> bool:
    """Return whether a value is a user's module or class, whose attributes may be settings."""
    if isinstance(value, types.ModuleType):
        return is_users(getattr(value, "__file__", None) or "<>")
    return isinstance(value, type) and _is_users_class(value)


def _slots_of(cls: type) -> tuple[str, ...]:
    """Names of the attributes that objects of a class keep in slots."""
    bases = [base for base in cls.__mro__ if base is not object and "__slots__" in vars(base)]
    found = ([base.__slots__] if isinstance(base.__slots__, str) else base.__slots__ for base in bases)  # type: ignore[attr-defined]
    return tuple(name for names in found for name in names if not name.startswith("__"))


@functools.cache
def _named_in(code: types.CodeType) -> dict[tuple[str, str], tuple[tuple[str, ...], ...]]:
    """The variables that a function names, by kind and name, with the attributes that it names of them."""
    found: dict[tuple[str, str], dict[tuple[str, ...], None]] = {}
    for part in codes_of(code):
        steps = [step for step in dis.get_instructions(part) if step.opname not in _BETWEEN]
        for index, step in enumerate(steps):
            if step.opname in _VARIABLES:
                chain: list[str] = []
                while steps[index + 1 + len(chain)].opname in _ATTRIBUTES:
                    chain.append(steps[index + 1 + len(chain)].argval)
                kind = "cell" if step.opname == "LOAD_DEREF" else "global"
                found.setdefault((kind, step.argval), {})[tuple(chain)] = None
    return {variable: tuple(chains) for variable, chains in found.items()}


def _is_container(value: Any) -> bool:
    """Whether a value is compared item by item."""
    return isinstance(value, (list, tuple, deque, set, frozenset, dict)) and not isinstance(value, torch.Size)


def _may_change(value: Any) -> bool:
    """Whether a variable is something that a program may set: modules, classes and loggers are not."""
    if _is_container(value):
        return type(value) in _CONTAINERS and len(value) <= _LARGEST_SETTING
    if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
        return True
    if isinstance(value, (*PLAIN, torch.Tensor, nn.Module, types.FunctionType, ContextVar, *_ARRAYS, *_SETTINGS)):
        return True
    has_attributes = hasattr(value, "__dict__") or bool(_slots_of(type(value)))
    return has_attributes and not isinstance(value, (type, types.ModuleType)) and _is_users_class(type(value))


def _is_users_class(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    return cls.__module__ == "__main__" or is_users(getattr(module, "__file__", None) or "<>")
