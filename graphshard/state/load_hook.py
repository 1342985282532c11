"""Let `load_state_dict` take values that are not sharded like the parameters.

FSDP2 takes only DTensors with the parameter's placements: a full tensor is an error, and with `assign=True` it takes
the place of the parameter and breaks the model. Here a full tensor is sharded and another layout redistributed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from graphshard.ir.errors import ArgumentError
from graphshard.ir.make_table import places_of


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
