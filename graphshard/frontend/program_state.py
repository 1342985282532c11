"""Parameters, buffers and constants of an exported program, tied as they were, checked against its graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from graphshard.ir.errors import ArgumentError, UnsupportedError
from graphshard.ir.text import brief
from graphshard.ir.torch_internals import FakeTensor


@dataclass
class ProgramState:
    """Tensors of a program by their names.

    Attributes:
        tensors: in the order of the state dict; tied ones are one object.
        names: all names of the tensor of an input of the graph, by the name of the input.
        constants: names of tensors that are neither parameters nor buffers.
        transient: names of buffers that are not in the state dict.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    transient: set[str] = field(default_factory=set)


def state_of(program: ExportedProgram) -> ProgramState:
    """Return the tensors of a program. Buffers and constants are copied, as training writes them.

    Raises:
        ArgumentError: one is missing, or not what the graph takes.
        UnsupportedError: the program holds something besides tensors.
    """
    _check(program)
    state = ProgramState()
    known: dict[Any, torch.Tensor] = {}
    names: dict[int, list[str]] = {}
    buffers = {s.target: s.persistent for s in program.graph_signature.input_specs if s.kind is InputKind.BUFFER}
    for name, tensor in (*program.state_dict.items(), *program.constants.items()):
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedError(
                f"model: the program holds {name}, a {type(tensor).__name__}, and graphshard takes tensors only. "
                "Compile the module that was exported instead."
            )
        tensor = _without_fakes(tensor)
        key = _place(tensor)
        if key not in known:
            known[key] = tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
        state.tensors[name] = known[key]
        names.setdefault(id(known[key]), []).append(name)
        if name in program.constants:
            (state.transient if name in buffers else state.constants).add(name)
    for spec in program.graph_signature.input_specs:
        if spec.target is not None and spec.target in state.tensors:
            state.names[spec.arg.name] = tuple(names[id(state.tensors[spec.target])])
    return state


def _without_fakes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the meta device, if it is one that holds no values."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are one: a file has each name of a tied parameter as a tensor of its own."""
    if tensor.is_meta or type(tensor) not in (torch.Tensor, nn.Parameter):  # all on meta have one address in a file
        return (id(tensor),)
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), isinstance(tensor, nn.Parameter)


def _check(program: ExportedProgram) -> None:
    """Raise ArgumentError unless the state dict fits the graph."""
    held: Mapping[str, Any] = {**program.constants, **program.state_dict}
    placeholders = program.graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind in (InputKind.USER_INPUT, InputKind.CUSTOM_OBJ, InputKind.TOKEN):
            if spec.kind is not InputKind.USER_INPUT:
                raise UnsupportedError(
                    f"model: the program takes {spec.target or spec.arg.name}, which is not a tensor. Compile the "
                    "module that was exported instead."
                )
            continue
        name, expected = spec.target, node.meta["val"]
        found = held.get(name) if name is not None else None
        kind = spec.kind.name.lower().replace("_", " ")
        if found is None:
            raise ArgumentError(
                f"model: {kind} {name} is not in the program's state_dict. It has {brief(list(program.state_dict))}. "
                "Put it back, or export the module again."
            )
        if isinstance(found, torch.Tensor) and (found.shape, found.dtype) != (expected.shape, expected.dtype):
            raise ArgumentError(
                f"model: {kind} {name} has shape {list(found.shape)} and dtype {found.dtype} in the program's "
                f"state_dict, and {list(expected.shape)} and {expected.dtype} in its graph. Put back what was there, "
                "or export the module again."
            )
