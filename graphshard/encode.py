"""Values of a graph as plain JSON: what nodes are given and what they make.

    None, bools, numbers, strings, lists     themselves
    {"node": "mm"}                           another node's value
    {"tuple": [1, 2]}  {"slice": [0, 4, 1]}  {"complex": [0.0, 1.0]}  {"float": "-inf"}
    {"dtype": "float32"}  {"device": "cuda:0"}  {"layout": "strided"}  {"memory_format": "contiguous_format"}
    {"tensor": ["float32", [4, 4], [4, 1], "cpu"]}    a fake tensor: dtype, shape, stride, device; no values
    {"unsupported": "SymInt"}                anything else: it is written, so that a dump never fails, but not read

Reading looks names up in tables; it imports and evaluates nothing.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from graphshard._torch import dispatcher_operators, fake_tensor, new_fake_mode
from graphshard.errors import ArgumentError

_GETITEM = "getitem"
# Types whose values are attributes of torch, such as torch.float32 and torch.strided.
_TAGS: dict[type, str] = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


def short_name(value: torch.dtype | torch.layout | torch.memory_format) -> str:
    """The name within torch: "float32"."""
    return str(value).removeprefix("torch.")


_NAMED: dict[str, dict[str, Any]] = {
    tag: {short_name(value): value for value in vars(torch).values() if isinstance(value, kind)}
    for kind, tag in _TAGS.items()
}


def encode(value: Any) -> Any:
    """A value as plain JSON; never fails."""
    if isinstance(value, Node):
        return {"node": value.name}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        shape, stride = ([encode(size) for size in sizes] for sizes in (value.shape, value.stride()))
        return {"tensor": [short_name(value.dtype), shape, stride, str(value.device)]}
    if isinstance(value, slice):
        return {"slice": [encode(item) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    tag = _TAGS.get(type(value))
    return {tag: short_name(value)} if tag else {"unsupported": type(value).__name__}


def encode_target(target: Any) -> str:
    """The operator a node calls, as "aten.mm.default"."""
    return _GETITEM if target is operator.getitem else str(target)


@dataclass
class Decoder:
    """Reads the values of one file; its fake tensors share a mode.

    Attributes:
        nodes: nodes by name, those that references may name.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    _operators: frozenset[str] = field(default_factory=dispatcher_operators)
    _mode: Any = field(default_factory=new_fake_mode)

    def value(self, data: Any) -> Any:
        """Inverse of `encode`.

        Raises:
            ArgumentError: nothing is written so, or it names something that is not there.
        """
        if data is None or isinstance(data, (bool, int, float, str)):
            return data
        if isinstance(data, list):
            return [self.value(item) for item in data]
        tag, content = next(iter(data.items())) if len(data) == 1 else ("", None)
        if tag in _NAMED:
            return named(tag, content)
        if tag == "unsupported":
            raise ArgumentError(f"a value of type {content} cannot be stored, so that the program cannot be read again")
        read: dict[str, Callable[[Any], Any]] = {
            "node": self._node,
            "tensor": self._tensor,
            "tuple": lambda items: tuple(map(self.value, items)),
            "slice": lambda items: slice(*map(self.value, items)),
            "complex": lambda items: complex(*map(self.value, items)),
            "float": _float,
            "device": torch.device,
        }
        if tag not in read:
            raise ArgumentError(f"{json.dumps(data)[:60]} is no value")
        return read[tag](content)

    def target(self, name: str) -> Callable[..., Any]:
        """The operator of a name; only those that the dispatcher knows."""
        if name == _GETITEM:
            return operator.getitem
        namespace, _, rest = name.partition(".")
        operator_name, _, overload = rest.partition(".")
        known = f"{namespace}::{operator_name}" + (f".{overload}" if overload != "default" else "")
        if known not in self._operators:
            raise ArgumentError(f"unknown operator {name}: import the library that registers it (--import MODULE)")
        found = getattr(getattr(getattr(torch.ops, namespace), operator_name), overload)
        assert isinstance(found, torch._ops.OpOverload)
        return found

    def _node(self, name: str) -> Node:
        if name not in self.nodes:
            raise ArgumentError(f"the value {name!r} is used before it is computed")
        return self.nodes[name]

    def _tensor(self, data: Any) -> torch.Tensor:
        dtype, shape, stride, device = data
        sizes = [size for size in (*shape, *stride) if type(size) is not int or size < 0]
        if sizes or len(shape) != len(stride):
            raise ArgumentError(f"a tensor of shape {shape} and strides {stride} cannot be made")
        return fake_tensor(self._mode, shape, stride, named("dtype", dtype), torch.device(device))


def named(tag: str, name: Any) -> Any:
    """A dtype, layout or memory format by its name."""
    if name not in _NAMED[tag]:
        raise ArgumentError(f"torch has no {tag} {name!r}")
    return _NAMED[tag][name]


def _float(text: str) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise ArgumentError(f"{text!r} is no infinity")
    return float(text)
