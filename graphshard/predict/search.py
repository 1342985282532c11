"""Several predictions side by side; which is the best, and why: by time per token, and what makes the difference."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table
from rich.text import Text

from graphshard.cost.profile import Profile
from graphshard.errors import ArgumentError, BatchError, GraphshardError, InfeasibleError, StageError
from graphshard.ir.mesh import MeshLike
from graphshard.ir.repeats import BlocksDifferError
from graphshard.lower.rank_work_split import cores_here
from graphshard.predict.explanation import Explanation
from graphshard.predict.study import Study
from graphshard.utils.argument_validation import check_count
from graphshard.utils.progress import other_threads
from graphshard.utils.text import format_amount, format_bytes, format_seconds, plain_table

# Columns of a training, if it was asked what one costs.
_COST = ("days", "GPU hours", "money")
# A column of pipelines, if there are any.
_STAGED = ("bubble",)


@dataclass(frozen=True)
class Grid:
    """Several predictions side by side.

    Attributes:
        left_out: what there is no prediction for, and why: it does not fit, or the mesh is larger than the batch.
    """

    rows: tuple[Explanation, ...]
    left_out: tuple[str, ...] = ()

    def ranking(self, most: int = 5) -> str:
        """The best few by time per token, why the first is first, and what was left out for which reason."""
        return _ranking(self.rows, self.left_out, most)

    @property
    def best(self) -> Explanation:
        """Most tokens per second of those that fit into memory, or of all if none does."""
        fitting = [row for row in self.rows if row.limit != "memory"]
        return max(fitting or self.rows, key=lambda row: row.tokens_per_second)

    def __str__(self) -> str:
        """One line for each."""
        table = Table(box=None)
        headings = ("step", "compute", "exposed", "bound", "gap", "tokens/s", "MFU", "memory")
        for heading in ("setting", "mesh", "hardware", "network"):
            table.add_column(heading)
        costed, staged = any(row.cost for row in self.rows), any(row.pipeline for row in self.rows)
        for heading in (*headings, *(_STAGED if staged else ()), *(_COST if costed else ())):
            table.add_column(heading, justify="right")
        table.add_column("limited by")
        for row in self.rows:
            table.add_row(
                *map(Text, (row.label, " x ".join(map(str, row.mesh.values())), row.hardware, row.network)),
                format_seconds(row.step_time_s),
                format_seconds(row.compute_s),
                format_seconds(row.exposed_comm_s),
                format_seconds(row.lower_bound_s),
                f"{row.gap:.1%}",
                f"{row.tokens_per_second:,.0f}",
                f"{row.mfu:.1%}",
                format_bytes(row.peak_memory_bytes),
                *((format_seconds(row.bubble_s),) if staged else ()),
                *(_cost_cells(row) if costed else ()),
                row.limit,
            )
        return plain_table(table)

    def to_json(self) -> str:
        """All numbers as JSON."""
        return json.dumps([row.to_dict() for row in self.rows], indent=1)


def ranked(rows: Sequence[Explanation]) -> list[Explanation]:
    """Those that fit into memory, the least time per token of all ranks first."""
    return sorted((row for row in rows if row.limit != "memory"), key=lambda row: row.seconds_per_token)


def name_of(row: Explanation) -> str:
    """What a prediction is for: "dp 32, tp 8 (keep)"."""
    axes = ", ".join(f"{name} {size}" for name, size in row.mesh.items())
    return f"{axes}{f' ({row.label})' if row.label else ''}"


def _ranking(rows: Sequence[Explanation], left_out: Sequence[str], most: int) -> str:
    """The best few as a table, why the first is first, and what does not fit."""
    best = ranked(rows)
    lines = [_table(best[:most])] if best else []
    if len(best) > 1:
        lines.append(f"* {name_of(best[0])} is best, because {_because(best[0], best[1], 'the next one')}")
    lines += [f"* {_because(best[0], other)}" for other in best[2:most]]
    if best:
        lines += [f"* {advice}" for advice in best[0].advice[:1]]
    lines += [f"* left out: {reason}" for reason in [*_too_large(rows), *left_out]]
    return "\n".join(lines)


def _table(rows: Sequence[Explanation]) -> str:
    table = Table(box=None)
    for heading in ("mesh", "hardware", "network"):
        table.add_column(heading)
    costed = any(row.cost for row in rows)
    staged = any(row.pipeline for row in rows)
    headings = ("per token", "step", "microbatches", "compute", "exposed", "of the model", "MFU", "memory")
    for heading in (*headings, *(_STAGED if staged else ()), *(_COST if costed else ())):
        table.add_column(heading, justify="right")
    table.add_column("limited by")
    for row in rows:
        table.add_row(
            *map(Text, (name_of(row), row.hardware, row.network)),
            format_seconds(row.seconds_per_token),
            format_seconds(row.step_time_s),
            str(row.microbatches),
            format_seconds(row.compute_s),
            format_seconds(row.exposed_comm_s),
            format_seconds(row.model_comm_s),
            f"{row.mfu:.1%}",
            format_bytes(row.peak_memory_bytes),
            *((format_seconds(row.bubble_s),) if staged else ()),
            *(_cost_cells(row) if costed else ()),
            row.limit,
        )
    return plain_table(table)


def _cost_cells(row: Explanation) -> tuple[str, ...]:
    """As `_COST` says; a row of a setting without tokens has none."""
    if row.cost is None:
        return "", "", ""
    money = "" if row.cost.money is None else format_amount(row.cost.money)
    return format_amount(row.cost.days), format_amount(row.cost.gpu_hours), money


def seconds_by_part(row: Explanation) -> dict[str, float]:
    """What a step consists of: seconds for each token of all ranks."""
    parts = {
        "compute": row.compute_s,
        "waiting for parameters and gradients": row.exposed_comm_s - row.model_comm_s,
        "the model's own collectives": row.model_comm_s,
        "the optimizer": row.optimizer_s,
        "the bubble": row.bubble_s,
    }
    return {what: seconds / row.step_tokens for what, seconds in parts.items()}


def _because(best: Explanation, other: Explanation, which: str = "") -> str:
    """What the second one spends more time on, for each token, and what less.

    Args:
        which: it is, in words.
    """
    whole, mine, others = other.seconds_per_token, seconds_by_part(best), seconds_by_part(other)
    shares = {what: (others[what] - mine[what]) / whole for what in mine}
    more = [f"{share:.1%} {what}" for what, share in sorted(shares.items(), key=lambda s: -s[1]) if share > 0.0005]
    less = [f"{-share:.1%} {what}" for what, share in sorted(shares.items(), key=lambda s: s[1]) if share < -0.0005]
    if not more:
        return f"{name_of(other)} is no faster: {format_seconds(whole)} per token"
    saved = f", and saves {', '.join(less)}" if less else ""
    named = f"{name_of(other)}, {which} ({format_seconds(whole)} per token)," if which else name_of(other)
    return f"{named} spends of {'that' if which else 'its'} time {', '.join(more)} more{saved}"


def _too_large(rows: Sequence[Explanation]) -> list[str]:
    large = [row for row in rows if row.limit == "memory"]
    return [
        f"{name_of(row)} on {row.hardware}: {format_bytes(row.peak_memory_bytes)} are needed, "
        f"{format_bytes(row.memory_capacity_bytes)} are there"
        for row in large
    ]


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
        with contextlib.suppress(
            GraphshardError, BlocksDifferError
        ):  # a prediction says what is wrong, or captures every block
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
