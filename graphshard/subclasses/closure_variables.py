"""Variables that methods of parameters read in addition to the shard; a program holds while they stay the same.

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self * SCALE, self.new_full((), config.offset + module.factor)), None

These are SCALE, config.offset and module.factor; variables that the method closes over, defaults of arguments, and what
functions that it names read. Of an object, only the attributes that the code reads of it are compared: it may hold a
counter of steps, too. Numbers, strings and collections of them are compared by value, anything else by identity.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import types
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from graphshard.ir.subclasses import POST, PRE, identity_of, shard_in
from graphshard.torch_compat.torch_ops import OpOverloadPacket
from graphshard.utils.source_lines import MISSING, PLAIN, codes_of, is_users

# How many functions that name each other are looked into, and containers in each other.
_DEPTH = 3
# Larger collections are compared by identity.
_LARGEST = 64
_CONTAINERS = (list, tuple, deque, set, frozenset, dict)
_VARIABLES = {"LOAD_GLOBAL": "global", "STORE_GLOBAL": "global", "LOAD_DEREF": "cell"}
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
    """Return what a program relies on of parameters that decide what is gathered of them, with their modules."""
    known: dict[types.FunctionType, Hashable] = {}
    found: list[Hashable] = []
    for param, owner in params:
        identity = identity_of(param)
        if identity is not None:
            methods = (getattr(shard_in(param), name, None) for name in (PRE, POST))
            own = [function for function in map(_function_of, methods) if function is not None]
            known |= {function: read_by(function) for function in own if function not in known}
            held = vars(owner)
            codes = (code for function in own for code in codes_of(function.__code__))
            names = dict.fromkeys(name for code in codes for name in code.co_names if name in held)
            found.append((identity, *((name, _told(held[name])) for name in names)))
    return *found, *known.values()


def read_by(method: Any, depth: int = _DEPTH) -> tuple[Hashable, ...]:
    """Return the variables that a user's method reads, and functions that it names, with their present values."""
    function = _function_of(method)
    if function is None:
        return ()
    named = _named_in(function.__code__)
    values = [
        (name, function.__globals__[name], chains if _has_settings(function.__globals__[name]) else ())
        for (kind, name), chains in named.items()
        if kind == "global" and name in function.__globals__ and not name.startswith("__")
    ]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # not filled yet
            values.append((name, cell.cell_contents, named.get(("cell", name), ())))
    others = [*vars(function).items(), *(function.__kwdefaults__ or {}).items()]
    others += [("default", value) for value in function.__defaults__ or ()]
    values += [(name, value, ()) for name, value in others if not name.startswith("__")]
    return tuple(entry for name, value, chains in values for entry in _state(name, value, chains, depth))


def _function_of(method: Any) -> types.FunctionType | None:
    """Return the user's function that a method runs, inside its decorators."""
    function = inspect.unwrap(getattr(method, "__func__", method)) if callable(method) else None
    users = isinstance(function, types.FunctionType) and is_users(function.__code__.co_filename)
    return function if users else None


@functools.cache
def _named_in(code: types.CodeType) -> dict[tuple[str, str], tuple[tuple[str, ...], ...]]:
    """Return the variables that code names, and of each the attributes: ("model", "SCALE") of config.model.SCALE.

    Their keys are ("global" or "cell", name). Functions that are defined in the code belong to it.
    """
    found: dict[tuple[str, str], dict[tuple[str, ...], None]] = {}
    for part in codes_of(code):
        steps = [step for step in dis.get_instructions(part) if step.opname not in _BETWEEN]
        for index, step in enumerate(steps):
            if step.opname in _VARIABLES:
                following = itertools.takewhile(lambda after: after.opname in _ATTRIBUTES, steps[index + 1 :])
                chain = tuple(after.argval for after in following)
                found.setdefault((_VARIABLES[step.opname], step.argval), {})[chain] = None
    return {variable: tuple(chains) for variable, chains in found.items()}


def _state(name: str, value: Any, chains: Sequence[tuple[str, ...]], depth: int) -> Iterator[Hashable]:
    """Yield a value, what a function reads, and the attributes in chains, without running properties."""
    yield name, _told(value)
    if isinstance(value, types.FunctionType) and depth:
        yield from read_by(value, depth - 1)
    for attribute in dict.fromkeys(chain[0] for chain in chains if chain):
        inner = inspect.getattr_static(value, attribute, MISSING)
        if inner is not MISSING:
            yield from _state(attribute, inner, [chain[1:] for chain in chains if chain[:1] == (attribute,)], depth)


def _has_settings(value: Any) -> bool:
    """Return whether attributes of a value may be settings; torch.ops and operators get some when they are read."""
    if isinstance(value, types.ModuleType):
        return type(value) is types.ModuleType and is_users(getattr(value, "__file__", None) or "<>")
    return not isinstance(value, OpOverloadPacket)


def _told(value: Any, depth: int = _DEPTH) -> Hashable:
    if isinstance(value, PLAIN):
        return type(value), value
    # The methods of Python's class, as those of a user's may fill a container that is read.
    own: Any = next((kind for kind in _CONTAINERS if issubclass(type(value), kind)), None)
    if own is None or not depth or own.__len__(value) > _LARGEST:
        return _Held(value)
    items = [part for item in dict.items(value) for part in item] if own is dict else own.__iter__(value)
    made = frozenset if own in (set, frozenset) else tuple
    return type(value), made(_told(item, depth - 1) for item in items)
