"""Split of regions among the ranks of a machine: each compiles a share, and finds the other regions in the cache.

    rank 0    takes region_1, region_4, region_6       compiles them      waits for region_2: it is in the cache
    rank 1    takes region_2, region_3, region_5       compiles them      region_1 is in the cache, ...

A file locks each region that a rank has taken. A rank that ends, for any reason, releases its locks, and others compile
what is missing. A rank waits for one region at a time and holds none while it does, so ranks never wait in a circle.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from filelock import BaseFileLock, FileLock, Timeout

from graphshard.utils.progress import check_cancelled

log = logging.getLogger(__name__)

_ASKS_EVERY = 0.25
# How long a rank waits for another to compile a region, which takes a second, or a minute on a machine that is busy.
PATIENCE = 180.0


class Claim:
    """Regions that a rank compiles now, by name; other ranks wait for the locked ones."""

    def __init__(self, names: Sequence[str], locks: Mapping[str, BaseFileLock]) -> None:
        self.names = tuple(names)
        self._locks = dict(locks)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._locks):
            self.release(name)

    def release(self, name: str) -> None:
        """Release a region that is in the cache, or cannot be compiled."""
        if name in self._locks:
            self._locks.pop(name).release()


@dataclass
class Claims:
    """Claims on all regions: a share at a time, and then the regions that other ranks had taken.

    Args:
        shares: names of regions, this rank's own share first.
        keys: of the regions, by name.
        directory: of the locks.
        show: is called with what is waited for.
    """

    shares: Sequence[Sequence[str]]
    keys: Mapping[str, str]
    directory: Path
    show: Callable[[str], None]
    _taken: list[str] = field(default_factory=list, init=False)

    def free(self) -> Iterator[Claim]:
        """Claim regions that are free; several claims may be entered at once."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for share in self.shares:
            locks = {}
            for name in share:
                lock = self._lock(name)
                try:
                    locks[name] = lock.acquire(timeout=0).lock
                except Timeout:
                    self._taken.append(name)
            if locks:
                yield Claim(list(locks), locks)

    def others(self) -> Iterator[Claim]:
        """Wait for the regions that others had, and claim each; leave it, and all free ones, before the next."""
        for name in self._taken:
            self.show(f"wait for {name}, which another rank compiles")
            lock = self._lock(name)
            yield Claim([name], {name: lock} if _waited_for(lock, name) else {})

    def _lock(self, name: str) -> BaseFileLock:
        return FileLock(self.directory / f"{self.keys[name]}.lock")


def _waited_for(lock: BaseFileLock, name: str) -> bool:
    """Wait for a lock; False if it takes too long."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        check_cancelled()
        try:
            lock.acquire(timeout=_ASKS_EVERY)
        except Timeout:
            continue
        return True
    log.warning("another process has not compiled %s in %.1f s: this one does", name, PATIENCE)
    return False


def shares_of(sizes: Mapping[str, int], number: int) -> list[list[str]]:
    """Divide regions into `number` shares of about the same size, equal on all ranks that have the same regions.

    Args:
        sizes: of the regions by name, in nodes.
    """
    shares: list[list[str]] = [[] for _ in range(max(1, min(number, len(sizes))))]
    loads = [0] * len(shares)
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        least = loads.index(min(loads))
        shares[least].append(name)
        loads[least] += sizes[name]
    return [[name for name in sizes if name in share] for share in shares]


def place_here() -> tuple[int, int]:
    """Return this process's place among the ranks of its machine, and their number, according to the launcher.

    By default all ranks are taken to be on one machine, which only makes shares smaller.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)
    size = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    return int(os.environ.get("LOCAL_RANK", rank)) % size, size


def cores_here() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
