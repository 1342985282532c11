"""A thread that says how this rank is doing, and looks how the next one is.

Each rank looks at one other, so what a rank costs does not grow with their number. What one finds out, all read.

    rank 0 --looks at--> rank 1 --looks at--> rank 2 --looks at--> rank 0

A process that has ended is seen at once by one on the same machine. On another machine it is taken for dead when it has
not said anything for a minute, as a thread may have to wait that long for Python's lock.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Protocol

import torch.distributed as dist

from graphshard.runtime.meeting import OVER
from graphshard.runtime.status import SAME_CALLS, Finding, Status, first_difference

log = logging.getLogger(__name__)

# How long the thread sleeps, in seconds; all ranks together look 2,000 times a second, three requests each, or less.
_SHORTEST_SLEEP, _LOOKS_A_SECOND = 0.25, 2000
_SILENCE = 60.0


def pause_of(num_ranks: int) -> float:
    """Seconds between two looks of a rank."""
    return max(_SHORTEST_SLEEP, num_ranks / _LOOKS_A_SECOND)


class Watched(Protocol):
    """What the thread is for: how one rank stands among those of a mesh."""

    ranks: tuple[int, ...]
    rank: int

    def status(self, beat: int) -> Status:
        """How this rank is doing."""

    def is_current(self) -> bool:
        """Whether the process group is still there."""

    def behind(self, other: Status) -> None:
        """Told of the next rank."""

    def found(self, finding: Finding) -> None:
        """Told why ranks cannot go on."""

    def leave(self, why: str) -> None:
        """Told to say that this rank makes no more steps."""


class Watch:
    """The thread of one set of ranks; it ends with their process group, or when nobody needs it.

    Args:
        store: a connection of its own, as a wait blocks the one it is made on.
    """

    def __init__(self, standing: Watched, store: dist.Store) -> None:
        self._standing = weakref.ref(standing)
        self._store = store
        self._next = standing.ranks[(standing.ranks.index(standing.rank) + 1) % len(standing.ranks)]
        self._pause = pause_of(len(standing.ranks))
        self._stop = threading.Event()
        self._heard = (-1, time.monotonic())
        self._beat = 0
        self._knows_next = False
        self._thread = threading.Thread(target=self._run, name="graphshard watch", daemon=True)

    def start(self) -> Watch:
        """Let the thread begin."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread: it must not hold a connection while the interpreter is taken down."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def _run(self) -> None:
        while not self._stop.wait(self._pause):
            standing = self._standing()
            if standing is None:
                return
            try:
                if not standing.is_current():
                    standing.leave("has destroyed its process group")
                    return
                self.look(standing)
            except Exception:  # the store is gone, and with it what could be said or seen
                log.debug("the rendezvous store cannot be reached any more", exc_info=True)
                return
            del standing  # while it sleeps, others may let go of it

    def look(self, standing: Watched) -> None:
        """Say how this rank is doing, and look how the next one is."""
        self._beat += 1
        mine = standing.status(self._beat)
        self._store.set(str(mine.rank), mine.to_json())
        if not self._store.check(["finding"]):
            found = self._about_next(standing, mine)
            if found is None:
                return
            self._store.compare_set("finding", "", found.to_json())
        standing.found(Finding.from_json(self._store.get("finding")))

    def _about_next(self, standing: Watched, mine: Status) -> Finding | None:
        self._knows_next = self._knows_next or self._store.check([str(self._next)])
        if not self._knows_next:
            return None
        theirs = Status.from_json(self._store.get(str(self._next)))
        if theirs.ended is not None:
            return Finding("ended", theirs.rank, theirs.number + 1, f"{theirs}.")
        died = self._died(theirs)
        if died:
            message = f"rank {theirs.rank} {died}; the last that it said is that it has made {theirs.number} steps."
            return Finding("died", theirs.rank, theirs.number + 1, message)
        standing.behind(theirs)
        return first_difference(mine, theirs) or self._one_waits(mine, theirs) or self._one_waits(theirs, mine)

    def _died(self, theirs: Status) -> str:
        if theirs.process.is_gone():
            return "has died without a word"
        beat, since = self._heard
        if theirs.beat != beat:
            self._heard = theirs.beat, time.monotonic()
        elif time.monotonic() - since > _SILENCE:
            return f"has given no sign of life for {_SILENCE:.0f} s"
        return ""

    def _one_waits(self, waits: Status, runs: Status) -> Finding | None:
        """One rank has made a new program and waits for the others at a step that another one runs without that."""
        if not waits.meeting or runs.number <= waits.number:
            return None
        if any(self._store.check([f"{waits.meeting} {key}"]) for key in OVER):
            return None  # it has not said yet that it goes on
        step = next((step for step in runs.steps if step.number == waits.number + 1), runs.steps[-1])
        return Finding(
            "differs",
            waits.rank,
            step.number,
            f"ranks do not run the same in step {step.number}: rank {waits.rank} {waits.doing}, rank {runs.rank} runs "
            f"{step.label}. {SAME_CALLS}",
        )
