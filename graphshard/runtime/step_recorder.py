"""Record when the lines of executors run, while a step is measured; other steps run their usual code."""

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

# A point in time, as a clock has it.
Stamp = Any


class HostClock:
    """Clock for lines of executors on a host, on which calls return when their work is done."""

    def stamp(self) -> Stamp:
        """Return the current time."""
        return time.perf_counter()

    def seconds(self, since: Stamp, until: Stamp) -> float:
        """Return the time between two stamps, after `finish`."""
        return float(until - since)

    def finish(self) -> None:
        """Wait until all stamps have a time, and everything that was launched is done."""


@dataclass(frozen=True)
class DeviceClock(HostClock):
    """Clock for a device: stamps are events in the stream of the compute.

    The device reaches an event after all earlier work of that stream. So a region includes its kernels and the gaps in
    which the device waits for the host; a wait is as long as the stream stands still for it. Backward's threads have
    the stream of forward.

    Attributes:
        cuda: `torch.cuda`, or its substitute in tests.
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


def clock_of(device: torch.device) -> HostClock:
    """Return the clock of a device."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


@dataclass
class PhaseRun:
    """One run of a phase; a backward for unlikely gradients is of a separate program with the same title.

    `times` are of regions, starts and waits: number of the line, begin and end.
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
    """Runs of phases in order, timed by a clock."""

    def __init__(self, clock: HostClock) -> None:
        self.runs: list[PhaseRun] = []
        self.clock = clock
        self._codes: dict[Executor, Boxed] = {}

    def code(self, executor: Executor, program: Program, phase: Phase) -> Boxed:
        """Return a phase's code, whose runs are recorded."""
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
    """Return the recording of the step that runs; None nearly always."""
    return _now


@contextlib.contextmanager
def recording(clock: HostClock) -> Iterator[Recording]:
    """Record all phases that run inside the block, of whatever model; backward may run on another thread."""
    global _now
    before, _now = _now, Recording(clock)
    try:
        yield _now
    finally:
        _now = before
