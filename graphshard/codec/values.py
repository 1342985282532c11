"""Values of a graph as plain JSON: what nodes are given and what they make.

    None, bools, numbers, strings, lists     themselves
    {"node": "mm"}                           another node's value
    {"tuple": [1, 2]}  {"slice": [0, 4, 1]}  {"complex": [0.0, 1.0]}  {"float": "-inf"}
    {"dtype": "float32"}  {"device": "cuda:0"}  {"layout": "strided"}  {"memory_format": "contiguous_format"}
    {"operator": "aten.bernoulli.p"}
    {"tensor": ["float32", [4, 4], [4, 1], "cpu"]}    a fake tensor: dtype, shape, stride, device; no values
    {"size": "s0*s1"}                        a dynamic number, by the names of the program's sizes
    {"dict": {"BACKEND": "AUTO"}}            with strings as keys
    {"graph": [...]}                         a graph that a higher-order operator is given, node by node
    {"unsupported": "Generator"}             anything else: it is written, so that a dump never fails, but not read

Reading looks names up in tables; it imports and evaluates nothing.
"""

from __future__ import annotations

import functools
import json
import keyword
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from graphshard.codec.sizes import SIZE_OPERATORS, parse_size
from graphshard.errors import ArgumentError
from graphshard.ir.plain import typed
from graphshard.ir.sizes import SymNumber, rename
from graphshard.ir.subgraph import HIGHER_ORDER
from graphshard.torch_compat.aot_autograd import run_and_save_rng_state, run_with_rng_state
from graphshard.torch_compat.fake_tensors import fake_tensor, new_fake_mode
from graphshard.torch_compat.operators import OpOverload, dispatcher_operators

# What a node may call besides the dispatcher's operators.
_TARGETS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "run_and_save_rng_state": run_and_save_rng_state,
    "run_with_rng_state": run_with_rng_state,
    **{f"higher_order.{name}": operator for name, operator in HIGHER_ORDER.items()},
    **{f"size.{function.__name__}": function for function in SIZE_OPERATORS},
}
_NAMES = {target: name for name, target in _TARGETS.items()}
_THEMSELVES = frozenset({type(None), bool, int, str})
# Types whose values are attributes of torch, such as torch.float32 and torch.strided.
_TAGS: dict[type, str] = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


# Types that other files write and read, with the tag, the writer and the reader: graphs are made of values.
CODECS: dict[type, tuple[str, Callable[[Any, Mapping[Any, str]], Any], Callable[[Any, Decoder], Any]]] = {}


@functools.cache
def short_name(value: object) -> str:
    """The name of a dtype, layout or memory format within torch: "float32"."""
    return str(value).removeprefix("torch.")


_NAMED: dict[str, dict[str, Any]] = {
    tag: {short_name(value): value for value in vars(torch).values() if isinstance(value, kind)}
    for kind, tag in _TAGS.items()
}


