"""Programs for meshes with axes along which models communicate: one for each place on them, or one for all places.

A program is that of a rank's place: which rows of an embedding are its own is written in it, and which positions of a
sequence; and pieces may have different sizes. So the model is made and captured once for each place, on a mesh that is
pretended. These axes lie inside of the others, so the place is what is left of a rank's number. Among which neighbours
the model communicates, too, and over how many ranks, is known when it was captured at the first place.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphshard.artifact.members import MeshPrograms
from graphshard.cost.collectives import model_collective
from graphshard.errors import ArgumentError, ArtifactError
from graphshard.ir.mesh import CONTEXT, EXPERT, TENSOR, Mesh
from graphshard.ir.param_table import even_pieces
from graphshard.ir.program import Program
from graphshard.module.compiled_module import make_tracer
from graphshard.module.tracer import Tracer
from graphshard.options.mesh_axes import dims_of
from graphshard.options.options import Options
from graphshard.options.resolve import find_axes, request_for
from graphshard.options.simulated_mesh import Parallelize, options_for, simulated_mesh
from graphshard.options.validate import ModelContents
from graphshard.runtime.process_groups import make_groups, neighbors, whole_mesh
from graphshard.schedule.agreed import Share
from graphshard.torch_compat.dtensor import group_of


def num_places(shape: Mapping[str, int], captured: Iterable[MeshPrograms]) -> int:
    """Ranks along all axes along which models communicate, and the captured ones do besides; 1 if there is none."""
    named = math.prod(size for name, size in shape.items() if name in (*CONTEXT, *EXPERT, *TENSOR))
    return math.lcm(named, *(program.period for item in captured for program in item.programs))


def shape_here(given: DeviceMesh, mesh: Mesh) -> dict[str, int]:
    """Sizes by name of the axes of a mesh as it was given, where several may shard as one.

    Args:
        given: all axes, or those of data alone.
        mesh: what was made of it.
    """
    names = given.mesh_dim_names
    if not names or mesh.only_replicates:
        return mesh.shape
    return dict(zip(names, given.shape)) | {axis.name: axis.size for axis in mesh.tensors}


def period_of(program: Program) -> int:
    """After how many ranks there is one with the place of the first on all axes that the model communicates along."""
    found = (model_collective(node) for phase in program.phases.values() for node in phase.module.graph.nodes)
    axes = [program.mesh.named(each.axis) for each in found if each is not None]
    return math.lcm(*(axis.size * program.mesh.distance(axis) for axis in axes))


def groups_found(programs: Iterable[Program], known: Mapping[str, str], mesh: DeviceMesh) -> dict[str, str]:
    """The process groups of neighbours among whom programs communicate, by their names: those that the model has made.

    Args:
        known: groups of the mesh's axes.
        mesh: all axes.

    Raises:
        ArtifactError: this process has no such group.
    """
    found = {}
    for program in programs:
        for axis in program.mesh.axes:
            if axis.name in known:
                continue
            ranks = neighbors(program.mesh, mesh, axis)
            group = group_of(ranks)
            if group is None:
                raise ArtifactError(
                    f"a program communicates among neighbours ({axis.name}), ranks {ranks} here, and this process has "
                    "no group of them. Make the model as it was made for the export before it is loaded.",
                    field="mesh",
                )
            found[axis.name] = group
    return found


@dataclass
class Plans:
    """What is planned at the first place: plans for other places, which ask for as many programs in the same order."""

    made: list[dict[str, Any]] = field(default_factory=list)

    def at(self, place: int) -> Share:
        """What planners at a place share."""
        following = iter(self.made)

        def share(program: Program, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            if place:
                return next(following, None) or make()
            self.made.append(make())
            return self.made[-1]

        return share


@contextlib.contextmanager
def tracer_at(
    model: nn.Module,
    shape: Mapping[str, int],
    parallelize: Parallelize,
    options: Options,
    device: torch.device,
    place: int,
) -> Iterator[tuple[nn.Module, Tracer]]:
    """In the block this process is at a place of these axes: the model that is made there, and its tracer.

    Args:
        device: what the program is for.

    Raises:
        ArgumentError: there is a limit of memory, and places have pieces of different sizes.
    """
    with simulated_mesh(model, shape, parallelize, device.type, rank=place) as (made, mesh):
        chosen = options_for(made, model, options)
        contents = ModelContents.of(made)
        axes = find_axes(contents, mesh, chosen, dims_of(shape))
        assert axes.data is not None
        tracer = make_tracer(request_for(contents, axes, chosen, device))
        if chosen.memory_limit is not None and not even_pieces(tracer.spec.mesh, tracer.spec.params):
            raise ArgumentError(
                f"memory_limit={chosen.memory_limit} cannot be kept in a file for a mesh on which parameters are in "
                "pieces of different sizes: what each rank takes with a plan is known when ranks plan together. Leave "
                "it out, or call compile on the ranks."
            )
        groups = make_groups(tracer.spec.mesh, whole_mesh(axes.data, axes.tensor), axes.experts)
        tracer.spec = replace(tracer.spec, groups=groups)
        yield made, tracer


def merged(places: Sequence[MeshPrograms]) -> list[MeshPrograms]:
    """One for all places if they are the same, or one for each."""
    first = places[0]
    if all(
        (item.params, item.programs, item.options) == (first.params, first.programs, first.options) for item in places
    ):
        return [first]
    return [replace(item, place=place) for place, item in enumerate(places)]
