"""How each type of a field is written to JSON and read back: `write` and `read`.

    number, text, tuple, list, set, dict, dataclass    by `utils/json_dataclasses.py`; a dataclass by its fields
    torch.dtype, device, operator                       "float32", "cuda", {"operator": "aten.mm.default"}
    tensor, dynamic size, graph                         see `codec/graph_format.py`; no tensor's values are stored
    structure of inputs or outputs                      pytree's own JSON
    planner                                             {"class": "...by_unit:PlanByUnit", "options": {...}}
    profile                                             text of its file
    cubin of a kernel                                   hash of its content, which is a separate member

A field of any other type is written as `{"unsupported": "Generator"}`, so that a dump never fails, and is not read. A
file can name only graphshard's own passes and planners, and pytree classes that are registered: nothing is imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from cattrs import Converter
from cattrs.gen import override
from torch import nn
from torch.fx import Graph, GraphModule, Node

from graphshard import passes
from graphshard.codec.graph_format import (
    Decoder,
    encode,
    encode_graph,
    identifier,
    named,
    short_name,
    strings,
    to_json,
    unsupported,
)
from graphshard.cost.profile import Profile
from graphshard.cross.gpu_kernels import GpuCode, Kernel
from graphshard.errors import ArgumentError, ArtifactError
from graphshard.frontend.signature import Signature
from graphshard.ir.program import Phase, Planner, Program, Region, Size, Stage
from graphshard.passes import Pass
from graphshard.passes.activation_checkpointing import Activation
from graphshard.schedule.fsdp2_order import PlanByUnit
from graphshard.schedule.planner import PlanByCost
from graphshard.schedule.rank_consistent_planner import AgreedPlanner
from graphshard.torch_compat.torch_ops import OpOverload, pytree
from graphshard.utils import json_dataclasses
from graphshard.utils.json_dataclasses import Overrides, class_reader, new_converter, typed
from graphshard.utils.text import brief

T = TypeVar("T")


def class_name(kind: type) -> str:
    """Return the name of a class in a file: "package.module:ClassName"."""
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
# Names of dynamic sizes in the file that is being written, by symbol, and reader of the values of one that is read.
_NAMES: ContextVar[Mapping[Any, str]] = ContextVar("names")
_DECODER: ContextVar[Decoder] = ContextVar("decoder")


def write(value: Any, names: Mapping[Any, str] = MappingProxyType({})) -> Any:
    """Return a value as plain data; `names` has the names of its dynamic sizes, by symbol."""
    token = _NAMES.set(names)
    try:
        return _CONVERTER.unstructure(value)
    finally:
        _NAMES.reset(token)


def read(data: Any, kind: type[T], decoder: Decoder | None = None) -> T:
    """Inverse of `write`; `decoder` knows the dynamic sizes of the file, and the device of its tensors.

    Raises:
        ArgumentError: `write` makes no such data of this class; the message begins with the place of the fault.
        ArtifactError: it needs a class that this process lacks.
    """
    token = _DECODER.set(decoder or Decoder())
    try:
        return json_dataclasses.read(data, kind, _CONVERTER)
    finally:
        _DECODER.reset(token)


def _encode(value: Any) -> Any:
    return encode(value, _NAMES.get())


def _decode(data: Any, kind: type[T]) -> T:
    value = _DECODER.get().value(data)
    if not isinstance(value, kind):
        raise ArgumentError(f"{str(data)[:60]} is no {kind.__name__}")
    return value


# --- sizes, graphs, kernels --------------------------------------------------------------------------------------


def _decode_number(data: Any, _: Any) -> Any:
    """Read a size, or a float that is an input of a call."""
    value = _DECODER.get().value(data)
    return value if isinstance(value, torch.SymFloat) else _decode(data, torch.SymInt)


def _check_phase(phase: Phase) -> Phase:
    """Return a phase that was read; raise ArgumentError if its slots do not match its graph."""
    if len(phase.placeholders) != len(phase.inputs) or len(phase.results) != len(phase.outputs):
        raise ArgumentError("a graph has not one slot for each input and output")
    for value, slot in zip(phase.results, phase.outputs, strict=True):
        if slot.kind == "saved" and not isinstance(value, Node):
            raise ArgumentError(f"the saved value {slot.name!r} is none")
    return phase


def cubin_name(content: bytes) -> str:
    """Return the name of a cubin in a file."""
    return hashlib.sha256(content).hexdigest()[:32]


def _decode_kernels(data: Any, _: Any) -> dict[str, Kernel]:
    return {identifier(name): _CONVERTER.structure(row, Kernel) for name, row in typed(data, dict).items()}


# --- signatures and structures -----------------------------------------------------------------------------------


def _encode_input(first: Any, second: Any, *rest: Any) -> dict[str, Any]:
    """Return what a signature distinguishes of an input, see `leaf_key`."""
    if not rest:
        if first not in _CONSTANTS.values():
            raise ArtifactError(
                f"an input of the call is {brief(second)}, of type {first.__name__}, which no file can hold. Pass "
                "tensors, numbers and strings, in dicts, lists and tuples."
            )
        return {"type": first.__name__, "value": encode(second)}
    dtype, requires_grad = rest
    return {"shape": list(first), "stride": list(second), "dtype": short_name(dtype), "requires_grad": requires_grad}


def _decode_input(data: dict[str, Any]) -> tuple[Any, ...]:
    if "type" in data:
        return _CONSTANTS[data["type"]], _DECODER.get().value(data["value"])
    sizes = (tuple(typed(size, int) for size in data[name]) for name in ("shape", "stride"))
    return (*sizes, named("dtype", data["dtype"]), typed(data["requires_grad"], bool))


class UnknownOutput:
    """Stand-in in a treespec for classes that could not be stored; its context is the text."""


_OF_PYTHON = frozenset({"builtins.list", "builtins.tuple", "builtins.dict", "collections.OrderedDict"})


def encode_structure(spec: pytree.TreeSpec, what: str = "") -> str:
    """Return a structure as text; raise ArtifactError if a class in it does not say how it is stored.

    `what`, "inputs" or "outputs", is for the message; "" writes a description of what cannot be stored.
    """
    if spec.type is UnknownOutput:
        return str(spec.context)
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError) as error:
        if not what:
            return f"not stored: {spec}"
        raise ArtifactError(
            f"the structure of the {what} cannot be stored: {error} Register the class with a serialized_type_name, "
            "or return and pass tuples, lists and dicts."
        ) from None


def decode_structure(text: Any, what: str) -> pytree.TreeSpec:
    """Inverse of `encode_structure`; raise ArtifactError if it has a class that is not registered here."""
    unknown = sorted(_types(text) - set(pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE))
    if unknown:
        raise ArtifactError(
            f"the {what} hold a {unknown[0]}, which is not registered with torch.utils._pytree in this process. Import "
            "the module that defines it before loading."
        )
    return pytree.treespec_loads(text)


def _describing_structure(text: Any, _: Any) -> pytree.TreeSpec:
    """Return a structure of Python's own classes, or one that stands for it."""
    with contextlib.suppress(ArtifactError, ValueError):
        if _types(text) <= _OF_PYTHON:
            return pytree.treespec_loads(text)
    return pytree.TreeSpec(UnknownOutput, typed(text, str), [])


