"""How each type of a field is written in a file and read from one: `write` and `read`.

    number, text, tuple, list, set, dict, dataclass    by `ir/plain.py`; a dataclass by its fields
    torch.dtype, device, operator                       "float32", "cuda", {"operator": "aten.mm.default"}
    tensor, dynamic size                                see `codec/values.py`; a tensor's values are not stored
    graph                                               its nodes, see `codec/graphs.py`
    structure of inputs or outputs                      text, see `codec/structures.py`
    planner                                             {"class": "...by_unit:PlanByUnit", "options": {...}}
    profile                                             text of its file

A field of any other type is written as `{"unsupported": "Generator"}`, so that a dump never fails, and not read. Only
graphshard's own passes and planners are made again; a file can name no other class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import is_dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from cattrs import Converter
from cattrs.gen import override
from torch import nn
from torch.fx import Graph, GraphModule

from graphshard import passes
from graphshard.codec.graphs import check_phase, decode_graph, encode_graph
from graphshard.codec.structures import decode_structure, describe_structure, described_structure, encode_structure
from graphshard.codec.values import Decoder, encode, named, short_name, strings, unsupported
from graphshard.cost.profile import Profile
from graphshard.errors import ArgumentError, ArtifactError
from graphshard.frontend.signature import Signature
from graphshard.ir import plain
from graphshard.ir.plain import Overrides, class_reader, new_converter, typed
from graphshard.ir.program import Extent, Phase, Planner, Program, Region, Size, Stage
from graphshard.passes import Pass
from graphshard.passes.activation_checkpointing import Activation
from graphshard.schedule.agreed import AgreedPlanner
from graphshard.schedule.by_cost import PlanByCost
from graphshard.schedule.by_unit import PlanByUnit
from graphshard.torch_compat.operators import OpOverload, pytree
from graphshard.utils.text import brief

T = TypeVar("T")


def class_name(kind: type) -> str:
    """How a class is named in a file: "package.module:ClassName"."""
    return f"{kind.__module__}:{kind.__qualname__}"


PASSES: dict[str, type[Pass]] = {
    class_name(kind): kind for kind in (getattr(passes, name) for name in passes.__all__) if kind is not Pass
}
_PLANNERS: dict[str, type] = {class_name(kind): kind for kind in (PlanByUnit, PlanByCost)}
# Inputs of these types can be in a file.
_CONSTANTS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(int, float, complex, bool, str, type(None), slice),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
}


# What the file that is written or read now calls its dynamic sizes, by symbol, and what reads the values of its graphs.
_NAMES: ContextVar[Mapping[Any, str]] = ContextVar("names")
_DECODER: ContextVar[Decoder] = ContextVar("decoder")


def write(value: Any, names: Mapping[Any, str] = MappingProxyType({})) -> Any:
    """Whatever a file holds as plain data; `names` are those of its dynamic sizes, by symbol."""
    token = _NAMES.set(names)
    try:
        return _CONVERTER.unstructure(value)
    finally:
        _NAMES.reset(token)


def read(data: Any, kind: type[T], decoder: Decoder | None = None) -> T:
    """Inverse of `write`; `decoder` knows the dynamic sizes of the file, and where its tensors are to be.

    Raises:
        ArgumentError: nothing of this class is written so; the message begins with the place of the fault.
        ArtifactError: it needs a class that this process lacks.
    """
    token = _DECODER.set(decoder or Decoder())
    try:
        return plain.read(data, kind, _CONVERTER)
    finally:
        _DECODER.reset(token)


def _encode(value: Any) -> Any:
    return encode(value, _NAMES.get())


def _decode(data: Any, kind: type[T]) -> T:
    """A value of a graph, if it is of a class."""
    value = _DECODER.get().value(data)
    if not isinstance(value, kind):
        raise ArgumentError(f"{str(data)[:60]} is no {kind.__name__}")
    return value


def _encode_size(size: Size) -> dict[str, Any]:
    """By the name of its symbol, as it is a size even where compilation has found that it is always the same."""
    return {"name": size.name, "source": list(size.source), "value": {"size": _NAMES.get()[size.symbol]}}


def _decode_extent(data: Any, _: Any) -> Extent:
    value = data if type(data) is int else _DECODER.get().value(data)
    return value if type(value) is int else _decode(data, torch.SymInt)


def _decode_number(data: Any, _: Any) -> Any:
    """Read what stands for a size, or for a float that is an input of a call."""
    value = _DECODER.get().value(data)
    return value if isinstance(value, torch.SymFloat) else _decode(data, torch.SymInt)


def _decode_module(data: Any, _: Any) -> GraphModule:
    decoder = _DECODER.get()
    return decoder.module_of(decode_graph(data, decoder))


def _empty_regions(keys: Any, _: Any) -> dict[str, Region]:
    """Regions by key; what is in them is in files of their own."""
    return {key: Region(key, "", GraphModule(nn.Module(), Graph())) for key in strings(keys)}


def _encode_inputs(inputs: tuple[tuple[Any, ...], ...]) -> list[dict[str, Any]]:
    """What a signature distinguishes of inputs, see `capture.signature.leaf_key`."""
    return [_encode_input(*key) for key in inputs]


def _encode_input(first: Any, second: Any, *rest: Any) -> dict[str, Any]:
    if not rest:
        if first not in _CONSTANTS.values():
            raise ArtifactError(
                f"an input of the call is {brief(second)}, of type {first.__name__}, which no file can hold. Pass a "
                "number or a string in its place."
            )
        return {"type": first.__name__, "value": encode(second)}
    dtype, requires_grad = rest
    return {"shape": list(first), "stride": list(second), "dtype": short_name(dtype), "requires_grad": requires_grad}


def _decode_inputs(data: Any, _: Any) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(_decode_input, typed(data, list)))


def _decode_input(data: dict[str, Any]) -> tuple[Any, ...]:
    if "type" in data:
        return _CONSTANTS[data["type"]], _DECODER.get().value(data["value"])
    sizes = (tuple(typed(size, int) for size in data[name]) for name in ("shape", "stride"))
    return (*sizes, named("dtype", data["dtype"]), typed(data["requires_grad"], bool))


def _encode_planner(planner: Any) -> Any:
    if isinstance(planner, AgreedPlanner):
        return _encode_planner(planner.planner)
    if not is_dataclass(planner):
        return unsupported(planner)
    return {"class": class_name(type(planner)), "options": _CONVERTER.unstructure(planner)}


def _decode_planner(data: Any, _: Any) -> Planner:
    if typed(data, dict).keys() != {"class", "options"}:
        raise ArgumentError(f"{str(data)[:60]} is no planner")
    if data["class"] not in _PLANNERS:
        raise ArgumentError(f"{data['class']} is not graphshard's own")
    return _CONVERTER.structure(data["options"], _PLANNERS[data["class"]])


def _decode_activation(data: Any, _: Any) -> Activation:
    if isinstance(data, list):
        return tuple(item if isinstance(item, str) else _decode(item, OpOverload) for item in data)
    if isinstance(data, str) and data not in ("full", "auto"):
        raise ArgumentError(f"{data[:60]!r} is no activation policy")
    return data if data in ("full", "auto") else _CONVERTER.structure(data, float)


# Times differ from run to run, and the texts of earlier stages have files of their own.
_OVERRIDES: Overrides = {
    Program: {
        "lowering_seconds": override(unstruct_hook=lambda _: 0.0),
        "regions": override(unstruct_hook=list, struct_hook=_empty_regions),
        "trace": override(unstruct_hook=lambda _: None, struct_hook=lambda *_: None),  # of this process
    },
    Stage: {"text": override(unstruct_hook=lambda _: ""), "seconds": override(unstruct_hook=lambda _: 0.0)},
    Phase: {"module": override(rename="nodes")},
    Region: {"module": override(rename="nodes")},
    Signature: {
        "structure": override(
            unstruct_hook=lambda spec: encode_structure(spec, "inputs"),
            struct_hook=lambda text, _: decode_structure(text, "inputs"),
        ),
        "inputs": override(unstruct_hook=_encode_inputs, struct_hook=_decode_inputs),
        "autocast": override(unstruct_hook=encode, struct_hook=lambda data, _: _DECODER.get().value(data)),
    },
}


def _converter() -> Converter:
    """With a way for each type that is no plain data."""
    converter = new_converter(_OVERRIDES, otherwise=lambda _: unsupported)
    ways: dict[Any, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
        torch.dtype: (short_name, lambda data, _: named("dtype", data)),
        torch.device: (str, lambda data, _: torch.device(typed(data, str))),
        torch.Tensor: (_encode, _decode),
        torch.SymInt: (_encode, _decode_number),
        OpOverload: (_encode, _decode),
        GraphModule: (lambda module: encode_graph(module.graph, _NAMES.get()), _decode_module),
        pytree.TreeSpec: (describe_structure, lambda data, _: described_structure(data)),
        Profile: (Profile.to_json, lambda data, _: Profile.from_json(typed(data, str))),
        Extent: (_encode, _decode_extent),
    }
    for kind, (unstructure, structure) in ways.items():
        converter.register_unstructure_hook(kind, unstructure)
        converter.register_structure_hook(kind, structure)
    converter.register_structure_hook(Activation, _decode_activation)
    converter.register_unstructure_hook(Size, _encode_size)
    converter.register_unstructure_hook_func(lambda kind: kind == Planner, _encode_planner)
    converter.register_structure_hook_func(lambda kind: kind == Planner, _decode_planner)
    read_phase = class_reader(Phase, converter, _OVERRIDES)
    converter.register_structure_hook(Phase, lambda data, kind: check_phase(read_phase(data, kind)))
    return converter


_CONVERTER = _converter()
