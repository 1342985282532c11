"""The one operator whose value depends on the rank: this rank's chunk of a tensor that all ranks have.

The graph stays the same on every rank: it names the mesh axis, as a collective does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphshard.ir.torch_internals import rank_in_group

_LIBRARY = torch.library.Library("graphshard", "FRAGMENT")
_LIBRARY.define("own_chunk(Tensor whole, int num_ranks, str group) -> Tensor")


def _own_chunk(whole: Tensor, num_ranks: int, group: str) -> Tensor:
    return whole.chunk(num_ranks)[rank_in_group(group)].clone()


def _fake(whole: Tensor, num_ranks: int, group: str) -> Tensor:
    return whole.new_empty([whole.shape[0] // num_ranks, *whole.shape[1:]])


_LIBRARY.impl("own_chunk", _own_chunk, "CPU")
_LIBRARY.impl("own_chunk", _own_chunk, "CUDA")
torch.library.register_fake("graphshard::own_chunk", _fake, lib=_LIBRARY)

OWN_CHUNK = torch.ops.graphshard.own_chunk.default