def _types(text: Any) -> set[str]:
    """Return the classes in a structure, by pytree's names; raise ArtifactError if reading it would import a module."""
    found = set()

    def check(part: dict[str, Any]) -> None:
        if "__enum__" in part or part.get("default_factory_module", "builtins") != "builtins":
            raise ArtifactError("the structure of inputs or outputs names a module to import. It is not loaded.")
        if "children_spec" in part:
            found.add(part["type"])
            if isinstance(part["context"], str):  # JSON within JSON
                json.loads(part["context"], object_hook=check)

    json.loads(typed(text, str), object_hook=check)
    return found - {None}


# --- passes and planners -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NextPass:
    """The pass that ran on a stage; `step` is None if it cannot be made from the file, and `problem` says why."""

    name: str
    class_name: str
    step: Pass | None
    problem: str = ""


def encode_pass(step: Pass) -> dict[str, Any]:
    """Return a pass as JSON; options that cannot be stored are marked."""
    try:
        options = json.loads(to_json(write(step)))
    except Exception:  # fields of a user's pass may be anything
        options = {field.name: unsupported(getattr(step, field.name)) for field in fields(step)}
    return {"name": step.name, "class": class_name(type(step)), "options": options}


def decode_pass(data: dict[str, Any]) -> NextPass:
    """Inverse of `encode_pass`; raise ArgumentError if it is not a pass at all."""
    try:
        name, kind, options = str(data["name"]), str(data["class"]), data["options"]
    except (KeyError, TypeError):
        raise ArgumentError('not a stage that can be read: "next" is no pass') from None
    try:
        if kind not in PASSES:
            raise ArgumentError(f"{kind} is not graphshard's own")
        for key, option in options.items() if isinstance(options, dict) else ():
            if isinstance(option, dict) and "unsupported" in option:
                raise ArgumentError(f"its option {key} is a {option['unsupported']}, which a file cannot hold")
        return NextPass(name, kind, read(options, PASSES[kind]))
    except ArgumentError as error:
        return NextPass(name, kind, None, str(error))


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


