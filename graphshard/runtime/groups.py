"""What a device mesh means here: its last axis shards, a first of two replicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.fx import Graph

from graphshard.ir.graph import is_collective
from graphshard.ir.operators import OWN_CHUNK
from graphshard.ir.program import Axis


def axes_of(mesh: DeviceMesh) -> tuple[Axis, Axis | None]:
    """The axis that parameters are sharded over, and the one that they are replicated over, if there are two."""
    names = mesh.mesh_dim_names or ("shard",)
    axes = [Axis(name, mesh.size(index)) for index, name in enumerate(names)]
    return axes[-1], replicated_over(axes)


def replicated_over(axes: Sequence[Axis]) -> Axis | None:
    """The first of two axes."""
    return axes[0] if len(axes) == 2 else None


def num_shards(mesh: DeviceMesh) -> int:
    """Into how many pieces a parameter is cut."""
    return int(mesh.size(mesh.ndim - 1))


def shard_index(mesh: DeviceMesh) -> int:
    """Which piece of every parameter this rank has."""
    return int(mesh.get_local_rank(mesh.ndim - 1))


def placements(mesh: DeviceMesh, dim: int) -> Sequence[Placement]:
    """Of a parameter that is sharded along a dim, as FSDP2 places it."""
    return (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(dim))


def subgroup_of(axis: Axis, size: int) -> Axis:
    """Neighbours on an axis, `size` at a time."""
    return Axis(f"{axis.name}/{size}", size)


def make_groups(mesh: DeviceMesh, subgroup: Axis | None) -> dict[str, str]:
    """Names of the process groups by the names of the axes; all ranks must call this together."""
    names = mesh.mesh_dim_names or ("shard",)
    groups = {name: str(mesh.get_group(index).group_name) for index, name in enumerate(names)}
    if subgroup is not None:
        neighbours = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, subgroup.size))
        groups[subgroup.name] = str(neighbours.get_group(1).group_name)
    return groups


def bind_groups(graph: Graph, groups: Mapping[str, str]) -> None:
    """Put the names of the process groups in the place of the names of the axes."""
    for node in graph.nodes:
        if is_collective(node) or node.target is OWN_CHUNK:
            node.args = (*node.args[:-1], groups[node.args[-1]])


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """All ranks, in the order of the mesh."""
    return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def is_fake(mesh: DeviceMesh) -> bool:
    """Whether nothing is sent at all."""
    return str(dist.get_backend(mesh.get_group(0))) == "fake"
