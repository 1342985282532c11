"""Process group on CPUs whose collectives behave as NCCL's: a launch returns at once, and may never complete.

A collective is complete when all ranks have launched it; results keep the contents of their memory. What a test calls
in place of `loss.item()` waits for the last launch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

NAME = "launching"


class LaunchingGroup(dist.ProcessGroup):
    """Process group that counts launches in the store.

    Attributes:
        launched: number of collectives that this rank has launched.
        ended: set by `abort`, after which the device goes on.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._store, self._size = store.clone(), size  # type: ignore[attr-defined]
        self.launched, self.ended = 0, threading.Event()

    def getBackendName(self) -> str:
        return NAME

    def getSize(self) -> int:
        return self._size

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def is_done(self, number: int) -> bool:
        """Return whether a collective is complete, or aborted."""
        return self.ended.is_set() or number == 0 or self._store.add(f"launch {number}", 0) >= self._size

    def completion(self, _: str) -> Callable[[], bool]:
        """Return whether everything launched so far is complete, as a function."""
        return functools.partial(self.is_done, self.launched)

    def synchronize(self) -> None:
        """Wait as the host does for a result."""
        while not self.is_done(self.launched):
            self.ended.wait(0.05)

    def abort(self) -> None:
        self.ended.set()

    def _launch(self, *args: Any, **kwargs: Any) -> Any:
        self.launched += 1
        self._store.add(f"launch {self.launched}", 1)
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return _create_work_from_future(future)

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        work = self._launch()
        self.synchronize()
        return work

    _allgather_base = allgather_into_tensor_coalesced = _launch
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = _launch
    # Names in torch 2.13.
    all_gather_single = all_gather_single_coalesced = _launch
    reduce_scatter_single = reduce_scatter_single_coalesced = _launch
    allreduce = allreduce_coalesced = broadcast = _launch


def join(store: dist.Store, rank: int, size: int) -> LaunchingGroup:
    """Make the default process group."""
    made: list[LaunchingGroup] = []

    def create(store: dist.Store, rank: int, size: int, timeout: Any) -> LaunchingGroup:
        made.append(LaunchingGroup(store, rank, size))
        return made[-1]

    dist.Backend.register_backend(NAME, create, devices=["cpu"])
    dist.init_process_group(NAME, store=store, rank=rank, world_size=size)
    return made[0]
