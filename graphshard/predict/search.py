"""Several predictions: made in parallel processes, ranked by time per token, and compared.

Workers are forked once the model has been captured. They send numbers; the program of a prediction is made again where
a report of it is asked for. Threads do not survive a fork, nor does CUDA: with either one, or a process group, this
process predicts alone unless it is told otherwise. The thread that shows progress is known: it writes to the console,
which a worker reopens.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from rich.text import Text

from graphshard.cost.profile import Profile
from graphshard.errors import ArgumentError, BatchError, GraphshardError, InfeasibleError, StageError
from graphshard.ir.mesh import MeshLike
from graphshard.ir.repeats import BlocksDifferError
from graphshard.lower.inductor_cache import cores_here
from graphshard.predict.explanation import Explanation, shown_mesh
from graphshard.utils.argument_validation import check_count
from graphshard.utils.progress import other_threads
from graphshard.utils.text import format_amount, format_bytes, format_seconds, new_table, plain_table

if TYPE_CHECKING:
    from graphshard.predict.study import Study

# Each worker needs a gigabyte for a program of a hundred blocks.
_MOST_WORKERS = 8
# Seconds that a table must take for workers to be forked unasked, if a program takes as long as its capture.
_LONG = 5.0
# Seconds between two reads of workers' messages.
_POLL = 0.1
# Differences below this share of a step are not mentioned.
_NEGLIGIBLE = 0.0005


@dataclass(frozen=True)
class Grid:
    """Several predictions in one table, and why settings were left out."""

    rows: tuple[Explanation, ...]
    left_out: tuple[str, ...] = ()

    def ranking(self, most: int = 5) -> str:
        """Return the best few by time per token, why the first is first, and why others were left out."""
        fitting = [row for row in self.rows if row.limit != "memory"]
        best, lines = sorted(fitting, key=lambda row: row.seconds_per_token), []
        if best:
            texts = {"mesh": _name, "hardware": CELLS["hardware"], "network": CELLS["network"]}
            numbers = ("per token", "step", "microbatches", "compute", "exposed", "of the model", "MFU", "memory")
            lines.append(_table(best[:most], texts, numbers))
        if len(best) > 1:
            lines.append(f"* {_name(best[0])} is best, because {_because(best[0], best[1], 'the next one')}")
        lines += [f"* {_because(best[0], other)}" for other in best[2:most]]
        lines += [f"* {advice}" for row in best[:1] for advice in row.advice[:1]]
        too_large = [
            f"{_name(row)} on {row.hardware}: {format_bytes(row.peak_memory_bytes)} are needed, "
            f"{format_bytes(row.memory_capacity_bytes)} are there"
            for row in self.rows
            if row.limit == "memory"
        ]
        return "\n".join([*lines, *(f"* left out: {reason}" for reason in [*too_large, *self.left_out])])

    @property
    def best(self) -> Explanation:
        """The most tokens per second among rows that fit into memory, or among all if none does."""
        fitting = [row for row in self.rows if row.limit != "memory"]
        return max(fitting or self.rows, key=lambda row: row.tokens_per_second)

    def __str__(self) -> str:
        texts = {name: CELLS[name] for name in ("setting", "mesh", "hardware", "network")}
        numbers = ("step", "compute", "exposed", "bound", "gap", "tokens/s", "MFU", "memory")
        return _table(self.rows, texts, numbers)

    def to_json(self) -> str:
        """Return all numbers as JSON."""
        return json.dumps([row.to_dict() for row in self.rows], indent=1)


def _amount(row: Any, name: str) -> str:
    """Return a number of the training's cost; "" where it is not known."""
    value = getattr(row.cost, name, None)
    return "" if value is None else format_amount(value)


