"""The axes of a mesh for a model: which shard and replicate, along which it communicates itself, where experts are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphshard.ir.device_meshes import ExpertMeshes
from graphshard.ir.mesh import Mesh
from graphshard.options.checks import check_ignored, check_mesh, placements_of
from graphshard.options.experts import experts_by_name, experts_of, params_of
from graphshard.options.meshes import data_and_tensor, tensor_axis
from graphshard.options.options import Options


class Axes(NamedTuple):
    """Of a mesh what a model makes of it.

    Attributes:
        data: the axes to shard and to replicate over.
        mesh: these by name and role.
        tensor: the tensor axis, if there is one.
        experts: where parameters are that lie otherwise on the ranks, if there are such.
        answers: of `shard_placement_fn`, by names of parameters.
    """

    data: DeviceMesh
    mesh: Mesh
    tensor: DeviceMesh | None
    experts: ExpertMeshes | None
    answers: Mapping[str, Any]


def axes_of(model: nn.Module, mesh: DeviceMesh, options: Options, dp_mesh_dims: Any = None) -> Axes:
    """What the axes of a mesh are to a model.

    Args:
        dp_mesh_dims: FSDP2's `DataParallelMeshDims`; None goes by the names of the axes.

    Raises:
        ArgumentError: it cannot be told what an axis is for, or parameters are on other meshes.
        UnsupportedError: there are too many axes, or a parameter is placed in a way that cannot be sharded yet.
    """
    by_name = experts_by_name(mesh, dp_mesh_dims)
    data, given = data_and_tensor(mesh, dp_mesh_dims)
    axes, ignored = check_mesh(data), check_ignored(model, options.ignored_params)
    answers = placements_of(model, options.shard_placement_fn, ignored)
    experts = experts_of(model, data, by_name, answers, ignored)
    elsewhere = experts.axis.mesh_dim_names or () if experts is not None and experts.axis is not None else ()
    tensor = tensor_axis(model, data, given, params_of(model, experts), elsewhere=elsewhere)
    return Axes(data, axes, tensor, experts, answers)
