"""Status that a rank publishes in the rendezvous store, and the findings that other ranks draw from it."""

from __future__ import annotations

import gc
import json
import os
import sys
import sysconfig
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

# Frames of files in these folders are not the user's program.
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"])

USERS_PROGRAM = "is in the user's program"
SAME_CALLS = (
    "All ranks must make the same sequence of calls, with the same requires_grad flags and the same switches: look for "
    "a branch that depends on the rank or on the data."
)


@dataclass(frozen=True)
class StepRecord:
    """A forward or backward with collectives that a rank has begun.

    Attributes:
        number: counts these steps.
        digest: of this step and all before it; equal on all ranks that run the same.
        label: "forward of Llama".
    """

    number: int
    digest: int
    label: str


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of a rank's process, by which another process on the same machine can see if it lives.

    Attributes:
        place: machine and namespace of process ids; "" if unknown.
        born: start time, as a process id may be used again.
    """

    place: str
    pid: int
    born: str

    @staticmethod
    def this() -> ProcessIdentity:
        """Return the calling process."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            place = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
        except OSError:
            place = ""
        return ProcessIdentity(place, os.getpid(), (_proc_stat(os.getpid()) or ("", ""))[1])

    def is_gone(self) -> bool:
        """Return whether it has certainly ended; False for a process on another machine."""
        if not self.place or self.place != ProcessIdentity.this().place:
            return False
        found = _proc_stat(self.pid)
        return found is None or found[0] in "ZX" or found[1] != self.born


def _proc_stat(pid: int) -> tuple[str, str] | None:
    """Return state and start time, or None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return "", ""
    return fields[0], fields[19]


@dataclass(frozen=True)
class RankStatus:
    """Status of a rank.

    Attributes:
        steps: the last ones it has begun.
        doing: "" while the user's program runs.
        meeting: name of the rendezvous at which it waits.
        where: line of the user's program.
        ended: why the process has ended; None while it lives.
        beat: grows as long as the process lives.
    """

    rank: int
    process: ProcessIdentity
    steps: tuple[StepRecord, ...] = ()
    doing: str = ""
    meeting: str = ""
    where: str = ""
    ended: str | None = None
    beat: int = 0

    @property
    def number(self) -> int:
        """Number of steps it has begun."""
        return self.steps[-1].number if self.steps else 0

    def __str__(self) -> str:
        at = f" at {self.where}" if self.where else ""
        doing = self.ended if self.ended is not None else f"{self.doing or USERS_PROGRAM}{at}"
        return f"rank {self.rank} {doing}, after {self.number} steps"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> RankStatus:
        data = json.loads(text)
        steps = tuple(StepRecord(**step) for step in data.pop("steps"))
        return RankStatus(process=ProcessIdentity(**data.pop("process")), steps=steps, **data)


@dataclass(frozen=True)
class Finding:
    """Reason why ranks cannot go on, or not beyond a step.

    Attributes:
        how: a rank has ended and said so, has died, or two ranks run different things.
        rank: the rank that ended, or one of the two.
        step: the first step that cannot complete.
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


def first_difference(one: RankStatus, other: RankStatus) -> Finding | None:
    """Find the first step that both ranks remember and that is not the same."""
    theirs = {step.number: step for step in other.steps}
    for step in one.steps:
        found = theirs.get(step.number, step)
        if found.digest != step.digest:
            text = differ_text(
                step.number, f"rank {one.rank} runs {step.label}", f"rank {other.rank} runs {found.label}"
            )
            return Finding("differs", other.rank, step.number, text)
    return None


def differ_text(step: int, one: str, other: str) -> str:
    """Say that ranks do not run the same, given what two of them do: "rank 0 runs forward of Net"."""
    return f"ranks do not run the same in step {step}: {one}, {other}. {SAME_CALLS}"


def users_line() -> str:
    """Return the line of the user's program that the main thread is in: "train.py:40"."""
    # Another thread's frame becomes an object when it is asked for. Before Python 3.12 a garbage collection at that
    # moment may call code that lets the thread go on and leave the frame, which crashes the process.
    collects = sys.version_info < (3, 12) and gc.isenabled()
    if collects:
        gc.disable()
    try:
        frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_code.co_filename.startswith(("<", *_LIBRARIES)):
            frame = frame.f_back
        return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
    finally:
        if collects:
            gc.enable()


def error_text(error: BaseException) -> str:
    """Format an error for another rank."""
    text = str(error)
    return f"{type(error).__name__}: {text[:2000]}" if text else type(error).__name__