# Cells by the heading of their column, of an `Explanation` or an `Outcome`.
_Cell = Callable[[Any], str]
CELLS: dict[str, _Cell] = {
    "setting": lambda row: row.label,
    "mesh": lambda row: " x ".join(map(str, row.mesh.values())),
    "hardware": lambda row: row.hardware,
    "network": lambda row: row.network,
    "per token": lambda row: format_seconds(row.seconds_per_token),
    "step": lambda row: format_seconds(row.step_time_s),
    "microbatches": lambda row: str(row.microbatches),
    "compute": lambda row: format_seconds(row.compute_s),
    "exposed": lambda row: format_seconds(row.exposed_comm_s),
    "of the model": lambda row: format_seconds(row.model_comm_s),
    "bound": lambda row: format_seconds(row.lower_bound_s),
    "gap": lambda row: f"{row.gap:.1%}",
    "tokens/s per GPU": lambda row: f"{row.tokens_per_second_per_gpu:,.0f}",
    "tokens/s": lambda row: f"{row.tokens_per_second:,.0f}",
    "MFU": lambda row: f"{row.mfu:.1%}",
    "memory": lambda row: format_bytes(row.peak_memory_bytes),
    "bubble": lambda row: format_seconds(row.bubble_s),
    "days": lambda row: _amount(row, "days"),
    "GPU hours": lambda row: _amount(row, "gpu_hours"),
    "money": lambda row: _amount(row, "money"),
}


def _table(rows: Sequence[Explanation], texts: Mapping[str, _Cell], numbers: Sequence[str]) -> str:
    """Return a table, with columns of pipelines and of the training's cost where a row has them."""
    if any(row.pipeline for row in rows):
        numbers = (*numbers, "bubble")
    if any(row.cost for row in rows):
        numbers = (*numbers, "days", "GPU hours", "money")
    table = new_table(texts, numbers)
    table.add_column("limited by")
    for row in rows:
        left = (Text(cell(row)) for cell in texts.values())
        table.add_row(*left, *(CELLS[heading](row) for heading in numbers), row.limit)
    return plain_table(table)


def _name(row: Explanation) -> str:
    """Name the setting of a prediction: "dp 32, tp 8 (keep)"."""
    return f"{shown_mesh(row.mesh)}{f' ({row.label})' if row.label else ''}"


def seconds_by_part(row: Explanation) -> dict[str, float]:
    """Return the parts of a step: seconds for each token of all ranks."""
    parts = {
        "compute": row.compute_s,
        "waiting for parameters and gradients": row.exposed_comm_s - row.model_comm_s,
        "the model's own collectives": row.model_comm_s,
        "the optimizer": row.optimizer_s,
        "the bubble": row.bubble_s,
    }
    return {what: seconds / row.step_tokens for what, seconds in parts.items()}


def _because(best: Explanation, other: Explanation, which: str = "") -> str:
    """Say which parts of a token's time are longer in the other prediction, and which are shorter."""
    whole, mine, others = other.seconds_per_token, seconds_by_part(best), seconds_by_part(other)
    shares = {what: (others[what] - mine[what]) / whole for what in mine}
    order = sorted(shares.items(), key=lambda share: -share[1])
    more = [f"{share:.1%} {what}" for what, share in order if share > _NEGLIGIBLE]
    less = [f"{-share:.1%} {what}" for what, share in reversed(order) if share < -_NEGLIGIBLE]
    if not more:
        return f"{_name(other)} is no faster: {format_seconds(whole)} per token"
    saved = f", and saves {', '.join(less)}" if less else ""
    named = f"{_name(other)}, {which} ({format_seconds(whole)} per token)," if which else _name(other)
    return f"{named} spends of {'that' if which else 'its'} time {', '.join(more)} more{saved}"


@dataclass
class Messages:
    """Progress, passed to a function, which a worker replaces by a queue to the collecting process."""

    show: Callable[[str], None]

    def __call__(self, text: str) -> None:
        self.show(text)


class Task(NamedTuple):
    """One prediction."""

    study: Study
    mesh: MeshLike
    profile: Profile
    network: str

    def outcome(self) -> Explanation | ArgumentError:
        """Return the prediction, or why there is none."""
        try:
            return self.study.explain(self.mesh, self.profile, self.network)
        except (InfeasibleError, BatchError, StageError) as error:
            return error


