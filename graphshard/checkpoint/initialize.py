"""Initialise sharded parameters with the values they would have unsharded, one full parameter at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from graphshard.errors import ArgumentError
from graphshard.ir.param_table import chunk_range, places_of
from graphshard.torch_compat.dtensor import cuts_of, dtensor_of
from graphshard.torch_compat.operators import OpOverload, TorchDispatchMode


@contextlib.contextmanager
def unsharded_init() -> Iterator[None]:
    """Let random operators on sharded parameters draw what they would draw on the full ones.

        model.to_empty(device=device)
        torch.manual_seed(0)  # the same on all ranks
        with graphshard.unsharded_init():
            model.init_weights()

    An operator such as `normal_` then draws the whole parameter on every rank, keeps this rank's piece and frees the
    rest: the values are those of the unsharded model, bit for bit, and memory holds one full parameter besides the
    shards. Everything else runs on the shards, as it does without.
    """
    with _DrawWhole():
        yield


class _DrawWhole(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        fills = torch.Tag.nondeterministic_seeded in func.tags and func._schema.name.endswith(("_", "_like"))
        if fills and isinstance(args[0], DTensor) and cuts_of(args[0].placements):
            return _draw(func, args[0], args[1:], kwargs or {})
        return func(*args, **(kwargs or {}))


def _draw(func: OpOverload, like: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Fill a full tensor, and keep this rank's piece of it: in place, or as a new tensor."""
    local, mesh = like.to_local(), like.device_mesh
    whole = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=local.device)
    drawn = func(whole, *args, **kwargs)
    piece = drawn
    for place, dim in cuts_of(like.placements):
        piece = piece.narrow(dim, *chunk_range(piece.shape[dim], mesh.size(place), mesh.get_local_rank(place)))
    if func._schema.name.endswith("_"):
        local.copy_(piece)
        return like
    return dtensor_of(piece.clone(), mesh, like.placements, drawn.shape, drawn.stride())


@torch.no_grad()
def shard_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace values for sharded parameters by shards of them; a hook that `load_state_dict` calls first.

    A full tensor, the same on every rank, is cut without communication. A DTensor with other placements is
    redistributed, a collective. A value of another shape is left to torch, which reports all of them.

    Raises:
        ArgumentError: a DTensor is on another mesh than the parameter; nothing was loaded.
    """
    for name, param in places_of(module).items():
        key, value = f"{prefix}{name}", state_dict.get(f"{prefix}{name}")
        if not (isinstance(param, DTensor) and isinstance(value, torch.Tensor) and value.shape == param.shape):
            continue
        if not isinstance(value, DTensor):
            value = value.detach()
            state_dict[key] = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
        elif value.device_mesh != param.device_mesh:
            raise ArgumentError(
                f"state_dict[{key!r}] is a DTensor on {value.device_mesh}, but the parameter is on "
                f"{param.device_mesh}. Pass its full_tensor(), or load through torch.distributed.checkpoint, which "
                "reshards."
            )
        elif value.placements != param.placements:
            state_dict[key] = value.redistribute(placements=param.placements)
