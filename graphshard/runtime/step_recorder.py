"""When the lines of executors run, while somebody measures a step.

Ordinary steps ask once a phase whether anybody does, and run the code that they always run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import torch

from graphshard.ir.program import Phase, Program
from graphshard.lower.executor import Boxed, Executor

# A point in time, as a clock has it.
Stamp = Any


class Clock(Protocol):
    """What tells when lines run."""

    def stamp(self) -> Stamp:
        """Now."""

    def seconds(self, since: Stamp, until: Stamp) -> float:
        """Between two stamps, once the clock has finished."""

    def finish(self) -> None:
        """Wait until all stamps have a time, and everything that was launched is done."""


class HostClock:
    """Where what returns is done."""

    def stamp(self) -> Stamp:
        return time.perf_counter()

    def seconds(self, since: Stamp, until: Stamp) -> float:
        return float(until - since)

    def finish(self) -> None:
        pass


@dataclass(frozen=True)
class DeviceClock:
    """Where launches return at once: stamps are events in the stream of the compute, on the device of the model.

    The device reaches an event when it is done with what that stream was told before. So a region is as long as its
    kernels, and what the device waits for the host between them; a wait is as long as the stream stands still for it,
    whatever the host does meanwhile. Backward's threads have the stream of forward.

    Attributes:
        cuda: `torch.cuda`, or what stands for it.
    """

    device: torch.device
    cuda: Any = torch.cuda

    def stamp(self) -> Stamp:
        event = self.cuda.Event(enable_timing=True)
        event.record(self.cuda.current_stream(self.device))
        return event

    def seconds(self, since: Stamp, until: Stamp) -> float:
        return float(since.elapsed_time(until) * 1e-3)

    def finish(self) -> None:
        self.cuda.synchronize(self.device)


def clock_of(device: torch.device) -> Clock:
    """The clock of what runs on a device."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


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
    """What runs from now on, in order, by a clock."""

    def __init__(self, clock: Clock) -> None:
        self.runs: list[PhaseRun] = []
        self.clock = clock
        self._codes: dict[Executor, Boxed] = {}

    def code(self, executor: Executor, program: Program, phase: Phase) -> Boxed:
        """What a phase runs, which is recorded."""
        if executor not in self._codes:
            self._codes[executor] = executor.function(
                around=lambda number, _: f"clock({number})", clock=lambda number: _Line(self, number)
            )
        run = self._codes[executor]

        def recorded(inputs: list[Any]) -> Any:
            found = PhaseRun(program, phase, executor, self.clock.stamp())
            self.runs.append(found)
            values = run(inputs)
            found.ended = self.clock.stamp()
            return values

        return recorded


@dataclass
class _Line:
    """A line while it runs."""

    recording: Recording
    number: int
    began: Stamp = None

    def __enter__(self) -> None:
        self.began = self.recording.clock.stamp()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.recording.runs[-1].times.append((self.number, self.began, self.recording.clock.stamp()))


_now: Recording | None = None


def current_recording() -> Recording | None:
    """What records the step that runs; None nearly always."""
    return _now


@contextlib.contextmanager
def recording(clock: Clock) -> Iterator[Recording]:
    """Record all phases that run inside the block, of whatever model; backward may run on another thread."""
    global _now
    before, _now = _now, Recording(clock)
    try:
        yield _now
    finally:
        _now = before
