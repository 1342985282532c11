"""Objects that a forward returns and pytree does not know, such as the `DynamicCache` of transformers.

    DynamicCache(layers=[DynamicLayer(keys=%k, values=%v, is_initialized=True)])

Each call returns a new one: of the same class, with the tensors of that call and, otherwise, with attributes like those
that it had when the program was captured. `__init__` does not run.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphshard.capture.outer import slots_of
from graphshard.capture.results import in_parts
from graphshard.capture.untraceable import Untraceable

_PLAIN = (
    *(torch.Tensor, torch.SymInt, torch.SymFloat, int, float, complex, bool, str, type(None), slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class Parts:
    """An object in a structure: its class, its attributes that are or hold tensors, and the others."""

    def __init__(self, cls: type, tensors: dict[str, Any], others: dict[str, Any]) -> None:
        self.cls, self.tensors, self.others = cls, tensors, others


class Extents:
    """A `torch.Size` in a structure, which pytree would make a tuple."""

    def __init__(self, sizes: Sequence[Any]) -> None:
        self.sizes = sizes


def _as_size(sizes: Iterable[Any], _: None) -> Any:
    sizes = list(sizes)
    return torch.Size(sizes) if all(type(size) is int for size in sizes) else Extents(sizes)


pytree.register_pytree_node(
    Extents, lambda given: (list(given.sizes), None), _as_size, serialized_type_name="graphshard.Extents"
)


class Shared:
    """A part of an object that nothing is known of, such as a function: all calls have the same."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclasses.dataclass(frozen=True, eq=False)
class _Form:
    """What all the objects that stand in one place have in common."""

    cls: type
    names: tuple[str, ...]
    others: dict[str, Any]

    def __str__(self) -> str:
        return self.cls.__name__

    def make(self, values: Any) -> Any:
        made: Any = object.__new__(self.cls)
        made.__dict__.update(_copied(self.others))
        made.__dict__.update(zip(self.names, values, strict=True))
        return made


def take_apart(result: Any, holds: Callable[[Any], bool], data: Collection[str] = ()) -> Any:
    """A forward's result with `Parts` in the place of objects that have tensors, and of tensor subclasses their parts.

    Args:
        result: what the forward returned.
        holds: whether a leaf is a tensor of the forward.
        data: names of the data axes that parameters are DTensors on, too.

    Raises:
        Untraceable: an object refers to itself, or is none of those that have attributes.
    """
    _register()
    return _Taker(holds, data).take(result)


class _Taker:
    def __init__(self, holds: Callable[[Any], bool], data: Collection[str]) -> None:
        self._holds, self._data = holds, data
        self._within: list[Any] = []

    def take(self, tree: Any) -> Any:
        return pytree.tree_map(self._leaf, tree, is_leaf=lambda node: isinstance(node, torch.Size))

    def _leaf(self, leaf: Any) -> Any:
        # Here and not in another pass over the structure, which would put together what this one has taken apart.
        if isinstance(leaf, torch.Tensor):
            return in_parts(leaf, self._data)
        if isinstance(leaf, torch.Size):
            return Extents(leaf)
        return leaf if isinstance(leaf, _PLAIN) else self._object(leaf)

    def _object(self, value: Any) -> Any:
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or isinstance(value, (type, enum.Enum, torch.nn.Module)) or callable(value):
            if self._within:
                return Shared(value)
            raise Untraceable("result", f"a {type(value).__name__}")
        if not _is_its_attributes(type(value)):
            raise Untraceable("result", f"a {type(value).__name__}, which is more than its attributes")
        if any(value is outer for outer in self._within):
            raise Untraceable("result", f"a {type(value).__name__} that refers to itself")
        self._within.append(value)
        taken = {name: self.take(item) for name, item in attributes.items()}
        self._within.pop()
        held = {name: item for name, item in taken.items() if any(map(self._holds, pytree.tree_leaves(item)))}
        return Parts(type(value), held, {name: item for name, item in attributes.items() if name not in held})


def _is_its_attributes(cls: type) -> bool:
    """Whether objects of a class hold nothing but attributes in a `__dict__`: not what a list holds, say."""
    try:
        object.__new__(cls)
    except TypeError:
        return False
    return not slots_of(cls)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Collections are the new object's own; what else attributes refer to is shared, as by a copy."""
    return {n: copy.deepcopy(v) if isinstance(v, (list, dict, set)) else v for n, v in attributes.items()}


def _register() -> None:
    if Parts not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            Parts,
            lambda parts: (list(parts.tensors.values()), _Form(parts.cls, tuple(parts.tensors), parts.others)),
            lambda values, form: form.make(values),
        )
        pytree.register_pytree_node(Shared, lambda shared: ([], shared.value), lambda _, value: value)
