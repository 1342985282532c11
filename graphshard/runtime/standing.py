"""How far a rank has come, for the thread that tells the others, and what is found of them.

The rank writes down what it does. The thread (`watch.py`) reads that at any time, and leaves here why ranks cannot go
on, which those who wait read again and again.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
import weakref
import zlib
from collections import deque
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from graphshard.errors import DivergenceError, PeerError
from graphshard.runtime.hang_up import hang_up
from graphshard.runtime.status import Finding, Process, Status, Step, told, users_line
from graphshard.runtime.waiting import SAYS_SO_AFTER
from graphshard.runtime.watch import Watch
from graphshard.torch_compat.dtensor import process_group, rendezvous_store

log = logging.getLogger(__name__)

_REMEMBERED_STEPS = 8


class Standing:
    """How one rank stands among those of a mesh.

    Args:
        ranks: in the order of the mesh.
        store: of their process group.
        prefix: of their keys in the store.

    Attributes:
        groups: names of the process groups in which it may wait; they end where others cannot come.
        number: steps that it has begun.
        doing: what it does just now; "" is the user's program.
        meeting: at which it waits for the others.
        finding: why ranks cannot go on; None as long as they can.
        store: a connection of its own, as a wait blocks the one it is made on.
    """

    def __init__(self, ranks: tuple[int, ...], store: dist.Store, prefix: str) -> None:
        self.ranks, self.rank = ranks, dist.get_rank()
        self.groups: set[str] = set()
        self.number = self._said = 0
        self.doing = self.meeting = ""
        self.finding: Finding | None = None
        self._status = Status(self.rank, Process.this())
        self._steps: deque[Step] = deque(maxlen=_REMEMBERED_STEPS)
        self._since = 0.0
        self._of = weakref.ref(store)
        own: dist.Store = store.clone()  # type: ignore[attr-defined]
        own.set_timeout(timedelta(seconds=10))
        self.store = dist.PrefixStore(prefix, own)
        self._watch = Watch(self, self.store).start()
        atexit.register(_leave_at_exit, weakref.ref(self))

    def begin(self, label: str, text: str) -> None:
        """A step begins; what it sends is `text`."""
        digest = zlib.crc32(text.encode(), self._steps[-1].digest if self._steps else 0)
        self.number += 1
        self._steps.append(Step(self.number, digest, label))
        self.doing, self._since = f"runs {label}", time.monotonic()

    def follow(self, number: int) -> None:
        """As many steps as others have begun, who say themselves who is behind."""
        self.number = self._said = number

    def check_meeting(self, step: int) -> None:
        """Raise what was found of the other ranks, if that keeps them from a meeting at a step."""
        finding = self.finding
        if finding is not None and (finding.how == "died" or finding.step <= step):
            raise self.error(finding)

    def check_step(self) -> None:
        """Raise what was found of the other ranks, if that ends the step that this rank has begun."""
        if self.finding is not None and self._ends(self.finding):
            raise self.error(self.finding)

    def _ends(self, finding: Finding) -> bool:
        """Whether a finding ends the step that this rank is in.

        Where a rank has died without a word, gloo knows if anything of it is still to come.
        """
        return finding.how != "died" and finding.step <= self.number

    def error(self, finding: Finding) -> Exception:
        """What this rank raises because of a finding."""
        if finding.how == "differs":
            return DivergenceError(finding.message)
        doing = self.doing or "goes on"
        message = f"{finding.message} Rank {self.rank} {doing}, in step {max(self.number, finding.step)}."
        return PeerError(message, rank=finding.rank)

    # --- for the thread ---------------------------------------------------------------------------------------

    def status(self, beat: int) -> Status:
        """How this rank is doing."""
        return replace(
            self._status,
            steps=tuple(self._steps),
            doing=self.doing,
            meeting=self.meeting,
            where=users_line(),
            beat=beat,
        )

    def is_current(self) -> bool:
        """Whether the process group is the one that this is about."""
        store = self._of()
        return store is not None and dist.is_initialized() and rendezvous_store() is store

    def behind(self, other: Status) -> None:
        """Another rank has not come as far: say so if this one has waited for a while."""
        waited = time.monotonic() - self._since
        if self.doing and not self.meeting and other.number < self.number != self._said and waited > SAYS_SO_AFTER:
            self._said = self.number
            doing = f"rank {self.rank} {self.doing} in step {self.number}"
            log.warning("%s and has waited %.0f s; %s.", doing, waited, other)

    def found(self, finding: Finding) -> None:
        """A rank has found out why others cannot go on; if this one waits in a collective, it need not any more."""
        if self.finding is None:
            self.finding = finding
            if finding.how == "differs":
                log.error("%s", finding.message)
        if self.doing and not self.meeting and self._ends(finding):
            for name in self.groups:
                hang_up(process_group(name))
            self.groups.clear()

    def leave(self, why: str) -> None:
        """Say that this rank makes no more steps."""
        self._watch.stop()
        status = replace(self.status(-1), ended=why)
        finding = Finding("ended", self.rank, self.number + 1, f"{status}.")
        with contextlib.suppress(RuntimeError):  # the store has ended before
            self.store.set(str(self.rank), status.to_json())
            self.store.compare_set("finding", "", finding.to_json())

    def forget(self) -> None:
        """End the thread: C++ that it is in cannot be left while the interpreter is taken down."""
        self._watch.stop()


def _leave_at_exit(known: weakref.ref[Standing]) -> None:
    standing = known()
    if standing is None or standing.status(0).process.pid != os.getpid():  # a forked child
        return
    if not standing.is_current():  # the thread may just be saying so
        standing.forget()
    else:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        standing.leave(f"has ended with {told(error)}" if error is not None else "has ended")
