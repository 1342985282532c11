"""Process group whose other ranks do not exist, and whose collectives do nothing.

torch's fake group copies a rank's data to the place of every rank, one copy after the other: as rank 0 of 64, the host
would do little else. Here, results of collectives keep the contents of their memory. DDP's comparisons before its start
are copied, because it would refuse to start otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.testing._internal.distributed.fake_pg import FakeStore


class Idle(dist.ProcessGroup):
    """Rank 0 of several."""

    def getBackendName(self) -> str:
        """Return the name by which graphshard knows that there is no other rank to agree with."""
        return "fake"

    def getSize(self) -> int:
        return self._size

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._size = size

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for places, value in zip(outputs, inputs):
            for place in places:
                place.copy_(value)
        return _done()

    def _nothing(self, *args: Any, **kwargs: Any) -> Any:
        return _done()

    _allgather_base = allgather_into_tensor_coalesced = _nothing
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = _nothing
    # Names in torch 2.13.
    all_gather_single = all_gather_single_coalesced = _nothing
    reduce_scatter_single = reduce_scatter_single_coalesced = _nothing
    allreduce = allreduce_coalesced = broadcast = barrier = _nothing


def _done() -> Any:
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    return _create_work_from_future(future)


@contextlib.contextmanager
def idle_world(num_ranks: int) -> Iterator[None]:
    """Make this process rank 0 of `num_ranks` ranks within the block."""

    def create(common: Any, options: Any) -> Idle:
        return Idle(common.group_rank, common.group_size)

    plugin = dist.Backend._plugins["FAKE"]  # type: ignore[attr-defined]
    with mock.patch.dict(dist.Backend._plugins, {"FAKE": plugin._replace(creator_fn=create)}):  # type: ignore[attr-defined]
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
        yield