def encode(value: Any, names: Mapping[Any, str] = MappingProxyType({})) -> Any:
    """A value as plain JSON, with dynamic sizes under the names of their symbols; never fails."""
    if type(value) in _THEMSELVES:
        return value
    if isinstance(value, Node):
        return {"node": value.name}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list):
        return [encode(item, names) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, names) for item in value]}
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return {"tensor": [short_name(value.dtype), *_shape_and_stride(value, names), str(value.device)]}
    if isinstance(value, slice):
        return {"slice": [encode(item) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, OpOverload):
        return {"operator": str(value)}
    if isinstance(value, SymNumber):
        return {"size": rename(value, names)}
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {"dict": {key: encode(item, names) for key, item in value.items()}}
    if type(value) in CODECS:
        known, write, _ = CODECS[type(value)]
        return {known: write(value, names)}
    tag = _TAGS.get(type(value))
    return {tag: short_name(value)} if tag else unsupported(value)


def unsupported(value: object) -> dict[str, str]:
    """Stands for a value that a file cannot hold."""
    return {"unsupported": type(value).__name__}


# In one line; what is no JSON is marked.
to_json = json.JSONEncoder(allow_nan=False, default=unsupported).encode


def _shape_and_stride(tensor: torch.Tensor, names: Mapping[Any, str]) -> tuple[list[Any], list[Any]]:
    shape, stride = list(tensor.shape), list(tensor.stride())
    if any(type(size) is not int for size in (*shape, *stride)):
        return [encode(size, names) for size in shape], [encode(size, names) for size in stride]
    return shape, stride


def encode_target(target: Any) -> str:
    """The operator a node calls, as "aten.mm.default"."""
    return _NAMES.get(target, str(target))


@dataclass
class Decoder:
    """Reads the values of one file; its fake tensors share a mode.

    Attributes:
        nodes: nodes by name, those that references may name.
        sizes: dynamic sizes by name.
        mode: the mode of the fake tensors.
        regions: names of the regions that a lowered graph may call.
        device: takes the place of devices of its kind; None leaves them as they are written.
        module_of: makes the module of a graph.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    mode: Any = field(default_factory=new_fake_mode)
    regions: frozenset[str] = frozenset()
    device: torch.device | None = None
    module_of: Callable[[Graph], GraphModule] = lambda graph: GraphModule(nn.Module(), graph)

    _targets: dict[str, Callable[..., Any]] = field(default_factory=lambda: dict(_TARGETS))

    @functools.cached_property
    def _operators(self) -> frozenset[str]:
        return dispatcher_operators()

    def value(self, data: Any) -> Any:
        """Inverse of `encode`.

        Raises:
            ArgumentError: nothing is written so, or it names something that is not there.
        """
        if type(data) in _THEMSELVES or type(data) is float:
            return data
        if isinstance(data, list):
            return [self.value(item) for item in data]
        tag: str
        content: Any
        tag, content = next(iter(data.items())) if len(data) == 1 else ("", None)
        if tag in _NAMED:
            return named(tag, content)
        match tag:
            case "node":
                return self.node(content)
            case "tensor":
                return self._tensor(*content)
            case "tuple":
                return tuple(map(self.value, content))
            case "dict":
                return {typed(key, str): self.value(item) for key, item in typed(content, dict).items()}
            case "slice":
                return slice(*map(self.value, content))
            case "complex":
                return complex(*map(self.value, content))
            case "float" if content in ("inf", "-inf", "nan"):
                return float(content)
            case "device":
                return self._device(content)
            case "size":
                return parse_size(content, self.sizes)
            case "operator":
                return self.target(content)
            case "unsupported":
                raise ArgumentError(f"it holds a value of type {content}, which a file cannot hold")
        for known, _, read in CODECS.values():
            if tag == known:
                return read(content, self)
        raise ArgumentError(f"{json.dumps(data)[:60]} is no value")

    def target(self, name: str) -> Callable[..., Any]:
        """The operator of a name; only those that the dispatcher knows."""
        if name not in self._targets:
            self._targets[name] = self._find(name)
        return self._targets[name]

    def _find(self, name: str) -> Callable[..., Any]:
        namespace, _, rest = name.partition(".")
        operator_name, _, overload = rest.partition(".")
        known = f"{namespace}::{operator_name}" + (f".{overload}" if overload != "default" else "")
        if known not in self._operators:
            raise ArgumentError(f"unknown operator {name}: import the library that registers it (--import MODULE)")
        found = getattr(getattr(getattr(torch.ops, namespace), operator_name), overload)
        assert isinstance(found, OpOverload)
        return found

    def node(self, name: str) -> Node:
        """One of those that were read before; raises `ArgumentError` if there is none of a name."""
        if name not in self.nodes:
            raise ArgumentError(f"the value {name!r} is used before it is computed")
        return self.nodes[name]

    def _tensor(self, dtype: str, shape: list[int], stride: list[int], device: str) -> torch.Tensor:
        if not all(type(size) is int and size >= 0 for size in (*shape, *stride)):
            shape, stride = ([self._extent(size) for size in sizes] for sizes in (shape, stride))
        if len(shape) != len(stride):
            raise ArgumentError(f"a tensor of shape {shape} and strides {stride} cannot be made")
        return fake_tensor(self.mode, shape, stride, named("dtype", dtype), self._device(device))

    def _extent(self, data: Any) -> Any:
        size = self.value(data)
        if not isinstance(size, torch.SymInt) and (type(size) is not int or size < 0):
            raise ArgumentError(f"a tensor with a size or stride of {size} cannot be made")
        return size

    def _device(self, name: str) -> torch.device:
        device = torch.device(name)
        return self.device if self.device is not None and self.device.type == device.type else device


def named(tag: str, name: Any) -> Any:
    """A dtype, layout or memory format by its name."""
    if name not in _NAMED[tag]:
        raise ArgumentError(f"torch has no {tag} {name!r}")
    return _NAMED[tag][name]


def identifier(name: Any) -> str:
    """A name that torch.fx may write into the source it makes of a graph."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ArgumentError(f"{str(name)[:60]!r} is no identifier")
    return name


def strings(values: Any) -> list[str]:
    return [typed(value, str) for value in typed(values, list)]
