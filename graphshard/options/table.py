"""What options mean for the parameters of a model: its units, precision and parameter table, as a capture needs them.

`compile` runs with it, `explain` predicts with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphshard.capture.capture import CaptureSpec
from graphshard.ir.errors import ArgumentError
from graphshard.ir.given import is_int
from graphshard.ir.mesh import Mesh
from graphshard.ir.params import ParamRow, build_table
from graphshard.ir.precision import precision_of
from graphshard.ir.text import brief
from graphshard.ir.units import find_units
from graphshard.options.checks import check_ignored, check_params, check_placements
from graphshard.options.meshes import axis_name
from graphshard.options.options import Options


def capture_spec(
    model: nn.Module,
    options: Options,
    mesh: Mesh,
    device: torch.device,
    known: Mapping[nn.Parameter, ParamRow] = MappingProxyType({}),
    tensor: DeviceMesh | None = None,
) -> CaptureSpec:
    """What a capture of a model that is to be sharded depends on.

    Args:
        mesh: the axes to shard and to replicate over.
        device: what programs are captured for.
        known: parameters of parts of the model that are sharded already.
        tensor: the tensor axis, inside of those of `mesh`, if there is one.

    Raises:
        ArgumentError: an option does not fit the model or the mesh, or a parameter cannot be sharded.
    """
    units = find_units(model, options.units)
    precision = precision_of(options.mp_policy, units)
    mesh = _with_regather(mesh, options.reshard_after_forward)
    if tensor is not None:
        mesh = mesh.with_tensor(axis_name(tensor), tensor.size())
    check_fit(options, model, units, mesh)
    ignored = check_ignored(model, options.ignored_params)
    check_params(model, device.type, ignored, known, distributed=tensor is not None)
    table = build_table(
        model,
        mesh=mesh,
        units=units,
        precision=precision,
        reshard_after_forward=_gathers_again(options.reshard_after_forward),
        dims=check_placements(model, options.shard_placement_fn, {*ignored, *known}),
        ignored=ignored,
        known=known,
    )
    return CaptureSpec(
        table,
        units,
        mesh,
        device,
        precision,
        type(model),
        options.dynamic_shapes,
        allow=tuple(options.allow),
        tensor=tensor,
    )


def _gathers_again(reshard_after_forward: bool | int | None) -> bool | None:
    """Whether backward gathers parameters again, among however many ranks; None leaves it to each unit."""
    return None if reshard_after_forward is None else reshard_after_forward is True or reshard_after_forward > 1


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
    if options.memory_limit is not None and len(mesh.axes) > 1:
        raise ArgumentError(
            f"memory_limit={options.memory_limit} cannot be kept with replicas, a tensor axis or a smaller group to "
            "gather again in: such programs are planned unit by unit, without costs. Shard over one axis, or leave it "
            "out."
        )


def check_activation(options: Options, model: str, units: Sequence[str]) -> None:
    """Raise ArgumentError if units are to save something else, and a model has none."""
    if options.activation is not None and not units:
        raise ArgumentError(
            f"activation={brief(options.activation)} is about the units of {model}, and none were found. Name them "
            "with units=, such as units=['layers.*'], or call graphshard.fully_shard on them."
        )
