"""Predictions side by side, in processes that are forked once the model has been captured.

    this process    capture -> fork -> collect
    worker                     | next program of the table: passes, plans, predictions | ...
    worker                     | next program of the table ............................| ...

A worker begins with all that is known here: the captured model. It sends numbers; the program behind a prediction is
made again where a report of it is asked for. Threads do not survive a fork, nor does CUDA: beside either one, or a
process group, this process predicts alone unless it is told otherwise. The thread that shows progress is known: it
writes to the console, which a worker opens anew.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from typing import NamedTuple

import torch
import torch.distributed as dist

from graphshard.cost.profile import Profile
from graphshard.errors import ArgumentError, BatchError, GraphshardError, InfeasibleError, StageError
from graphshard.explain.explanation import Explanation
from graphshard.explain.study import Study
from graphshard.ir.given import check_count
from graphshard.ir.mesh import MeshLike
from graphshard.ir.progress import other_threads
from graphshard.ir.repeats import Uneven
from graphshard.lower.shares import cores_here

# Each needs a gigabyte for a program of a hundred blocks.
_MOST = 8
# Seconds that a table must take for processes to be forked unasked, if a program takes as long as its capture.
_LONG = 5.0
# Seconds between two looks at what workers say.
_POLL = 0.1


class Telling:
    """What is being done, told to a function that a worker replaces by a way to the process that collects."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show

    def __call__(self, text: str) -> None:
        self.show(text)


class Task(NamedTuple):
    """One prediction."""

    study: Study
    mesh: MeshLike
    profile: Profile
    network: str

    def outcome(self) -> Explanation | ArgumentError:
        """The prediction, or why there is none."""
        try:
            return self.study.explain(self.mesh, self.profile, self.network)
        except (InfeasibleError, BatchError, StageError) as error:
            return error


def outcomes(
    groups: Sequence[Sequence[Task]], workers: int | None, telling: Telling
) -> list[Explanation | ArgumentError]:
    """The outcomes of all tasks, in order.

    Args:
        groups: tasks with a mesh and setting in common, which share programs.
        workers: processes; None is one for each core if the rest takes long and this process can be forked.
        telling: what the studies tell; a worker's words come by it, too.

    Raises:
        ArgumentError: workers is no positive number, or larger than 1 where this process cannot be forked.
        GraphshardError: a worker ended.
    """
    why_not = _why_not()
    if workers is not None:
        check_count("workers", workers)
        if workers > 1 and why_not:
            raise ArgumentError(f"workers={workers} processes cannot be forked, as {why_not}. Pass workers=1.")
    if workers is None:
        free = len(groups) > 1 and not why_not and not other_threads()
        long = free and _capture(groups) * len(groups) >= _LONG
        workers = min(cores_here(), _MOST) if long else 1
    elif workers > 1:
        _capture(groups)
    workers = min(workers, len(groups))
    if workers < 2:
        return [task.outcome() for group in groups for task in group]
    theirs = zip(groups, _side_by_side(groups, workers, telling))
    return [
        one if isinstance(one, ArgumentError) else one.made_by(task.study.explain, *task[1:])
        for group, numbers in theirs
        for task, one in zip(group, numbers)
    ]


def _capture(groups: Sequence[Sequence[Task]]) -> float:
    """Capture what several workers would else, each for itself; the longest of it in seconds."""
    longest = 0.0
    for first in {id(group[0].study._subjects): group[0] for group in reversed(groups)}.values():
        began = time.perf_counter()
        with contextlib.suppress(GraphshardError, Uneven):  # a prediction says what is wrong, or captures every block
            first.study.capture(first.mesh)
        longest = max(longest, time.perf_counter() - began)
    return longest


def _why_not() -> str:
    """Why this process cannot be forked, or ""."""
    if sys.platform != "linux":
        return "that is safe on Linux only"
    if torch.cuda.is_initialized():
        return "CUDA is in use in this process"
    if dist.is_available() and dist.is_initialized():
        return "this process is a rank of a process group"
    if multiprocessing.current_process().daemon:
        return "this process is itself a worker of multiprocessing"
    return ""


def _side_by_side(
    groups: Sequence[Sequence[Task]], workers: int, telling: Telling
) -> list[list[Explanation | ArgumentError]]:
    context = multiprocessing.get_context("fork")
    said: SimpleQueue[str] = context.SimpleQueue()
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(workers, context, _begin, (groups, telling, said)) as pool:
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of forks beside threads of libraries; torch's own workers begin in the same way.
                warnings.simplefilter("ignore", DeprecationWarning)
                futures = [pool.submit(_numbers, index) for index in range(len(groups))]
            pending: set[Future[list[Explanation | ArgumentError]]] = set(futures)
            while pending:
                done, pending = wait(pending, _POLL, FIRST_COMPLETED)
                while not said.empty():
                    telling(said.get())
                for each in done:
                    each.result()  # raises what a worker has raised
            return [future.result() for future in futures]
        except BaseException as error:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()  # the pool, which sees them end, waits for them below
            if isinstance(error, BrokenProcessPool):
                raise GraphshardError(
                    f"one of {workers} processes that predict ended, as it does where memory is short. Pass workers=1, "
                    "which predicts in this process alone."
                ) from error
            raise


# Of a worker: its tasks, from `_begin`.
_TASKS: list[Sequence[Task]] = []


def _begin(groups: Sequence[Sequence[Task]], telling: Telling, said: SimpleQueue[str]) -> None:
    """In a worker that was forked."""
    _TASKS[:] = groups
    # Who wrote to it at the fork is not here to let go of its lock.
    locked, sys.stderr = sys.stderr, os.fdopen(os.dup(2), "w", 1)
    for handler in (*logging.getLogger().handlers, *logging.getLogger("graphshard").handlers):
        if isinstance(handler, logging.StreamHandler) and handler.stream is locked:
            handler.stream = sys.stderr
    telling.show = said.put
    torch.set_num_threads(1)  # threads that were there before the fork are not


def _numbers(index: int) -> list[Explanation | ArgumentError]:
    found = [task.outcome() for task in _TASKS[index]]
    return [one if isinstance(one, ArgumentError) else one.numbers() for one in found]
