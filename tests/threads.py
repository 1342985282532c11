"""Ranks as threads of this process, on torch's multi-threaded process group, with the collectives of NCCL.

`on_threads(n, function)` calls `function(rank)` on n threads, each a rank with separate groups. Threads share the
random state, so random values must be passed in. Afterwards all groups are gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed import multi_threaded_pg
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

from tests.ranks import reset_distributed

ResultT = TypeVar("ResultT")

_TIMEOUT = 300.0


def on_threads(world_size: int, function: Callable[[int], ResultT]) -> list[ResultT]:
    """Return the results of the ranks in rank order.

    Raises:
        BaseException: the exception of the first rank that failed; the others are stopped.
    """
    results: dict[int, ResultT] = {}
    errors: list[BaseException] = []
    store = dist.HashStore()

    def run(rank: int) -> None:
        dist.init_process_group("threaded", store=store, rank=rank, world_size=world_size)
        try:
            results[rank] = function(rank)
        except BaseException as error:  # the others stop with SystemExit
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    with _threaded_groups():
        threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_TIMEOUT)
            if thread.is_alive():
                ProcessLocalGroup.exception_handle(TimeoutError())
                raise TimeoutError(f"{thread.name} has not come to an end within {_TIMEOUT:g} s")
    if errors:
        raise next((error for error in errors if not isinstance(error, SystemExit)), errors[0])
    return [results[rank] for rank in range(world_size)]


@contextmanager
def _threaded_groups() -> Iterator[None]:
    """Give each thread separate process groups within the block."""
    groups: Any = multi_threaded_pg
    if not hasattr(groups.ThreadLocalWorld, "comms"):  # torch 2.11 reads it when groups end, and lacks it here
        groups.ThreadLocalWorld.comms = []
    reset_distributed()
    ProcessLocalGroup.reset()
    groups._install_threaded_pg()
    _set_thread_isolation_mode(True)
    try:
        yield
    finally:
        _set_thread_isolation_mode(False)
        groups._uninstall_threaded_pg()
        ProcessLocalGroup.reset()
        reset_distributed()