# --- the converter -----------------------------------------------------------------------------------------------

# Times differ from run to run, and the texts of earlier stages have separate files.
_OVERRIDES: Overrides = {
    Program: {
        "lowering_seconds": override(unstruct_hook=lambda _: 0.0),
        "region_seconds": override(unstruct_hook=lambda _: {}),
        # Their content is in other members.
        "regions": override(
            unstruct_hook=list,
            struct_hook=lambda keys, _: {k: Region(k, "", GraphModule(nn.Module(), Graph())) for k in strings(keys)},
        ),
        # Of this process.
        **dict.fromkeys(
            ("trace", "eager", "returned"), override(unstruct_hook=lambda _: None, struct_hook=lambda *_: None)
        ),
    },
    Stage: {"text": override(unstruct_hook=lambda _: ""), "seconds": override(unstruct_hook=lambda _: 0.0)},
    Phase: {"module": override(rename="nodes")},
    Region: {"module": override(rename="nodes")},
    GpuCode: {"kernels": override(struct_hook=_decode_kernels)},
    Kernel: {
        "cubin": override(unstruct_hook=cubin_name, struct_hook=lambda name, _: _DECODER.get().cubins[name]),
    },
    Signature: {
        "structure": override(
            unstruct_hook=lambda spec: encode_structure(spec, "inputs"),
            struct_hook=lambda text, _: decode_structure(text, "inputs"),
        ),
        "inputs": override(
            unstruct_hook=lambda keys: [_encode_input(*key) for key in keys],
            struct_hook=lambda data, _: tuple(map(_decode_input, typed(data, list))),
        ),
        "autocast": override(unstruct_hook=encode, struct_hook=lambda data, _: _DECODER.get().value(data)),
    },
}


def _converter() -> Converter:
    """Return a converter with hooks for each type that is not plain data."""
    converter = new_converter(_OVERRIDES, otherwise=lambda _: unsupported)
    hooks: dict[Any, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
        torch.dtype: (short_name, lambda data, _: named("dtype", data)),
        torch.device: (str, lambda data, _: torch.device(typed(data, str))),
        torch.Tensor: (_encode, _decode),
        torch.SymInt: (_encode, _decode_number),
        OpOverload: (_encode, _decode),
        Graph: (lambda graph: encode_graph(graph, _NAMES.get()), lambda data, _: _DECODER.get().graph(data)),
        GraphModule: (
            lambda module: encode_graph(module.graph, _NAMES.get()),
            lambda data, _: _DECODER.get().module_of(_DECODER.get().graph(data)),
        ),
        pytree.TreeSpec: (encode_structure, _describing_structure),
        Profile: (Profile.to_json, lambda data, _: Profile.from_json(typed(data, str))),
    }
    for kind, (unstructure, structure) in hooks.items():
        converter.register_unstructure_hook(kind, unstructure)
        converter.register_structure_hook(kind, structure)
    converter.register_structure_hook(Activation, _decode_activation)
    # A size stays one even where compilation has found that it is constant, so its symbol is named.
    converter.register_unstructure_hook(
        Size,
        lambda size: {"name": size.name, "source": list(size.source), "value": {"size": _NAMES.get()[size.symbol]}},
    )
    converter.register_unstructure_hook_func(lambda kind: kind == Planner, _encode_planner)
    converter.register_structure_hook_func(lambda kind: kind == Planner, _decode_planner)
    read_phase = class_reader(Phase, converter, _OVERRIDES)
    converter.register_structure_hook(Phase, lambda data, kind: _check_phase(read_phase(data, kind)))
    return converter


_CONVERTER = _converter()
