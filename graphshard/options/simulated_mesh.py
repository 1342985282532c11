"""Meshes that need not exist along which a model communicates, and the model made for them.

    with simulated_mesh(model, {"dp": 16, "tp": 8}, parallelize) as (parallelized, mesh):
        ...                                 `mesh` is a DeviceMesh of 128 ranks, and this process is one of them

DTensor needs process groups. In the block there are torch's fake ones, which send nothing. Rank 0 is the first on every
axis, and has the largest piece where pieces are uneven.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphshard.errors import ArgumentError
from graphshard.ir.mesh import CONTEXT, DATA, EXPERT, MOST_RANKS, OTHERS, PIPELINE, TENSOR, seen_shape
from graphshard.options.options import Options
from graphshard.options.validate import ModelContents, check_model
from graphshard.torch_compat.dtensor import fake_world, track_draws
from graphshard.utils.argument_validation import answer_of, check_function, is_int
from graphshard.utils.text import brief

# Called with a copy of the model on the meta device and the mesh; changes the model in place, or returns another one.
Parallelize = Callable[[nn.Module, DeviceMesh], Any]

# What axes without names are called, outermost first.
_NAMES = ("replicate", "shard")


def shape_of(mesh: Any) -> dict[str, int]:
    """Return the sizes by name of a mesh that need not exist, along which the model may communicate."""
    if isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            "parallelize is for meshes that need not exist, and mesh is a DeviceMesh. Call it on the model first and "
            "leave it out, or pass the shape of the mesh, such as {'dp': 16, 'tp': 8}."
        )
    if is_int(mesh):
        mesh = (mesh,)
    if isinstance(mesh, (list, tuple)) and 0 < len(mesh) <= len(_NAMES):
        mesh = dict(zip(_NAMES[-len(mesh) :], mesh))
    if not isinstance(mesh, Mapping) or not mesh:
        raise ArgumentError(f"mesh must be sizes by names of axes, such as {{'dp': 16, 'tp': 8}}, got {brief(mesh)}.")
    seen, replicating = seen_shape(mesh)
    for name, size in mesh.items():
        if not is_int(size) or size < 1:
            raise ArgumentError(f"mesh must have positive sizes, got {brief(size)} for {brief(name)}.")
        if name not in seen or name == replicating:
            continue
        if name in PIPELINE:
            raise ArgumentError(
                f"mesh has a pipeline axis, {name!r}, and stages are models of their own. Leave it out: give the mesh "
                "of the ranks of one stage, and a model or parallelize= that makes the stage. explain takes it."
            )
        if name not in (*DATA, *TENSOR, *CONTEXT, *EXPERT):
            known = ", ".join(map(repr, (*DATA, *TENSOR, *CONTEXT, *EXPERT)))
            raise ArgumentError(f"mesh has an axis {brief(name)}, and it is not known what it is for. Use {known}.")
    if math.prod(mesh.values()) > MOST_RANKS:
        raise ArgumentError(f"mesh must have at most {MOST_RANKS} ranks, got {brief(mesh)}.")
    names = list(seen)
    for name in names[:-1]:
        if name in TENSOR and names[-1] not in TENSOR:  # of two the model's parameters say that one is too many
            raise ArgumentError(
                f"mesh {tuple(names)}: the tensor axis {name!r} lies inside of the others, where its ranks are "
                f"neighbors: {{{', '.join(f'{n!r}: {mesh[n]}' for n in (*(o for o in names if o != name), name))}}}."
            )
    return dict(mesh)


def needs_parallelize(mesh: Any) -> bool:
    """Return whether a shape has an axis along which models communicate, so that they must be made for it."""
    return isinstance(mesh, Mapping) and any(name in (*TENSOR, *OTHERS) for name in mesh)


@contextlib.contextmanager
def simulated_mesh(
    model: nn.Module, shape: Mapping[str, int], parallelize: Parallelize, device_type: str, rank: int = 0
) -> Iterator[tuple[nn.Module, DeviceMesh]]:
    """Make a mesh of a shape from `shape_of` for the block, and yield a parallelized copy of the model with it.

    `device_type` "cuda" need not be here where something stands in for it; `rank` is the number of this process.
    """
    check_function("parallelize", parallelize, "a function of (model, mesh)")
    if dist.is_initialized():
        raise ArgumentError(
            f"mesh {dict(shape)} need not exist, and is made of process groups that send nothing; but this process has "
            "process groups. Call it in another process, or torch.distributed.destroy_process_group() first; or pass a "
            "DeviceMesh and a model that was parallelized."
        )
    with fake_world(math.prod(shape.values()), rank):
        seen, _ = seen_shape(shape)
        mesh = init_device_mesh(device_type, tuple(seen.values()), mesh_dim_names=tuple(seen))
        track_draws(mesh)
        copied = on_meta(model)
        with torch.device("meta"):
            made = answer_of("parallelize", parallelize, copied, mesh)
        made = copied if made is None else made
        check_model(made)
        yield made, mesh


def options_for(copied: nn.Module, model: nn.Module, options: Options) -> Options:
    """Return the options with `ignored_params` of a copy of the model instead of the model's."""
    if options.ignored_params is None:
        return options
    ignored = set(options.ignored_params)
    names = [name for name, param in ModelContents.of(model).named.items() if param in ignored]
    return replace(options, ignored_params=[copied.get_parameter(name) for name in names])


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model with parameters and buffers on the meta device, tied as they were."""
    memo: dict[int, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)
