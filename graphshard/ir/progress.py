"""What is being done, a phase at a time, while graphshard captures, compiles, predicts or measures.

    on a terminal       a spinner         graphshard: Llama: compile region_3, 4 of 14, 7 s (31 s in all)
    elsewhere           for commands      graphshard explain:      2.0 s  capture

A line is written on stderr when a phase ends, and now and then while one goes on, so that a log moves. `compile` and
other functions are silent there, as the programs that call them have logs of their own.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.status import Status
from rich.text import Text

from graphshard.errors import visible

# Seconds between lines about one phase.
_BEAT = 30.0
# Of the thread that shows what is being done.
_THREAD = "graphshard-progress"


def other_threads() -> list[threading.Thread]:
    """Python's threads besides this one and those that show progress, which hold no lock but of the console."""
    here = threading.current_thread()
    return [thread for thread in threading.enumerate() if thread is not here and thread.name != _THREAD]


@contextlib.contextmanager
def progress(title: str, *, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """Yields a function that is told which phase begins; silent on ranks other than 0.

    Args:
        title: what the phases are of.
        lines: write lines off a terminal.
    """
    console = Console(stderr=True)
    phases = _Phases(title, console)
    if os.environ.get("RANK", "0") != "0":
        yield phases.begin
    elif console.is_terminal:
        before = set(threading.enumerate())
        with Status(phases, console=console):  # rich asks them anew for each frame
            for thread in set(threading.enumerate()) - before:
                thread.name = _THREAD
            yield phases.begin
    elif lines:
        with _beating(phases):
            yield phases.begin_line
        phases.end_lines()
    else:
        yield phases.begin


@dataclass
class _Phases:
    """The phase that goes on, and since when."""

    title: str
    console: Console
    begun: float = field(default_factory=time.monotonic)
    now: tuple[str, float] | None = None

    def begin(self, phase: str) -> None:
        """Another phase; it ends the one before."""
        self.now = phase, time.monotonic()

    def begin_line(self, phase: str) -> None:
        """Another phase, with a line for the one before."""
        self.write()
        self.begin(phase)

    def end_lines(self) -> None:
        """All is done."""
        self.write()
        self.now = "in all", self.begun
        self.write()

    def write(self, more: str = "") -> None:
        """A line about the phase."""
        if self.now is not None:
            phase, begun = self.now
            text = f"{self.title}: {time.monotonic() - begun:8.1f} s  {phase}{more}"
            with contextlib.suppress(OSError):  # a full disk is not the prediction's
                self.console.print(Text(visible(text)), soft_wrap=True)

    def __rich__(self) -> Text:
        """What the spinner says."""
        text = self.title
        if self.now is not None:
            phase, begun = self.now
            now = time.monotonic()
            text += f": {phase}, {now - begun:.0f} s ({now - self.begun:.0f} s in all)"
        return Text(visible(text), no_wrap=True, overflow="ellipsis")


@contextlib.contextmanager
def _beating(phases: _Phases) -> Iterator[None]:
    """A line now and then from a thread of its own, as the phase has the main one."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_BEAT):
            phases.write(", under way")

    thread = threading.Thread(target=beat, name=_THREAD, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
