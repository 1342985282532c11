"""The table of a module's parameters: how each is stored, gathered and reduced, by the options that it was given."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from graphshard.ir.mesh import Mesh
from graphshard.ir.params import ParamRow, ParamTable, memory_order
from graphshard.ir.precision import Precision
from graphshard.ir.split import Cut, Split
from graphshard.ir.units import unit_of


def named_parameters(module: nn.Module) -> dict[tuple[str, ...], nn.Parameter]:
    """Distinct parameters in registration order, each with all its names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in places_of(module).items():
        names.setdefault(param, []).append(name)
    return {tuple(n): p for p, n in names.items()}


def places_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Every name under which the module has a parameter, as `get_parameter` finds it.

    A module's own `named_parameters` may tell others: that of torch's `checkpoint_wrapper` leaves itself out.
    """
    return dict(nn.Module.named_parameters(module, remove_duplicate=False))


def build_table(
    module: nn.Module,
    *,
    mesh: Mesh,
    units: Sequence[str],
    precision: Precision,
    reshard_after_forward: bool | None,
    dims: Mapping[str, int] = MappingProxyType({}),
    ignored: Collection[nn.Parameter] = (),
    known: Mapping[nn.Parameter, ParamRow] = MappingProxyType({}),
    experts: Collection[str] = (),
) -> ParamTable:
    """Make the table of a module whose parameters are plain tensors, or DTensors on the mesh's tensor axis.

    Precision follows FSDP2: only floating parameters are cast, and `reduced_in` says what a `reduce_dtype` of None
    means. `reshard_after_forward=None` keeps those of the root unit's parameters that backward reads, and gathers all
    others again; False keeps all, and lets modules show them. `dims` has, by the parameter's first name, the dim to
    shard along where it is not 0. `known` are rows of parameters that were sharded before, as parts of the module: they
    keep what was chosen for them, under other names. `experts` are first names of those on the experts' mesh.
    """
    rows = []
    leave = set(ignored)
    for names, param in named_parameters(module).items():
        unit = unit_of(names[0], units)
        if param in known:
            rows.append(dataclasses.replace(known[param], names=names, unit=unit))
            continue
        on = mesh.experts if mesh.experts is not None and names[0] in experts else mesh
        piece, split = _on_tensor_axis(param, on)
        row = ParamRow(
            names=names,
            shape=tuple(piece.shape),
            dtype=param.dtype,
            compute_dtype=param.dtype,
            reduce_dtype=param.dtype,
            trainable=param.requires_grad,
            num_shards=1 if param in leave or param.dim() == 0 else on.shard.size,
            unit=unit,
            reshard=unit != "" if reshard_after_forward is None else reshard_after_forward,
            shown=reshard_after_forward is False,
            dim=dims.get(names[0], 0),
            order=memory_order(piece),
            ignored=param in leave,
            split=split,
            expert=on is not mesh,
        )
        rows.append(row.as_now(param, precision.of(unit)))
    return ParamTable(tuple(rows))


def _on_tensor_axis(param: nn.Parameter, mesh: Mesh) -> tuple[torch.Tensor, Split | None]:
    """What a rank of the tensor axes has of a parameter, and how it is split there."""
    if not isinstance(param, DTensor):
        return param, None
    tensors = [axis.name for axis in mesh.tensors]
    names = param.device_mesh.mesh_dim_names or tensors
    dims = (placement.dim if isinstance(placement, Shard) else None for placement in param.placements)
    cuts = tuple(Cut(name, dim) for name, dim in zip(names, dims) if name in tensors)
    around = tuple(name for name in names if name not in tensors)
    return param._local_tensor, Split(tuple(param.shape), cuts, around=around)
