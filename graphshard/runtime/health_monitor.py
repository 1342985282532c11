"""Status that each rank publishes in the rendezvous store, and the thread that publishes it and watches the next rank.

Each rank watches one other, so the cost for a rank does not grow with their number. All ranks read what one finds. On
another machine a process counts as dead when its status has not changed for a minute, as a thread may wait that long
for Python's lock.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import logging
import os
import sys
import sysconfig
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from graphshard.errors import DivergenceError, PeerError
from graphshard.runtime._end_collectives import end_collectives, has_closed_connection, raise_in_main_thread
from graphshard.torch_compat.dtensor import process_group, rendezvous_store

log = logging.getLogger(__name__)

# Seconds after which a rank that waits names the rank that it waits for; the second if both compile the same program.
WARNS_AFTER, WARNS_WHILE_COMPILING = 4.0, 120.0
# Seconds that ranks wait at a rendezvous for one that lives and does something else: it may load data, or save a
# checkpoint. They wait as long for one that compiles, even if they are less patient.
PATIENT = 600.0
# Beginnings of what a rank does in a step, and while it compiles.
RUNS, MAKES = "runs", "makes a program"
# Seconds that the thread sleeps; all ranks together look at most 2,000 times a second, with three requests each.
_SHORTEST_SLEEP, _STORE_LOOKS_A_SECOND = 0.25, 2000
_SILENCE = 60.0
_REMEMBERED_STEPS = 8
# Steps that the host has launched before the device has completed them. More may be: all complete in order.
_MOST_LAUNCHED = 64
# Seconds for a step to complete in which a rank that has died or ended has taken part.
_COMPLETES_AFTER = 2.0

# Frames of files in these folders are not the user's program.
_LIBRARIES = (
    *(str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"]),
    # Torch's partitioner and its sizes call these.
    *(str(Path(torch.__file__).parents[1] / name) for name in ("networkx", "sympy", "mpmath")),
)

USERS_PROGRAM = "is in the user's program"
SAME_CALLS = (
    "All ranks must make the same sequence of calls, with the same requires_grad flags and the same switches: look for "
    "a branch that depends on the rank or on the data."
)


class StepRecord(NamedTuple):
    """A forward or backward with collectives that a rank has begun; the digest is of it and all steps before it."""

    number: int
    digest: int
    label: str


class ProcessIdentity(NamedTuple):
    """Identity of a rank's process, by which another process on the same machine can see if it lives.

    `place` is the machine and the namespace of process ids, "" if unknown; an id may be used again, so `born` counts.
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


class RankStatus(NamedTuple):
    """Status of a rank.

    Attributes:
        steps: the last ones it has begun.
        doing, meeting: as in `HealthMonitor`.
        where: line of the user program.
        beat: grows as long as the process lives.
    """

    rank: int
    process: ProcessIdentity
    steps: tuple[StepRecord, ...] = ()
    doing: str = ""
    meeting: str = ""
    where: str = ""
    beat: int = 0

    @property
    def number(self) -> int:
        """Number of steps it has begun."""
        return self.steps[-1].number if self.steps else 0

    def __str__(self) -> str:
        at = f" at {self.where}" if self.where else ""
        return f"rank {self.rank} {self.doing or USERS_PROGRAM}{at}, after {self.number} steps"


def _status_of(text: bytes) -> RankStatus:
    rank, process, steps, *others = json.loads(text)
    return RankStatus(rank, ProcessIdentity(*process), tuple(StepRecord(*step) for step in steps), *others)


class Finding(NamedTuple):
    """Reason why ranks cannot complete a step: one has ended and said so, has died, or differs."""

    how: Literal["ended", "died", "differs"]
    rank: int
    step: int
    message: str


