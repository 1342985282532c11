"""What options mean for the parameters of a model: its units, precision and parameter table, as a capture needs them.

`compile` runs with it, `explain` predicts with it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graphshard.frontend.signature import CaptureSpec
from graphshard.ir.device_meshes import ExpertMeshes
from graphshard.ir.errors import ArgumentError, UnsupportedError
from graphshard.ir.given import is_int
from graphshard.ir.make_table import build_table
from graphshard.ir.mesh import Mesh
from graphshard.ir.params import ParamRow, ParamTable
from graphshard.ir.precision import precision_of
from graphshard.ir.text import brief
from graphshard.ir.units import find_units
from graphshard.options.checks import check_ignored, check_params, check_placements, placements_of
from graphshard.options.options import Options


def capture_spec(
    model: nn.Module,
    options: Options,
    mesh: Mesh,
    device: torch.device,
    known: Mapping[nn.Parameter, ParamRow] = MappingProxyType({}),
    tensor: DeviceMesh | None = None,
    experts: ExpertMeshes | None = None,
    answers: Mapping[str, Any] | None = None,
    whole: DeviceMesh | None = None,
) -> CaptureSpec:
    """What a capture of a model that is to be sharded depends on.

    Args:
        mesh: the axes to shard and to replicate over.
        device: what programs are captured for.
        known: parameters of parts of the model that are sharded already.
        tensor: the tensor axis, inside of those of `mesh`, if there is one.
        experts: where parameters are that lie otherwise on the ranks, if there are such.
        answers: of `shard_placement_fn`, if it was asked already.
        whole: the mesh of all axes, if parts of the model have DTensors on it.

    Raises:
        ArgumentError: an option does not fit the model or the mesh, or a parameter cannot be sharded.
        UnsupportedError: parameters are to be gathered again among neighbours, and there are experts.
    """
    units = find_units(model, options.units)
    precision = precision_of(options.mp_policy, units)
    mesh = _with_regather(mesh, options.reshard_after_forward)
    if tensor is not None:
        mesh = mesh.with_tensors(tensor)
    if experts is not None:
        if mesh.regather is not None:
            raise UnsupportedError(
                f"reshard_after_forward={options.reshard_after_forward} with parameters on another mesh, as experts "
                "are, is not supported. Give True or False."
            )
        mesh = mesh.with_experts(experts.mesh)
    check_fit(options, model, units, mesh)
    ignored = check_ignored(model, options.ignored_params)
    distributed = tensor is not None or experts is not None
    check_params(model, device.type, ignored, known, distributed=distributed, num_ranks=mesh.size)
    if answers is None:
        answers = placements_of(model, options.shard_placement_fn, {*ignored, *known})
    table = build_table(
        model,
        mesh=mesh,
        units=units,
        precision=precision,
        reshard_after_forward=_gathers_again(options),
        dims=check_placements(model, answers),
        ignored=ignored,
        known=known,
        experts=experts.params if experts is not None else (),
    )
    return CaptureSpec(
        table,
        units,
        mesh,
        device,
        precision,
        type(model),
        options.dynamic_shapes,
        tensor=tensor,
        experts=experts,
        whole=_whole_mesh(model, table, known) or whole,
    )


def _whole_mesh(model: nn.Module, params: ParamTable, known: Container[nn.Parameter]) -> DeviceMesh | None:
    """The mesh of all axes, if parameters are DTensors on it before they are sharded."""
    rows = (row for row in params if row.split is not None and row.split.around and not row.expert)
    found = (model.get_parameter(row.name) for row in rows)
    return next((param.device_mesh for param in found if param not in known and isinstance(param, DTensor)), None)


def _gathers_again(options: Options) -> bool | None:
    """Whether backward gathers parameters again, among however many ranks; None leaves it to each unit.

    Where the plan decides what stays gathered, that may be any.
    """
    given = options.reshard_after_forward
    if given is None:
        return True if options.activation == "auto" else None
    return given is True or given > 1


def _with_regather(mesh: Mesh, reshard_after_forward: bool | int | None) -> Mesh:
    """With the neighbours among which backward gathers again, where that is a smaller group than the axis."""
    if is_int(reshard_after_forward) and 1 < reshard_after_forward < mesh.shard.size:
        return mesh.with_regather(reshard_after_forward)
    return mesh


def check_fit(options: Options, model: nn.Module, units: Sequence[str], mesh: Mesh) -> None:
    """Raise ArgumentError for the first option that does not fit a model with these units, or a mesh."""
    reshard, num_shards = options.reshard_after_forward, mesh.shard.size
    if is_int(reshard) and (reshard < 1 or num_shards % reshard):
        divisors = ", ".join(str(n) for n in range(1, num_shards + 1) if num_shards % n == 0)
        raise ArgumentError(
            f"reshard_after_forward={brief(reshard)} must divide the number of ranks that parameters are sharded over, "
            f"{num_shards}. Give one of {divisors}; 1 is False, {num_shards} is True."
        )
    check_activation(options, type(model).__name__, units)


def check_activation(options: Options, model: str, units: Sequence[str]) -> None:
    """Raise ArgumentError if units are to save something else, and a model has none."""
    if options.activation is not None and not units:
        raise ArgumentError(
            f"activation={brief(options.activation)} is about the units of {model}, and none were found. Name them "
            "with units=, such as units=['layers.*'], or call graphshard.fully_shard on them."
        )
