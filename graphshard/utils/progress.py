"""Long work: phases shown while it goes on, cancellation, and a paused garbage collector.

Graphs of torch.fx are many small objects that refer to each other and live as long as the graph. Full collections visit
all of them again and again while a graph grows; they took a third of the CPU time of a deep model's capture and passes.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from rich.console import Console
from rich.status import Status
from rich.text import Text

from graphshard.errors import visible

_CHECK: ContextVar[Callable[[], None] | None] = ContextVar("graphshard_cancellation_check", default=None)
# Seconds between lines about one phase.
_BEAT = 30.0
# Seconds of silence in functions: a line follows them, and a phase that takes as long has one at its end.
_SILENT = 5.0
# Work that follows within a second continues the silence of the work before, such as programs of the units of a module.
_FOLLOWS_WITHIN = 1.0
# Name of the thread that shows the phase.
_THREAD = "graphshard-progress"


@contextlib.contextmanager
def cancelled_by(check: Callable[[], None]) -> Iterator[None]:
    """Let `check_cancelled` call a function that raises if the work is to end; it is called often."""
    before = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(before)


def check_cancelled() -> None:
    """Raise the error that ends the work of this thread, if there is one."""
    if (check := _CHECK.get()) is not None:
        check()


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector in the block; objects without cycles are freed as usual."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def other_threads() -> list[threading.Thread]:
    """Return the Python threads except this one and threads that show progress, which only lock the console."""
    here = threading.current_thread()
    return [thread for thread in threading.enumerate() if thread is not here and thread.name != _THREAD]


@contextlib.contextmanager
def progress(title: str, *, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that starts a phase, given its name; only rank 0 prints.

    A terminal has a spinner. Elsewhere, as in log files and notebooks, there is a line after 5 s without one, and one
    for each phase that takes as long.

    Args:
        lines: write a line for each phase, however short, if stderr is not a terminal.
    """
    console = Console(stderr=True)
    phases = _Phases(title, console, 0.0 if lines else _SILENT)
    if os.environ.get("RANK", "0") != "0":
        yield phases.begin
    elif console.is_terminal and not console.is_jupyter:
        before = set(threading.enumerate())
        with Status(phases, console=console):  # rich renders `phases` for each frame
            for thread in set(threading.enumerate()) - before:
                thread.name = _THREAD
            yield phases.begin
    else:
        if not lines and phases.begun - _silence.ended < _FOLLOWS_WITHIN:
            phases.told = _silence.told
        try:
            with _beating(phases):
                yield phases.begin_line
            phases.end()
        finally:
            _silence.told, _silence.ended = phases.told, time.monotonic()


@dataclass
class _Phases:
    """The current phase and its start.

    Steps of a phase, such as "compile region_3, 4 of 14", are one phase: their first word is the same.

    Attributes:
        silent: phases that take fewer seconds have no line.
        told: when the last line was written, or silence began.
    """

    title: str
    console: Console
    silent: float = 0.0
    begun: float = field(default_factory=time.monotonic)
    now: tuple[str, float] | None = None
    told: float = field(default_factory=time.monotonic)
    _has_line: bool = False

    def begin(self, phase: str) -> None:
        """Start a phase, which ends the one before."""
        self.now = phase, time.monotonic()

    def begin_line(self, phase: str) -> None:
        """Write a line about the phase before, and start one."""
        if self.silent and self.now is not None and self.now[0].split()[:1] == phase.split()[:1]:
            self.now = phase, self.now[1]
            return
        self._end_phase()
        self.begin(phase)

    def end(self) -> None:
        """Write a line about the last phase, and one about all of them if any had one."""
        self._end_phase()
        if self._has_line:
            self.now = "in all", self.begun
            self.write()

    def _end_phase(self) -> None:
        if self.now is not None and time.monotonic() - min(self.now[1], self.told) >= self.silent:
            self.write()

    def write(self, more: str = "") -> None:
        """Write a line about the phase."""
        if self.now is not None:
            self._has_line, self.told = True, time.monotonic()
            phase, begun = self.now
            text = f"{self.title}: {time.monotonic() - begun:8.1f} s  {phase}{more}"
            with contextlib.suppress(OSError):  # a full disk does not end the work
                self.console.print(Text(visible(text)), soft_wrap=True)

    def __rich__(self) -> Text:
        """Return the text of the spinner."""
        text = self.title
        if self.now is not None:
            phase, begun = self.now
            now = time.monotonic()
            text += f": {phase}, {now - begun:.0f} s ({now - self.begun:.0f} s in all)"
        return Text(visible(text), no_wrap=True, overflow="ellipsis")


@dataclass
class _Silence:
    """Silence of the last work that has ended: since when, and when that was."""

    told: float = 0.0
    ended: float = -math.inf


_silence = _Silence()


@contextlib.contextmanager
def _beating(phases: _Phases) -> Iterator[None]:
    """Write a line when there was none for long, from a thread: a phase occupies the main one."""
    done = threading.Event()

    def beat() -> None:
        phase, pause = None, _BEAT
        while not done.wait(min(_BEAT, _SILENT, 1.0)):
            if phases.now is not None and phases.now[1] != phase:
                phase, pause = phases.now[1], phases.silent or _BEAT
            if time.monotonic() - phases.told >= pause:
                phases.write(", under way")
                pause = _BEAT

    thread = threading.Thread(target=beat, name=_THREAD, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