def _first_difference(one: RankStatus, other: RankStatus) -> Finding | None:
    """Find the first step that both ranks remember and that is not the same."""
    theirs = {step.number: step for step in other.steps}
    for step in one.steps:
        found = theirs.get(step.number, step)
        if found.digest != step.digest:
            both = f"rank {one.rank} runs {step.label}", f"rank {other.rank} runs {found.label}"
            return Finding("differs", other.rank, step.number, differ_text(step.number, *both))
    return None


def differ_text(step: int, one: str, other: str) -> str:
    """Say that ranks do not run the same, given what two of them do: "rank 0 runs forward of Net"."""
    return f"ranks do not run the same in step {step}: {one}, {other}. {SAME_CALLS}"


def users_line() -> str:
    """Return the line of the user program that the main thread is in: "train.py:40"."""
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


def pause_of(num_ranks: int) -> float:
    """Return the seconds between two looks of a rank."""
    return max(_SHORTEST_SLEEP, num_ranks / _STORE_LOOKS_A_SECOND)


class HealthMonitor:
    """Progress of one rank among the ranks of a mesh, and what is found out about the others.

    Its connection to the store is a separate one, as a wait blocks the connection it is made on.

    Attributes:
        groups: names of the process groups in which the rank may wait; closed when other ranks cannot come.
        number: steps that it has begun.
        doing: "" while the user's program runs.
        meeting: name of the rendezvous at which it waits.
        aborted: its process groups cannot be used any more.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, store: dist.Store, patience: float = PATIENT) -> None:
        self.ranks, self.rank, self._patience = ranks, rank, patience
        self.groups: set[str] = set()
        self.number = 0
        self.doing = self.meeting = ""
        self.finding: Finding | None = None
        self.aborted = self._reported = False
        self._found_at = 0.0
        # Steps with when they began, and whether the device has completed them.
        self._launched: deque[tuple[StepRecord, float, Callable[[], bool]]] = deque(maxlen=_MOST_LAUNCHED)
        self._store = store
        self.process = ProcessIdentity.this()
        self._steps: deque[StepRecord] = deque(maxlen=_REMEMBERED_STEPS)
        # When this rank began what it waits in, and when it had begun what it has warned of.
        self._began = self._warned_at = 0.0
        self._next = ranks[(ranks.index(rank) + 1) % len(ranks)]
        self._knows_next = False
        self._heard = (-1, time.monotonic())  # last beat of the next rank, and when it changed
        self._beat = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, group_store: dist.Store) -> HealthMonitor:
        """Start the thread, which ends with the process group that has this store, or with the monitor."""
        self._group_store = weakref.ref(group_store)
        args = weakref.ref(self), self._stop, pause_of(len(self.ranks))
        self._thread = threading.Thread(target=_watch, args=args, name="graphshard watch", daemon=True)
        self._thread.start()
        atexit.register(_leave_at_exit, weakref.ref(self))
        return self

    # --- in the main thread --------------------------------------------------------------------------------------

    def begin(self, label: str, text: str) -> None:
        """Begin a step with this label, which communicates `text`."""
        digest = zlib.crc32(f"{label}\n{text}".encode(), self.digest)
        self.number += 1
        self._steps.append(StepRecord(self.number, digest, label))
        self.doing, self._began = f"{RUNS} {label}", time.monotonic()

    def end(self, is_done: Callable[[], bool] | None) -> None:
        """End the host's part of a step; it runs until `is_done`, or is over."""
        self.doing = ""
        if is_done is not None and self._steps:
            self._launched.append((self._steps[-1], self._began, is_done))

    @property
    def digest(self) -> int:
        """Digest of all steps that the rank has begun."""
        return self._steps[-1].digest if self._steps else 0

    def wait_at(self, meeting: str) -> None:
        """Begin to wait at a rendezvous."""
        self.meeting, self._began = meeting, time.monotonic()

    def follow(self, number: int) -> None:
        """Adopt the step count of other ranks, which run the steps."""
        self.number = number

    def check_meeting(self, step: int) -> None:
        """Raise DivergenceError or PeerError if a finding keeps ranks from a rendezvous at a step."""
        finding = self.finding
        if finding is not None and (finding.how == "died" or finding.step <= step):
            raise self.error(finding)

    def check_step(self) -> None:
        """Raise DivergenceError or PeerError if a finding ends the step that this rank has begun."""
        if self.finding is not None and self._ends_step(self.finding):
            raise self.error(self.finding)

    def _ends_step(self, finding: Finding) -> bool:
        """Return whether the step cannot complete; of a rank that died, gloo knows if what it sent is still to come."""
        return finding.how != "died" and finding.step <= self.number

    def error(self, finding: Finding) -> Exception:
        """Make the error that this rank raises because of a finding."""
        if finding.how == "differs":
            return DivergenceError(finding.message)
        return PeerError(self._message(finding), rank=finding.rank)

    def _message(self, finding: Finding) -> str:
        """Say what a finding is, and what this rank does: its step, and the step's collectives."""
        launched = None if self.doing else self._running()
        if launched is not None:
            return f"{finding.message} Rank {self.rank} {RUNS} {launched[0].label}, in step {launched[0].number}."
        step = max(self.number, finding.step)
        return f"{finding.message} Rank {self.rank} {self.doing or 'goes on'}, in step {step}."

    def _running(self) -> tuple[StepRecord, float] | None:
        """Return the first step that the host has launched and the device has not completed, and when it began."""
        with contextlib.suppress(IndexError):  # the other thread has taken it
            while self._launched:
                step, began, is_done = self._launched[0]
                if not is_done():
                    return step, began
                self._launched.popleft()
        return None

    # --- in the thread -------------------------------------------------------------------------------------------

    def status(self) -> RankStatus:
        """Return this rank's status."""
        return RankStatus(
            self.rank, self.process, tuple(self._steps), self.doing, self.meeting, users_line(), beat=self._beat
        )

    def is_current(self) -> bool:
        """Return whether the process group still exists."""
        store = self._group_store()
        return store is not None and dist.is_initialized() and rendezvous_store() is store

    def look(self) -> None:
        """Publish this rank's status, and read the next rank's."""
        self._beat += 1
        mine = self.status()
        self._store.set(str(self.rank), json.dumps(mine))
        found = self._about_next(mine)
        if found is not None:
            self._store.compare_set("finding", "", json.dumps(found))
        if self._store.check(["finding"]):  # of any rank; the first one counts
            self._found(Finding(*json.loads(self._store.get("finding"))))

    def _about_next(self, mine: RankStatus) -> Finding | None:
        self._knows_next = self._knows_next or self._store.check([str(self._next)])
        if not self._knows_next:
            waits = self.meeting or self.doing.startswith(MAKES)
            if waits and has_closed_connection(self._next):
                return Finding("died", self._next, self.number + 1, f"rank {self._next} has ended.")
            self.warn_if_late(None)
            return None
        theirs = _status_of(self._store.get(str(self._next)))
        now, died = time.monotonic(), ""
        if theirs.process.is_gone():
            died = "has died without a word"
        elif theirs.beat != self._heard[0]:
            self._heard = theirs.beat, now
        elif now - self._heard[1] > _SILENCE:
            died = f"has given no sign of life for {_SILENCE:.0f} s"
        if died:
            message = f"rank {theirs.rank} {died}; the last that it said is that it has made {theirs.number} steps."
            return Finding("died", theirs.rank, theirs.number + 1, message)
        self.warn_if_late(theirs)
        return _first_difference(mine, theirs) or self._one_waits(mine, theirs) or self._one_waits(theirs, mine)

    def _one_waits(self, waits: RankStatus, runs: RankStatus) -> Finding | None:
        """Report a rank that waits with a new program at a step that another one runs without a new program."""
        if not waits.meeting or waits.meeting.startswith("step") or runs.number <= waits.number:
            return None
        if any(self._store.check([f"{waits.meeting} {key}"]) for key in ("end", "given")):
            return None  # it has not said yet that it goes on
        step = next((step for step in runs.steps if step.number == waits.number + 1), runs.steps[-1])
        text = differ_text(step.number, f"rank {waits.rank} {waits.doing}", f"rank {runs.rank} runs {step.label}")
        return Finding("differs", waits.rank, step.number, text)

    def warn_if_late(self, other: RankStatus | None) -> None:
        """Log an error once if this rank has waited for a while for the next one; later give up at a rendezvous."""
        began, meeting, number, doing = self._began, self.meeting, self.number, self.doing
        if meeting:
            late = other is None or (other.meeting != meeting and other.number <= number)
        else:
            if not doing and (launched := self._running()) is not None:
                (number, _, label), began = launched
                doing = f"{RUNS} {label}"
            late = doing.startswith(RUNS) and other is not None and other.number < number
        if not late:
            return
        waited = time.monotonic() - began
        doing = f"{doing}{'' if meeting else f' in step {number}'}"
        text = f"rank {self.rank} {doing} and has waited {waited:.0f} s for rank {self._next}: "
        text += f"{other or f'rank {self._next} has not compiled a model for these ranks'}."
        compiles = other is not None and other.doing.startswith(MAKES)
        if meeting and waited > (max(PATIENT, self._patience) if compiles else self._patience):
            failed = json.dumps([self._next, f"{text} {SAME_CALLS}"])
            self._store.set(f"{meeting.rpartition('.')[0]} failed", failed)
            return
        patient = WARNS_WHILE_COMPILING if meeting and compiles else WARNS_AFTER
        if waited > patient and self._warned_at != began:
            self._warned_at = began
            log.error("%s", text)

    def _found(self, finding: Finding) -> None:
        """Keep a finding; if this rank waits in a collective that cannot complete, end it."""
        if self.finding is None:
            self.finding, self._found_at = finding, time.monotonic()
        launched = None if self.doing else self._running()
        waits = bool(self.doing) and self._ends_step(finding)
        if not self._reported and (waits or launched is not None or finding.how != "ended"):
            self._reported = True
            log.error("%s", self._message(finding))
        if launched is not None:
            slow = time.monotonic() - self._found_at > _COMPLETES_AFTER
            waits = finding.step <= launched[0].number or slow
        if not waits or self.meeting or self.aborted:
            return
        self.aborted = True
        if launched is not None and not self.doing:  # before the host goes on with garbage
            raise_in_main_thread(self.error(finding))
        for name in self.groups:
            end_collectives(process_group(name))
        self.groups.clear()

    def leave(self, why: str) -> None:
        """Publish that this rank makes no more steps."""
        self.stop()
        status = self.status()._replace(doing=why, meeting="", where="")
        finding = Finding("ended", self.rank, self.number + 1, f"{status}.")
        with contextlib.suppress(RuntimeError):  # the store has ended before
            self._store.set(str(self.rank), json.dumps(status))
            self._store.compare_set("finding", "", json.dumps(finding))

    def stop(self) -> None:
        """End the thread: it must not hold a connection, in C++, while the interpreter is taken down."""
        self._stop.set()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(2.0)


def _watch(known: weakref.ref[HealthMonitor], stop: threading.Event, pause: float) -> None:
    while not stop.wait(pause):
        monitor = known()
        if monitor is None:
            return
        try:
            if not monitor.is_current():
                monitor.leave("has destroyed its process group")
                return
            monitor.look()
        except Exception:  # without the store nothing can be said or seen
            log.debug("the rendezvous store cannot be reached any more", exc_info=True)
            return
        del monitor  # which may be freed while the thread sleeps


def _leave_at_exit(known: weakref.ref[HealthMonitor]) -> None:
    monitor = known()
    if monitor is None or monitor.process.pid != os.getpid():  # a forked child
        return
    if not monitor.is_current():  # the thread may just be saying so
        monitor.stop()
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    monitor.leave("has ended" if error is None else f"has ended with {error_text(error)}")
