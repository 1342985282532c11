"""What methods of parameters read besides the shard: a program that was captured with them holds while it is the same.

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self * SCALE, self.new_full((), config.offset + module.factor)), None

SCALE, config.offset, module.factor; variables that the method closes over, defaults of arguments, and what functions
that it names read. Numbers, strings and collections of them are compared by value, anything else by identity.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from graphshard.capture.outer import chains_of, following, reached
from graphshard.capture.untraceable import is_users
from graphshard.capture.witness import PLAIN, is_container
from graphshard.ir.state import MISSING
from graphshard.ir.subclasses import POST, PRE, identity_of, shard_in

# How many functions that name each other are looked into, and containers in each other.
_DEPTH = 3
# Larger collections are compared by identity.
_LARGEST = 64


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
        params: with the modules that hold them; those that are plain count for nothing.
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
    """The variables that a method of the user's reads, and functions that it names, with what they are now."""
    function = _function_of(method)
    return () if function is None else tuple(_variables(function, depth))


def _function_of(method: Any) -> types.FunctionType | None:
    """The function of the user's that a method runs, within decorators."""
    function = inspect.unwrap(getattr(method, "__func__", method)) if callable(method) else None
    users = isinstance(function, types.FunctionType) and is_users(function.__code__.co_filename)
    return function if users else None


def _variables(function: types.FunctionType, depth: int) -> Iterator[Hashable]:
    for kind, name, value in reached(function):
        yield name, _told(value)
        if isinstance(value, types.FunctionType):
            yield from read_by(value, depth - 1) if depth else ()
        elif kind != "default":
            yield from _attributes(value, chains_of(function, kind, name))


def _attributes(value: Any, chains: Collection[tuple[str, ...]]) -> Iterator[Hashable]:
    """What code names of an object, without running properties."""
    for name in dict.fromkeys(chain[0] for chain in chains if chain):
        inner = inspect.getattr_static(value, name, MISSING)
        yield name, _told(inner)
        yield from _attributes(inner, following(chains, name))


def _read_of(owner: nn.Module, function: types.FunctionType) -> tuple[Hashable, ...]:
    """What a method may read of the module that it is told: attributes by the names in its code."""
    held = vars(owner)
    return tuple((name, _told(held[name])) for name in function.__code__.co_names if name in held)


def _told(value: Any, depth: int = _DEPTH) -> Hashable:
    if isinstance(value, PLAIN):
        return type(value), value
    if not is_container(value) or not depth or len(value) > _LARGEST:
        return _Held(value)
    items = [part for item in value.items() for part in item] if isinstance(value, dict) else value
    made = frozenset if isinstance(value, (set, frozenset)) else tuple
    return type(value), made(_told(item, depth - 1) for item in items)
