"""Initialization of sharded parameters with the values they would have unsharded, one full parameter at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from graphshard.ir.param_table import chunk_range
from graphshard.torch_compat.dtensor import cuts_of, dtensor_of
from graphshard.torch_compat.torch_ops import OpOverload, TorchDispatchMode


@contextlib.contextmanager
def unsharded_init() -> Iterator[None]:
    """Let random operators on sharded parameters draw what they would draw on the full ones.

        model.to_empty(device=device)
        torch.manual_seed(0)  # the same on all ranks
        with graphshard.unsharded_init():
            model.init_weights()

    An operator such as `normal_` then draws the whole parameter on every rank, keeps this rank's piece and frees the
    rest: the values equal the unsharded model's, bit for bit, and memory holds one full parameter next to the
    shards. Other operators run on the shards as usual.
    """
    with _DrawUnsharded():
        yield


class _DrawUnsharded(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        fills = torch.Tag.nondeterministic_seeded in func.tags and func._schema.name.endswith(("_", "_like"))
        if fills and isinstance(args[0], DTensor) and cuts_of(args[0].placements):
            return _draw(func, args[0], args[1:], kwargs or {})
        return func(*args, **(kwargs or {}))


def _draw(func: OpOverload, like: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Fill a full tensor, and keep this rank's piece of it: in place, or as a new tensor."""
    local, mesh = like.to_local(), like.device_mesh
    full = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=local.device)
    drawn = func(full, *args, **kwargs)
    piece = drawn
    for place, dim in cuts_of(like.placements):
        piece = piece.narrow(dim, *chunk_range(piece.shape[dim], mesh.size(place), mesh.get_local_rank(place)))
    if func._schema.name.endswith("_"):
        local.copy_(piece)
        return like
    return dtensor_of(piece.clone(), mesh, like.placements, drawn.shape, drawn.stride())
