"""Process groups of the axes of a mesh."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph

from graphshard.ir.graph import is_collective
from graphshard.ir.mesh import Axis, ExpertMeshes, Mesh
from graphshard.ir.operators import NAMING_GROUPS
from graphshard.torch_compat.dtensor import (
    backend_of,
    has_high_priority,
    high_priority,
    joined_mesh,
    process_group,
)

log = logging.getLogger(__name__)


def shard_index(mesh: DeviceMesh) -> int:
    """Return which piece of every parameter this rank has."""
    axes = Mesh.of(mesh)
    return int(mesh.get_local_rank(axes.place(axes.shard)))


def any_rank(flags: Sequence[Tensor], groups: Iterable[str]) -> list[bool]:
    """Return which flags, of one element each, are set on this or another rank; the host waits for the answer.

    Args:
        groups: names of the process groups that together connect all ranks, which call this together.
    """
    found = torch.stack(list(flags)).to(torch.int32)
    for group in groups:
        dist.all_reduce(found, dist.ReduceOp.MAX, process_group(group))
    return [bool(flag) for flag in found.tolist()]


def make_groups(mesh: Mesh, device_mesh: DeviceMesh, experts: ExpertMeshes | None = None) -> dict[str, str]:
    """Make process groups, and return their names by the names of the axes; all ranks must call this together.

    `device_mesh` has all axes that lay out the ranks.
    """
    groups = {}
    for axis in mesh.axes:
        place, of = mesh.place(axis), device_mesh
        if axis not in mesh.grid:
            options = [(None, high_priority(of.get_group(0), of.device_type)) for _ in range(2)]
            override = tuple(options) if options[0][1] is not None else None
            place, of = 1, DeviceMesh(of.device_type, _rows(mesh, of, axis), backend_override=override)
        groups[axis.name] = str(of.get_group(place).group_name)
    if mesh.experts is not None and experts is not None:
        groups |= make_groups(mesh.experts, experts.whole)
    return groups


def neighbors(mesh: Mesh, device_mesh: DeviceMesh, axis: Axis) -> list[int]:
    """Return this rank and its neighbors on an axis, given the mesh of all axes that lay out the ranks."""
    rank = dist.get_rank()
    rows: list[list[int]] = _rows(mesh, device_mesh, axis).tolist()
    return next(row for row in rows if rank in row)


def _rows(mesh: Mesh, device_mesh: DeviceMesh, axis: Axis) -> Tensor:
    """Return all ranks, in rows of neighbors on an axis."""
    return device_mesh.mesh.movedim(mesh.place(axis), -1).reshape(-1, axis.size)


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axis that parameters are sharded along, as a separate mesh."""
    return mesh if mesh.ndim == 1 else mesh[Mesh.of(mesh).shard.name]


def whole_mesh(mesh: DeviceMesh, tensor: DeviceMesh | None) -> DeviceMesh:
    """Return the data axes and, inside of them, the tensor axis if there is one."""
    return mesh if tensor is None else joined_mesh(mesh, tensor)


def bind_groups(graph: Graph, groups: Mapping[str, str]) -> None:
    """Replace the names of the axes by the names of the process groups."""
    for node in graph.nodes:
        if is_collective(node) or node.target in NAMING_GROUPS:
            node.args = (*node.args[:-1], groups[node.args[-1]])


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """Return all ranks, in the order of the mesh."""
    return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def is_fake(mesh: DeviceMesh) -> bool:
    """Return whether the mesh is of fake process groups, which send nothing."""
    return str(dist.get_backend(mesh.get_group(0))) == "fake"


def on_gloo(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether a group sends tensors on such devices by gloo: it does on CPUs, and may for a shared GPU."""
    return backend_of(group, device_type) == "gloo"


@functools.cache
def log_priorities(device_type: str, *groups: str) -> None:
    """Log, once, the groups whose collectives run at normal priority, and how to make them otherwise."""
    normal = [name for name in groups if not has_high_priority(process_group(name), device_type)]
    if normal:
        log.info(
            "collectives of process groups %s have no higher priority than kernels, which may delay them. Pass "
            "pg_options=torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True) to "
            "init_process_group, and to init_device_mesh as backend_override={axis: options}.",
            ", ".join(normal),
        )
