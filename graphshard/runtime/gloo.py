"""All-gathers on gloo.

    %g = all_gather_into_tensor(%s, n, group)         %g = all_gather(%s, n, group)

The functional all-gathers of torch 2.11 to 2.13 corrupt the heap on gloo now and then while several are under way
(`benchmarks/gloo_gathers.py`); those of `torch.distributed`, which FSDP2 calls, take another way through gloo, and
have not been seen to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphshard.ir.graph import c10d
from graphshard.ir.program import Phase
from graphshard.ir.torch_internals import all_gather_into


def gather_into_buffers(phase: Phase) -> None:
    """Launch all gathers as below, in place; their group is the last argument."""
    for node in phase.module.graph.nodes:
        node.target = LAUNCHES.get(node.target, node.target)


def all_gather(shard: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """The shards of all ranks along dim 0, to be waited for."""
    full = shard.new_empty([num_ranks * shard.shape[0], *shard.shape[1:]])
    all_gather_into(full, shard, group)
    return full


def all_gather_coalesced(shards: Sequence[torch.Tensor], num_ranks: int, group: str) -> list[torch.Tensor]:
    """Several, one after the other: gloo has no launch for all that is any faster."""
    return [all_gather(shard, num_ranks, group) for shard in shards]


LAUNCHES = {
    c10d.all_gather_into_tensor.default: all_gather,
    c10d.all_gather_into_tensor_coalesced.default: all_gather_coalesced,
}
