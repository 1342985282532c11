"""Annotations of spmd_types on plain parameters, read as placements on the tensor axes of a mesh.

    spmd.assert_type(weight, {dp: spmd.R, tp: spmd.S(0)})    this rank's piece of a weight that is sharded over tp
    spmd.assert_type(scale, {dp: spmd.R, tp: spmd.R})        replicated; its gradients are partial sums
    spmd.assert_type(bias, {dp: spmd.R, tp: spmd.I})         replicated; its gradients are equal on all ranks

Such a parameter has the layout of a DTensor with these placements, as in FSDP2 from torch 2.14 on, and forward finds
the plain piece. Gradients are summed over axes with `R` before they are reduced over the data axes.
"""

from __future__ import annotations

import sys
from collections.abc import Container
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.ir.param_table import SUMMED_OVER
from graphshard.options.validate import ModelContents
from graphshard.torch_compat.dtensor import dtensor_of


def with_annotations(
    contents: ModelContents, data: DeviceMesh, tensor: DeviceMesh | None, left_out: Container[nn.Parameter]
) -> ModelContents:
    """Return the contents with DTensors for annotated parameters, except those to be left out.

    Raises:
        ArgumentError: an annotation contradicts the roles of the mesh's axes.
        UnsupportedError: gradients would have to be summed over an axis that the mesh does not have.
    """
    if "spmd_types" not in sys.modules:
        return contents
    params = {
        names: param if isinstance(param, DTensor) or param in left_out else _annotated(names[0], param, data, tensor)
        for names, param in contents.params.items()
    }
    return replace(contents, params=params)


def _annotated(name: str, param: nn.Parameter, data: DeviceMesh, tensor: DeviceMesh | None) -> nn.Parameter:
    """Return a parameter as a DTensor on the tensor axes if it is annotated."""
    spmd: Any = sys.modules["spmd_types"]
    entries = enumerate(spmd.get_partition_spec(param) or ())
    cuts = {axis: spmd.S(dim) for dim, entry in entries for axis in (entry if type(entry) is tuple else (entry,))}
    kinds = {axis: kind for axis, kind in (cuts | spmd.get_local_type(param) | cuts).items() if axis is not None}
    of_data, names = _ranks(data), tensor.mesh_dim_names or () if tensor is not None else ()
    axes = {_ranks(tensor[each]): each for each in names if tensor is not None and tensor[each].size() > 1}
    found: dict[str, Any] = {}
    for axis, kind in kinds.items():
        ranks = frozenset(axis.layout.all_ranks_from_zero())
        if ranks in axes:
            found[axes[ranks]] = kind
        elif ranks <= of_data and kind is not spmd.R:
            raise ArgumentError(
                f"parameter {name} is annotated as {kind!r} on {axis}, a data axis, along which graphshard shards it. "
                "Annotate it as replicated there (spmd_types.R), or give a mesh on which that is a tensor axis. For "
                "pieces of experts on an 'ep' axis, call graphshard.fully_shard(experts, mesh=...) with the other axes."
            )
        elif not ranks <= of_data and kind is spmd.R and param.requires_grad:
            raise UnsupportedError(
                f"parameter {name} is annotated as replicated (spmd_types.R) on {axis}, along which its gradient "
                "would have to be summed, and the mesh has no such axis. Give a mesh with that axis, as in "
                "init_device_mesh(..., mesh_dim_names=('dp', 'tp')), or annotate it as invariant (spmd_types.I)."
            )
    if tensor is None or not kinds:
        return param
    if unknown := [axis for axis in axes.values() if found.get(axis) in (None, spmd.V, spmd.P)]:
        raise ArgumentError(
            f"parameter {name} is annotated as {found.get(unknown[0])!r} on the tensor axis {unknown[0]!r}, "
            "which does not say what it is a piece of. Annotate it as S(dim), R or I of spmd_types there."
        )
    cut = [axis for axis, kind in found.items() if isinstance(kind, spmd.Shard)]
    if cut != sorted(cut, key=lambda axis: (found[axis].dim, names.index(axis))):
        raise UnsupportedError(
            f"parameter {name} is cut along one dim over the axes {', '.join(cut)}, which the mesh has in another "
            "order. Annotate it in the order of the mesh."
        )
    shape = list(param.shape)
    for axis in cut:
        shape[found[axis].dim] *= tensor[axis].size()
    placements = [Shard(found[axis].dim) if axis in cut else Replicate() for axis in names]
    stride = torch.empty(shape, device="meta").stride()
    made = nn.Parameter(dtensor_of(param.detach(), tensor, placements, torch.Size(shape), stride), param.requires_grad)
    vars(made)[SUMMED_OVER] = tuple(axis for axis in names if found.get(axis) is spmd.R)
    return made


def _ranks(mesh: DeviceMesh) -> frozenset[int]:
    """Return the ranks of a mesh as differences to the first, as spmd_types names axes."""
    return frozenset((mesh.mesh.flatten() - mesh.mesh.min()).tolist())
