"""Programs for meshes with a tensor axis: one for each place on it, or one for all where they are the same.

A program is that of a rank's place: which rows of an embedding are its own is written in it, and pieces may have
different sizes. So the model is made and captured once for each place, on a mesh that is pretended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from graphshard.artifact.members import MeshPrograms
from graphshard.ir.errors import UnsupportedError
from graphshard.ir.mesh import CONTEXT, EXPERT, TENSOR
from graphshard.module.prepare import prepare
from graphshard.module.tracer import Tracer
from graphshard.options.axes import axes_of
from graphshard.options.options import Options
from graphshard.options.pretended import Parallelize, options_for, pretended
from graphshard.runtime.groups import make_groups, whole_mesh


def check_axes(shape: Mapping[str, int], device: torch.device) -> None:
    """Raise UnsupportedError for a mesh that models are not exported for."""
    others = [name for name in shape if name in (*CONTEXT, *EXPERT)]
    if others:
        raise UnsupportedError(
            f"export: mesh {dict(shape)} has the axis {others[0]!r}, and files hold programs for data axes and a "
            "tensor axis. Use graphshard.compile, with cache= to keep what it makes."
        )
    if device.type != "cpu":
        raise UnsupportedError(
            f"export: parallelize= makes programs for CPUs only, and the device is {device.type}. Use "
            "graphshard.compile, with cache= to keep what it makes, or pass device='cpu'."
        )


def num_places(shape: Mapping[str, int]) -> int:
    """Ranks along the tensor axis, which is the innermost one; 1 if there is none."""
    return next((size for name, size in shape.items() if name in TENSOR), 1)


@contextlib.contextmanager
def tracer_at(
    model: nn.Module, shape: Mapping[str, int], parallelize: Parallelize, options: Options, place: int
) -> Iterator[tuple[nn.Module, Tracer]]:
    """In the block this process is at a place of the tensor axis: the model that is made there, and its tracer."""
    with pretended(model, shape, parallelize, rank=place) as (made, mesh):
        chosen = options_for(made, model, options)
        data, axes, tensor, experts, answers = axes_of(made, mesh, chosen)
        tracer = prepare(made, chosen, axes, torch.device("cpu"), {}, tensor, experts, answers)
        groups = make_groups(tracer.spec.mesh, whole_mesh(data, tensor), experts)
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
