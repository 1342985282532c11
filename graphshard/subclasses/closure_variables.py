"""Variables that methods of parameters read in addition to the shard; a program holds while they stay the same.

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self * SCALE, self.new_full((), config.offset + module.factor)), None

These are SCALE, config.offset and module.factor; variables that the method closes over, defaults of arguments, and what
functions that it names read. Of user objects, the attributes that the code names are compared. Numbers, strings
and collections of them are compared by value, anything else by identity.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from graphshard.ir.subclasses import POST, PRE, identity_of, shard_in
from graphshard.utils.source_lines import MISSING, PLAIN, codes_of, is_users

# How many functions, objects and containers in each other are looked into.
_DEPTH = 3
# Larger collections are compared by identity.
_LARGEST = 64
_CONTAINERS = (list, tuple, set, frozenset, dict)


class _Held:
    """An object that is compared by identity; it is kept alive, so that no other has its identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def relied_on(params: Iterable[tuple[torch.Tensor, nn.Module]]) -> tuple[Hashable, ...]:
    """Return what a program relies on of parameters that decide themselves what is gathered of them, to be compared.

    Args:
        params: with the modules that hold them; plain ones are ignored.
    """
    known: dict[types.FunctionType, Hashable] = {}
    found: list[Hashable] = []
    for param, owner in params:
        identity = identity_of(param)
        if identity is not None:
            methods = (getattr(shard_in(param), name, None) for name in (PRE, POST))
            own = [function for function in map(_function_of, methods) if function is not None]
            known |= {function: read_by(function) for function in own if function not in known}
            held = vars(owner)
            names = (name for function in own for name in _names_in(function.__code__) if name in held)
            found.append((identity, *((name, _told(held[name])) for name in names)))
    return *found, *known.values()


def read_by(method: Any, depth: int = _DEPTH) -> tuple[Hashable, ...]:
    """Return the variables that a user's method reads, and functions that it names, with their present values."""
    function = _function_of(method)
    if function is None:
        return ()
    names = _names_in(function.__code__)
    values = [(name, function.__globals__[name]) for name in names if name in function.__globals__]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # not filled yet
            values.append((name, cell.cell_contents))
    values += [*vars(function).items(), *(function.__kwdefaults__ or {}).items()]
    values += [("default", value) for value in function.__defaults__ or ()]
    read = (_state(name, value, names, depth) for name, value in values if not name.startswith("__"))
    return tuple(entry for entries in read for entry in entries)


def _function_of(method: Any) -> types.FunctionType | None:
    """Return the user's function that a method runs, inside its decorators."""
    function = inspect.unwrap(getattr(method, "__func__", method)) if callable(method) else None
    users = isinstance(function, types.FunctionType) and is_users(function.__code__.co_filename)
    return function if users else None


@functools.cache
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes in a function and in the functions that it defines."""
    return tuple(dict.fromkeys(name for part in codes_of(code) for name in part.co_names))


def _state(name: str, value: Any, names: Sequence[str], depth: int) -> Iterator[Hashable]:
    """Yield a value, what a function reads, and the named attributes of user objects, without properties."""
    yield name, _told(value)
    if not depth:
        return
    if isinstance(value, types.FunctionType):
        yield from read_by(value, depth - 1)
    elif _has_settings(value):
        for attribute in names:
            inner = inspect.getattr_static(value, attribute, MISSING)
            if inner is not MISSING:
                yield from _state(attribute, inner, names, depth - 1)


def _has_settings(value: Any) -> bool:
    """Return whether a value is a user's module, class or object, whose attributes may be settings."""
    if isinstance(value, types.ModuleType):
        return is_users(getattr(value, "__file__", None) or "<>")
    if isinstance(value, (nn.Module, types.SimpleNamespace, argparse.Namespace)):
        return True
    kind = value if isinstance(value, type) else type(value)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or is_users(file or "<>")


def _told(value: Any, depth: int = _DEPTH) -> Hashable:
    if isinstance(value, PLAIN):
        return type(value), value
    # Reading a container of another class may fill it.
    is_container = isinstance(value, _CONTAINERS) and type(value).__module__ in ("builtins", "collections")
    if not is_container or not depth or len(value) > _LARGEST:
        return _Held(value)
    items = [part for item in value.items() for part in item] if isinstance(value, dict) else value
    made = frozenset if isinstance(value, (set, frozenset)) else tuple
    return type(value), made(_told(item, depth - 1) for item in items)
