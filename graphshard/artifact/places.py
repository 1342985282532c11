"""Programs for meshes with axes along which models communicate: one for each place on them, or one for all places.

A program is that of a rank's place: which rows of an embedding are its own is written in it, and which positions of a
sequence; and pieces may have different sizes. So the model is made and captured once for each place, on a mesh that is
pretended. These axes lie inside of the others, so the place is what is left of a rank's number.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphshard.artifact.members import MeshPrograms
from graphshard.ir.errors import UnsupportedError
from graphshard.ir.mesh import CONTEXT, EXPERT, TENSOR, Mesh
from graphshard.module.prepare import prepare
from graphshard.module.tracer import Tracer
from graphshard.options.axes import axes_of
from graphshard.options.options import Options
from graphshard.options.pretended import Parallelize, options_for, pretended
from graphshard.runtime.groups import make_groups, ranks_of, whole_mesh


def check_axes(device: torch.device) -> None:
    """Raise UnsupportedError for devices that models of a user's `parallelize` are not exported for."""
    if device.type != "cpu":
        raise UnsupportedError(
            f"export: parallelize= makes programs for CPUs only, and the device is {device.type}. Use "
            "graphshard.compile, with cache= to keep what it makes, or pass device='cpu'."
        )


def num_places(shape: Mapping[str, int]) -> int:
    """Ranks along all axes along which models communicate; 1 if there is none."""
    return math.prod(size for name, size in shape.items() if name in (*CONTEXT, *EXPERT, *TENSOR))


def shape_here(given: DeviceMesh, mesh: Mesh) -> dict[str, int]:
    """Sizes by name of the axes of a mesh as it was given, where several may shard as one.

    Args:
        given: all axes, or those of data alone.
        mesh: what was made of it.
    """
    names = given.mesh_dim_names
    if not names:
        return mesh.shape
    tensor = {} if mesh.tensor is None else {mesh.tensor.name: mesh.tensor.size}
    return dict(zip(names, given.shape)) | tensor


def place_here(shape: Mapping[str, int], data: DeviceMesh, tensor: DeviceMesh | None) -> int:
    """This rank's place on the axes of a shape along which models communicate."""
    return ranks_of(whole_mesh(data, tensor)).index(dist.get_rank()) % num_places(shape)


def context_group(given: DeviceMesh, mesh: Mesh) -> dict[str, str]:
    """The process group of a mesh's context axis, by the name that it has among neighbours on the sharding axis."""
    return {
        mesh.with_inner(given[name].size()).axes[-1].name: str(given.get_group(name).group_name)
        for name in given.mesh_dim_names or ()
        if name in CONTEXT and given[name].size() < mesh.shard.size
    }


@contextlib.contextmanager
def tracer_at(
    model: nn.Module, shape: Mapping[str, int], parallelize: Parallelize, options: Options, place: int
) -> Iterator[tuple[nn.Module, Tracer]]:
    """In the block this process is at a place of these axes: the model that is made there, and its tracer."""
    with pretended(model, shape, parallelize, rank=place) as (made, mesh):
        chosen = options_for(made, model, options)
        data, axes, tensor, experts, answers = axes_of(made, mesh, chosen)
        tracer = prepare(made, chosen, axes, torch.device("cpu"), {}, tensor, experts, answers)
        groups = make_groups(tracer.spec.mesh, whole_mesh(data, tensor), experts) | context_group(mesh, axes)
        tracer.spec = replace(tracer.spec, groups=dict(groups))
        yield made, tracer
        for name in tracer.spec.groups.keys() - groups.keys():  # found by a capture
            raise UnsupportedError(
                f"export: the model communicates among neighbours ({name}) that are no axis of the mesh {dict(shape)}, "
                "so ranks that load a file have no process group for them. Give the mesh a context axis of that size."
            )


def merged(places: Sequence[MeshPrograms]) -> list[MeshPrograms]:
    """One for all places if they are the same, or one for each."""
    first = places[0]
    if all(
        (item.params, item.programs, item.options) == (first.params, first.programs, first.options) for item in places
    ):
        return [first]
    return [replace(item, place=place) for place, item in enumerate(places)]
