"""Programs for meshes with axes along which the model communicates (tensor, context, expert): one for each place.

A program belongs to a rank's place on these axes: the rows of an embedding that it owns are written in it, and the
positions of a sequence, and shards may have different sizes. So the model is made and captured once for each place, on
a pretended mesh. These axes are the inner ones, so the place is the rest of a rank's number. The number of places is
known after the capture at the first one, which shows among which neighbors the model communicates.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphshard.errors import ArgumentError
from graphshard.ir.mesh import CONTEXT, EXPERT, TENSOR
from graphshard.ir.param_table import even_pieces
from graphshard.ir.program import Program
from graphshard.module.compiled_module import make_tracer
from graphshard.module.tracer import Tracer
from graphshard.options.mesh_axes import dims_of
from graphshard.options.options import Options
from graphshard.options.resolve import find_axes, request_for
from graphshard.options.simulated_mesh import Parallelize, options_for, simulated_mesh
from graphshard.options.validate import ModelContents
from graphshard.runtime.process_groups import make_groups, whole_mesh
from graphshard.schedule.rank_consistent_planner import Share
from graphshard.store.artifact_file import MeshPrograms


def num_places(shape: Mapping[str, int], captured: Iterable[MeshPrograms]) -> int:
    """Return the number of places: on axes for models, and on those along which the captured programs communicate."""
    named = math.prod(size for name, size in shape.items() if name in (*CONTEXT, *EXPERT, *TENSOR))
    return math.lcm(named, *(program.period for item in captured for program in item.programs))


def sharing(plans: list[dict[str, Any]], place: int) -> Share:
    """Return what plans at a place: the first place fills `plans`, the others take them in the same order."""
    following = iter(plans)

    def share(program: Program, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if place:
            return next(following, None) or make()
        plans.append(make())
        return plans[-1]

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
    """Put this process at a place of these axes; yield the model that is made there, and its tracer.

    Args:
        device: that the program is for.

    Raises:
        ArgumentError: memory is limited, and places have shards of different sizes.
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
    """Return the first place if all are equal, or all of them with their numbers."""
    if all(place == places[0] for place in places):
        return [places[0]]
    return [replace(item, place=place) for place, item in enumerate(places)]
