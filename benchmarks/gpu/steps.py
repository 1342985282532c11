"""Part "steps": graphshard, FSDP2, compiled FSDP2, `torch.compile` and DDP, interleaved.

Each runs in a separate process (`workers.py`). As rank 0 of 8 and of 64, compute, copies and memory are real, and
communication takes no time. Gathered values are meaningless, and so are losses.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from benchmarks.gpu.settings import WORLDS, Setup, Size
from benchmarks.gpu.table import Emit, Row
from benchmarks.gpu.variants import names
from benchmarks.gpu.workers import FailedError, Worker

# Note on first steps, which are prepared concurrently; part "first" measures some alone.
_BESIDE = "first steps are side by side"


def measure(setup: Setup, emit: Emit, seconds: float) -> None:
    """Measure all settings, the most informative first, and name those without remaining time.

    Args:
        seconds: for all of them. A setting starts if at least the time of the longest one remains.
    """
    # Of each process; there are up to nine.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // 4)))
    end = time.monotonic() + seconds
    longest = 0.0
    workers: dict[str, Worker] = {}
    try:
        for size, num_ranks in settings(setup):
            began = time.monotonic()
            row = Row("steps", f"{size}, {ranks(num_ranks)}", note=_BESIDE)
            if began + longest > end:
                emit(replace(row, note="left out: no time"))
                continue
            print(row.setting, flush=True)
            _setting(setup, size, num_ranks, workers, row, emit, end)
            longest = max(longest, time.monotonic() - began)
    finally:
        for worker in workers.values():
            worker.stop()


def settings(setup: Setup) -> Iterator[tuple[Size, int]]:
    """Yield all settings: a rank of eight and the largest size first; in a dry run each size and each world once."""
    sizes = setup.sizes()[::-1]
    if setup.is_dry:
        yield from zip(sizes, WORLDS, strict=True)
        return
    one, eight, more = WORLDS
    yield from ((size, num_ranks) for num_ranks in (eight, one, more) for size in sizes)


def ranks(number: int) -> str:
    """Return the name of a setting in rows."""
    return "one rank" if number == 1 else f"rank 0 of {number}"


def _setting(
    setup: Setup, size: Size, num_ranks: int, workers: dict[str, Worker], row: Row, emit: Emit, end: float
) -> None:
    """Measure all variants of one setting. Their processes stay for the next one; a lost process is started again
    there.
    """
    rows = {name: replace(row, variant=name) for name in names(num_ranks)}

    @contextlib.contextmanager
    def telling(name: str) -> Iterator[None]:
        """Report a variant that fails and drop it from the setting."""
        try:
            yield
        except FailedError as error:
            emit(replace(rows.pop(name), failed=True, note=str(error)))
            if workers[name].process.exitcode is not None:
                workers.pop(name).stop()

    for name in rows:
        if name not in workers:
            workers[name] = Worker(setup, name)
        workers[name].ask("begin", size, num_ranks)
    for name in list(rows):
        with telling(name):
            rows[name] = replace(rows[name], first=workers[name].answer(end))
            print(f"  {name}: {rows[name].first:.1f} s", flush=True)
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(setup.turns):
        for name in list(rows):
            with telling(name):
                workers[name].ask("turn")
                times[name].append(workers[name].answer(end))
    for name in list(rows):
        with telling(name):
            workers[name].ask("end")
            peak, kernels = workers[name].answer(end)
            emit(replace(rows[name], step=median(times[name]), peak=peak, kernels=kernels))