def outcomes(
    groups: Sequence[Sequence[Task]], workers: int | None, messages: Messages
) -> list[Explanation | ArgumentError]:
    """Return the outcomes of all tasks, in order; tasks of a group share programs.

    `workers` None is one for each core if the rest takes long and this process can be forked.
    """
    why_not = _why_not_fork()
    if workers is not None:
        check_count("workers", workers)
        if workers > 1 and why_not:
            raise ArgumentError(f"workers={workers} processes cannot be forked, as {why_not}. Pass workers=1.")
    if workers is None:
        free = len(groups) > 1 and not why_not and not other_threads()
        long = free and _capture(groups) * len(groups) >= _LONG
        workers = min(cores_here(), _MOST_WORKERS) if long else 1
    elif workers > 1:
        _capture(groups)
    workers = min(workers, len(groups))
    if workers < 2:
        return [task.outcome() for group in groups for task in group]
    return [
        one if isinstance(one, ArgumentError) else one.made_by(task.study.explain, *task[1:])
        for group, numbers in zip(groups, _in_workers(groups, workers, messages))
        for task, one in zip(group, numbers)
    ]


def _capture(groups: Sequence[Sequence[Task]]) -> float:
    """Capture here what each worker would capture otherwise; return the longest of it in seconds."""
    longest = 0.0
    for first in {id(group[0].study._targets): group[0] for group in reversed(groups)}.values():
        began = time.perf_counter()
        # A prediction says what is wrong, or captures every block.
        with contextlib.suppress(GraphshardError, BlocksDifferError):
            first.study.capture(first.mesh)
        longest = max(longest, time.perf_counter() - began)
    return longest


def _why_not_fork() -> str:
    if sys.platform != "linux":
        return "that is safe on Linux only"
    if torch.cuda.is_initialized():
        return "CUDA is in use in this process"
    if dist.is_available() and dist.is_initialized():
        return "this process is a rank of a process group"
    if multiprocessing.current_process().daemon:
        return "this process is itself a worker of multiprocessing"
    return ""


def _in_workers(
    groups: Sequence[Sequence[Task]], workers: int, messages: Messages
) -> list[list[Explanation | ArgumentError]]:
    context = multiprocessing.get_context("fork")
    queue: SimpleQueue[str] = context.SimpleQueue()
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(workers, context, _start_worker, (groups, messages, queue)) as pool:
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of forks while libraries have threads; torch's own workers start in the same way.
                warnings.simplefilter("ignore", DeprecationWarning)
                futures = [pool.submit(_numbers, index) for index in range(len(groups))]
            pending: set[Future[list[Explanation | ArgumentError]]] = set(futures)
            while pending:
                done, pending = wait(pending, _POLL, FIRST_COMPLETED)
                while not queue.empty():
                    messages(queue.get())
                for each in done:
                    each.result()  # raises a worker's error
            return [future.result() for future in futures]
        except BaseException as error:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()  # the pool sees them end, and waits for them below
            if isinstance(error, BrokenProcessPool):
                raise GraphshardError(
                    f"one of {workers} processes that predict ended, as it does where memory is short. Pass workers=1, "
                    "which predicts in this process alone."
                ) from error
            raise


# A worker's tasks, from `_start_worker`.
_TASKS: list[Sequence[Task]] = []


def _start_worker(groups: Sequence[Sequence[Task]], messages: Messages, queue: SimpleQueue[str]) -> None:
    _TASKS[:] = groups
    # The thread that held stderr's lock at the fork does not exist here to release it.
    locked, sys.stderr = sys.stderr, os.fdopen(os.dup(2), "w", 1)
    for handler in (*logging.getLogger().handlers, *logging.getLogger("graphshard").handlers):
        if isinstance(handler, logging.StreamHandler) and handler.stream is locked:
            handler.stream = sys.stderr
    messages.show = queue.put
    torch.set_num_threads(1)  # threads from before the fork do not exist here


def _numbers(index: int) -> list[Explanation | ArgumentError]:
    found = [task.outcome() for task in _TASKS[index]]
    return [one if isinstance(one, ArgumentError) else one.numbers() for one in found]
