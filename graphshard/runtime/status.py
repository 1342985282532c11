"""What a rank says about itself in the rendezvous store, and what others make of it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

# Frames of these folders are not where the user's program is.
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"])

SAME_CALLS = (
    "All ranks must make the same sequence of calls, with the same requires_grad flags and the same switches: look for "
    "a branch that depends on the rank or on the data."
)


@dataclass(frozen=True)
class Step:
    """A forward or backward with collectives that a rank has begun.

    Attributes:
        number: how many it had begun with this one.
        digest: of this one and all before; equal on all ranks that run the same.
        label: "forward of Llama".
    """

    number: int
    digest: int
    label: str


@dataclass(frozen=True)
class Process:
    """Which process a rank is; another one in the same place can see if it lives.

    Attributes:
        place: machine and namespace of process numbers; "" where that is not known.
        born: when it was started, as a number may be used again.
    """

    place: str
    pid: int
    born: str

    @staticmethod
    def this() -> Process:
        """The process that asks."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            place = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
        except OSError:
            place = ""
        return Process(place, os.getpid(), (_proc_stat(os.getpid()) or ("", ""))[1])

    def is_gone(self) -> bool:
        """Whether it has certainly ended; False for a process elsewhere."""
        if not self.place or self.place != Process.this().place:
            return False
        found = _proc_stat(self.pid)
        return found is None or found[0] in "ZX" or found[1] != self.born


def _proc_stat(pid: int) -> tuple[str, str] | None:
    """State and time of birth; None for a process that is not there."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return "", ""
    return fields[0], fields[19]


@dataclass(frozen=True)
class Status:
    """What a rank says of itself.

    Attributes:
        steps: the last ones it has begun.
        doing: what it does just now; "" is the user's program.
        meeting: the meeting at which it waits for the others.
        where: line of the user's program.
        ended: why the process has ended; None while it lives.
        beat: grows as long as the process lives.
    """

    rank: int
    process: Process
    steps: tuple[Step, ...] = ()
    doing: str = ""
    meeting: str = ""
    where: str = ""
    ended: str | None = None
    beat: int = 0

    @property
    def number(self) -> int:
        """How many steps it has begun."""
        return self.steps[-1].number if self.steps else 0

    def __str__(self) -> str:
        if self.ended is not None:
            return f"rank {self.rank} {self.ended}, after {self.number} steps"
        doing = self.doing or "is in the user's program"
        at = f" at {self.where}" if self.where else ""
        return f"rank {self.rank} {doing}{at}, after {self.number} steps"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Status:
        data = json.loads(text)
        steps = tuple(Step(**step) for step in data.pop("steps"))
        return Status(process=Process(**data.pop("process")), steps=steps, **data)


@dataclass(frozen=True)
class Finding:
    """Why ranks cannot go on, or not beyond a step.

    Attributes:
        how: a rank has ended and said so, has died, or two ranks run different things.
        rank: which rank ended, or one of the two.
        step: the first step that cannot be done.
        message: for the user.
    """

    how: Literal["ended", "died", "differs"]
    rank: int
    step: int
    message: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Finding:
        return Finding(**json.loads(text))


def first_difference(one: Status, other: Status) -> Finding | None:
    """The first step that two ranks have both begun and that is not the same, of those that both remember."""
    theirs = {step.number: step for step in other.steps}
    for step in one.steps:
        found = theirs.get(step.number)
        if found is not None and found.digest != step.digest:
            return Finding(
                "differs",
                other.rank,
                step.number,
                f"ranks do not run the same in step {step.number}: rank {one.rank} runs {step.label}, "
                f"rank {other.rank} runs {found.label}. {SAME_CALLS}",
            )
    return None


def users_line() -> str:
    """Where the main thread is in the user's program: "train.py:40"."""
    with _no_collection():
        frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_code.co_filename.startswith(("<", *_LIBRARIES)):
            frame = frame.f_back
        return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected in here, where that is done while objects are made: before Python 3.12.

    Another thread's frame becomes an object when it is asked for. A collection at that moment may call code that lets
    the thread go on and leave the frame: the process crashes.
    """
    if sys.version_info >= (3, 12) or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def difference_of_lines(one: int, theirs: list[str], other: int, mine: list[str]) -> str:
    """Where the collectives of two ranks first differ, as a sentence; "" if they do not."""
    for index, (a, b) in enumerate(itertools.zip_longest(theirs, mine, fillvalue="nothing")):
        if a != b:
            return f" They first differ at collective {index}: rank {one} starts {a}, rank {other} {b}."
    return ""


def told(error: BaseException) -> str:
    """An error as one tells another rank."""
    text = str(error)
    return f"{type(error).__name__}: {text[:2000]}" if text else type(error).__name__
