"""Updates on the host beside a backward that computes on a device, where shards are offloaded.

    this thread    kernels ... | arrived(0) | kernels ...        | arrived(1) | kernels ... | finish
    another                      waits for copies, updates 0 ...   waits for copies, updates 1 ...

A gradient is handed over when its copy to the host has been started. The other thread waits until that copy is there,
and until copies to the device that were started before have read the shard.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from graphshard.ir.operators import copies_so_far


class Beside:
    """One thread, which does what it is given in order."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._begun: list[Future[None]] = []

    def run(self, work: Callable[[], None], device: torch.device) -> None:
        """Do something when the copies to and from a device that have been started are there; returns at once."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "graphshard-updates")
        self._begun.append(self._pool.submit(_when, copies_so_far(device), work, self._begun[-1:]))

    def finish(self) -> None:
        """Wait until all of it is done.

        Raises:
            Exception: what was raised first; nothing was done after that.
        """
        begun, self._begun = self._begun, []
        wait(begun)
        for done in begun:
            done.result()


def _when(ready: Callable[[], None], work: Callable[[], None], before: list[Future[None]]) -> None:
    for done in before:
        done.result()  # raises what ended the work before
    ready()
    with torch.no_grad():  # a setting of threads
        work()
