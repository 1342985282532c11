"""When the lines of executors run, while somebody measures a step.

Ordinary steps ask once a phase whether anybody does, and run the code that they always run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from graphshard.ir.program import Phase, Program
from graphshard.lower.executor import Boxed, Executor

# A point in time: seconds of the host's clock, or on CUDA an event that the device reaches behind what came before.
Stamp = Any


@dataclass
class PhaseRun:
    """One run of a phase.

    Attributes:
        program: a backward for others than the likely gradients is a program of its own, of the same title.
        executor: whose lines ran.
        began, ended: all of it.
        times: of regions, starts and waits: number of the line, begin and end.
    """

    program: Program
    phase: Phase
    executor: Executor
    began: Stamp
    ended: Stamp = None
    times: list[tuple[int, Stamp, Stamp]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the phase: "forward" or "backward"."""
        return "forward" if self.phase is self.program.phases.get("forward") else "backward"


class Recording:
    """What runs from now on, in order.

    Args:
        device: "cpu" or "cuda".
    """

    def __init__(self, device: str) -> None:
        self.runs: list[PhaseRun] = []
        self._cuda = device == "cuda"
        self._codes: dict[Executor, Boxed] = {}

    def stamp(self) -> Stamp:
        """Now; on CUDA when the current stream has done what it has been told so far."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, since: Stamp, until: Stamp) -> float:
        """Between two stamps; on CUDA the device must have reached both."""
        return float(since.elapsed_time(until) * 1e-3 if self._cuda else until - since)

    def code(self, executor: Executor, program: Program, phase: Phase) -> Boxed:
        """What a phase runs, which is recorded."""
        if executor not in self._codes:
            self._codes[executor] = executor.with_clock(lambda number: _Line(self, number))
        run = self._codes[executor]

        def recorded(inputs: list[Any]) -> Any:
            found = PhaseRun(program, phase, executor, self.stamp())
            self.runs.append(found)
            values = run(inputs)
            found.ended = self.stamp()
            return values

        return recorded


@dataclass
class _Line:
    """A line while it runs."""

    recording: Recording
    number: int
    began: Stamp = None

    def __enter__(self) -> None:
        self.began = self.recording.stamp()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.recording.runs[-1].times.append((self.number, self.began, self.recording.stamp()))


_now: Recording | None = None


def current_recording() -> Recording | None:
    """What records the step that runs; None nearly always."""
    return _now


@contextlib.contextmanager
def recording(device: str) -> Iterator[Recording]:
    """Record all phases that run inside the block, of whatever model; backward may run on another thread."""
    global _now
    before, _now = _now, Recording(device)
    try:
        yield _now
    finally:
        _now = before
