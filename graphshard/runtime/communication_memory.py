"""All-gathers into memory that NCCL has registered, so that it need not copy through its buffers.

    %g = all_gather_into_tensor(%s, n, shard)          %g = gather_registered(%s, n, shard, memory="group")

A rank's shard is copied to its place in the result, which is then gathered in place: only results need such memory. It
comes from a pool that reuses it as torch's allocator does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from graphshard.ir.graph import c10d
from graphshard.torch_compat.dtensor import (
    all_gather_into,
    group_allocator,
    process_group,
    rank_in_group,
    started,
    symmetric_allocator,
)

log = logging.getLogger(__name__)

# The process group's own pool, or symmetric memory, which each rank maps.
MemoryKind: TypeAlias = Literal["group", "symmetric"]
Allocate: TypeAlias = Callable[[int, torch.dtype, dist.ProcessGroup], torch.Tensor]


def allocator(kind: MemoryKind, group: dist.ProcessGroup, device: torch.device) -> Allocate | None:
    """Return what allocates a number of elements for a group; None if there is no such memory."""
    return group_allocator(group, device) if kind == "group" else symmetric_allocator(group, device)


def is_there(kind: MemoryKind, group: str, device: torch.device, setter: str) -> bool:
    """Return whether a group has such memory; log one line if not."""
    among = process_group(group)
    if allocator(kind, among, device) is None:
        backend = dist.get_backend(among)
        log.warning("%s: %s has no such memory on %s. Gathers write to torch's.", setter, backend, device.type)
        return False
    return True


def gather_registered(shard: torch.Tensor, num_ranks: int, group: str, *, memory: MemoryKind) -> torch.Tensor:
    """Start to gather the shards of all ranks along dim 0."""
    return gather_several_registered([shard], num_ranks, group, memory=memory)[0]


def gather_several_registered(
    shards: Sequence[torch.Tensor], num_ranks: int, group: str, *, memory: MemoryKind
) -> list[torch.Tensor]:
    """Start to gather several, one after the other."""
    among, rank = process_group(group), rank_in_group(group)
    allocate = allocator(memory, among, shards[0].device)
    assert allocate is not None, f"{group} has lost its memory"
    fulls = []
    for shard in shards:
        shape = (num_ranks * shard.shape[0], *shard.shape[1:])
        fulls.append(allocate(math.prod(shape), shard.dtype, among).view(shape))
        mine = fulls[-1].narrow(0, rank * shard.shape[0], shard.shape[0]).copy_(shard)
        started(fulls[0], all_gather_into(fulls[-1], mine, group))
    return fulls


REGISTERED: dict[Any, Callable[..., Any]] = {
    c10d.all_gather_into_tensor.default: gather_registered,
    c10d.all_gather_into_tensor_coalesced.default: gather_several_registered,
}
