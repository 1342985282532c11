"""The ranks that run a model together, as one of them knows them: what they agree on, and what has become of them.

A rank that waits for others, in a meeting or in a collective, asks again and again if there is still something to wait
for. `watch.py` finds that out in a thread.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import re
import sys
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphshard.ir.distributed_internals import process_group, rendezvous_store
from graphshard.ir.errors import DivergenceError, PeerError
from graphshard.ir.torch_internals import without_dispatch_modes
from graphshard.ir.wanted import wanted_while
from graphshard.runtime.groups import is_fake, ranks_of
from graphshard.runtime.hang_up import hang_up
from graphshard.runtime.meeting import End, Look, Meeting, Tell
from graphshard.runtime.status import (
    SAME_CALLS,
    Finding,
    Process,
    Status,
    Step,
    difference_of_lines,
    told,
    users_line,
)
from graphshard.runtime.waiting import SAYS_SO_AFTER, Settings, Waiting, check_not_gone
from graphshard.runtime.watch import Watch

log = logging.getLogger(__name__)

# How long it takes the others to find out why a connection was closed.
_UNTIL_FOUND = 3.0
_REMEMBERED_STEPS = 8
# How often a rank that makes a program asks if another has failed to, and how often all ranks together.
_ASKS_EVERY, _ASK_A_SECOND = 0.5, 500
# How long it may go on, as it may be about to fail in the same way: its own error says more.
_FAILS_ALIKE = 2.5

_OF_A_COLLECTIVE = re.compile("gloo|nccl|connection|socket|pair closure|broken pipe", re.IGNORECASE)

IsHere = Callable[[Status], bool]

# One for each set of ranks of a store: the order of calls matters between models, too.
_known: weakref.WeakKeyDictionary[dist.Store, dict[tuple[int, ...], Peers]] = weakref.WeakKeyDictionary()


def peers_of(mesh: DeviceMesh, groups: Iterable[str]) -> Peers | None:
    """The ranks of a mesh; None where nobody else is there. All ranks of the mesh call this in the same order.

    Args:
        groups: names of the process groups that they communicate in.

    Raises:
        ArgumentError: GRAPHSHARD_CHECK or GRAPHSHARD_PATIENCE is wrong.
    """
    settings = Settings.read()
    if mesh.size() == 1 or is_fake(mesh):
        return None
    ranks = tuple(ranks_of(mesh))
    known = _known.setdefault(rendezvous_store(), {})
    if ranks not in known:
        known[ranks] = Peers(ranks, rendezvous_store(), settings)
    known[ranks].groups.update(groups)
    return known[ranks]


class Peers:
    """The ranks of a mesh.

    Args:
        ranks: in the order of the mesh.
        store: of their process group.
        settings: of the environment.
    """

    def __init__(self, ranks: tuple[int, ...], store: dist.Store, settings: Settings) -> None:
        self.ranks, self.rank, self._settings = ranks, dist.get_rank(), settings
        self.groups: set[str] = set()
        name = hashlib.sha256(str(ranks).encode()).hexdigest()[:16]
        # A store may outlive a process group.
        prefix = f"graphshard/{name}-{store.add(f'graphshard/{name}/{self.rank}', 1)}"
        self._of, self._store = weakref.ref(store), dist.PrefixStore(prefix, store)
        self._status = Status(self.rank, Process.this())
        self._steps: deque[Step] = deque(maxlen=_REMEMBERED_STEPS)
        self._number = self._attempt = self._met = self._said = 0
        self._since = self._asked = 0.0
        self._failure_seen = ("", 0.0)
        self._doing = self._meeting = ""
        self._finding: Finding | None = None
        own: dist.Store = store.clone()  # type: ignore[attr-defined]
        own.set_timeout(timedelta(seconds=10))
        self._own_store = dist.PrefixStore(prefix, own)
        self._watch = Watch(self, self._own_store).start()
        atexit.register(_leave_at_exit, weakref.ref(self))

    # --- meetings ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """In the block all ranks make the same program, say; if one fails, those that wait for it do, too."""
        before, self._doing = self._doing, doing
        try:
            with wanted_while(self._still_wanted):
                yield
        except BaseException as error:
            if not isinstance(error, (DivergenceError, PeerError)):
                with contextlib.suppress(RuntimeError):  # the store is gone
                    self._meet().fail(self.rank, f"rank {self.rank} {doing} and failed: {told(error)}")
            self._attempt, self._met = self._attempt + 1, 0
            raise
        finally:
            self._doing = before

    def _still_wanted(self) -> None:
        """While this rank makes a program, which takes its time: raise PeerError if another has failed to, or ended."""
        now = time.monotonic()
        if now < self._asked + max(_ASKS_EVERY, len(self.ranks) / _ASK_A_SECOND):
            return
        self._asked = now
        # Outside of the trace that asks. If the store is gone, the next meeting says so.
        with without_dispatch_modes(), contextlib.suppress(dist.DistError):
            meeting = self._meet()
            if (end := meeting.failure()) is not None:
                if self._failure_seen[0] != meeting.name:
                    self._failure_seen = meeting.name, now
                if now < self._failure_seen[1] + _FAILS_ALIKE:
                    return
                raise PeerError(end.message, rank=end.rank)
            self._check_finding(self._number + 1)
            following = self.ranks[(self.ranks.index(self.rank) + 1) % len(self.ranks)]
            if not self._store.check([str(following)]):
                check_not_gone(following, meeting, self._doing)

    def agree(self, text: str, tell: Tell) -> None:
        """Wait until all ranks have come with the same text.

        Raises:
            DivergenceError: one has come with another text; `tell` says how it differs.
            PeerError: one has failed, or does not come.
        """
        self._compare(self._meet(), text, tell)
        self._met += 1

    def unanimous(self, text: str) -> bool:
        """Wait until all ranks have come with a text; whether it is the same.

        Raises:
            PeerError: one has failed, or does not come.
        """
        end = self._end_of(self._meet(), text, lambda first, theirs, mine: "")
        self._met += 1
        return end.how == "same"

    def share(self, make: Callable[[], str]) -> str:
        """What the first rank makes, on all ranks.

        Raises:
            PeerError: it has failed, or does not come.
        """
        meeting = self._meet()
        self._met += 1
        if self.rank == self.ranks[0]:
            made = make()
            meeting.give(made)
            return made
        with self._at(meeting) as look:
            taken = meeting.take(look)
        if isinstance(taken, End):
            raise PeerError(taken.message, rank=taken.rank)
        return taken

    def follow(self, others: Peers) -> None:
        """Meet as those do that run the steps: these ranks run none of their own."""
        now = others._number, others._attempt
        if now != (self._number, self._attempt):
            (self._number, self._attempt), self._met = now, 0
            self._said = self._number  # those that run the step say who is behind

    def most(self, number: int) -> int:
        """The largest number that a rank has come with, on all ranks.

        Raises:
            PeerError: one has failed, or does not come.
        """
        meeting = self._meet()
        meeting.raise_to(number)
        self._end_of(meeting, "", lambda first, theirs, mine: "")
        self._met += 1
        return meeting.most()

    def _compare(self, meeting: Meeting, text: str, tell: Tell, is_here: IsHere | None = None) -> None:
        end = self._end_of(meeting, text, tell, is_here)
        if end.how == "differ":
            raise DivergenceError(end.message)

    def _end_of(self, meeting: Meeting, text: str, tell: Tell, is_here: IsHere | None = None) -> End:
        with self._at(meeting, is_here) as look:
            meeting.come(text, tell, look)
            end = meeting.end(look)
        if end.how == "failed":
            raise PeerError(end.message, rank=end.rank)
        return end

    def _meet(self) -> Meeting:
        """The next meeting: ranks that have made as many steps have met as often."""
        return Meeting(self._store, f"{self._number + 1}.{self._attempt}", self._met, self.rank, len(self.ranks))

    @contextlib.contextmanager
    def _at(self, meeting: Meeting, is_here: IsHere | None = None) -> Iterator[Look]:
        """While a rank is at a meeting; yields what ends its wait."""
        name, step = ("", self._number) if is_here else (meeting.name, self._number + 1)
        is_here = is_here or (lambda status: status.meeting == name)
        waiting = Waiting(meeting, self._doing, self.ranks, self._settings.patience, is_here)

        def look(waited: float) -> None:
            self._check_finding(step)
            waiting.look(waited)

        self._meeting = name
        try:
            yield look
        except dist.DistError as error:
            raise PeerError(
                f"rank {self.rank} {self._doing} and cannot reach the rendezvous store any more: the process that "
                "serves it has ended, which is torchrun's, or that of rank 0.",
                rank=0,
            ) from error
        finally:
            self._meeting = ""

    def _check_finding(self, step: int) -> None:
        """Raise what was found of the other ranks, if that keeps them from doing a step."""
        finding = self._finding
        if finding is not None and (finding.how == "died" or finding.step <= step):
            raise self._error(finding)

    # --- steps ------------------------------------------------------------------------------------------------

    def begin(self, label: str, text: str) -> None:
        """A step with collectives begins; what it sends is `text`."""
        digest = zlib.crc32(text.encode(), self._steps[-1].digest if self._steps else 0)
        self._number, self._attempt, self._met = self._number + 1, 0, 0
        self._steps.append(Step(self._number, digest, label))
        self._doing, self._since = f"runs {label}", time.monotonic()
        try:
            if self._finding is not None and self._ends(self._finding):
                raise self._error(self._finding)
            if self._settings.checks_steps:
                self._check(label, text)
        except BaseException:
            self._doing = ""
            raise

    def _check(self, label: str, text: str) -> None:
        """Wait until all ranks are at the same step."""

        def tell(first: int, theirs: str, mine: str) -> str:
            their_label, *their_lines = theirs.split("\n")
            return (
                f"ranks do not run the same in step {self._number}: rank {first} runs {their_label}, rank {self.rank} "
                f"runs {label}. {SAME_CALLS}{difference_of_lines(first, their_lines, self.rank, text.splitlines())}"
            )

        meeting = Meeting(self._store, f"step {self._number}", 0, self.rank, len(self.ranks))
        number = self._number
        self._compare(meeting, f"{label}\n{text}", tell, lambda status: status.number >= number)
        if self.rank == self.ranks[0] and self._number > 1:
            replace(meeting, occasion=f"step {self._number - 1}").forget()

    def step(self, label: str, text: str) -> _Running:
        """A block in which a step runs."""
        return _Running(self, label, text)

    def finish(self, error: BaseException | None) -> None:
        """A step has ended, with an error or without."""
        doing, self._doing = self._doing, ""
        if not isinstance(error, RuntimeError) or not _OF_A_COLLECTIVE.search(str(error)):
            return
        deadline = time.monotonic() + _UNTIL_FOUND
        while self._finding is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._finding is not None:
            self._doing = doing
            raise self._error(self._finding) from error

    # --- what becomes of the others ---------------------------------------------------------------------------

    def _ends(self, finding: Finding) -> bool:
        """Whether a finding ends the step that this rank is in.

        Where a rank has died without a word, gloo knows if anything of it is still to come.
        """
        return finding.how != "died" and finding.step <= self._number

    def _error(self, finding: Finding) -> Exception:
        if finding.how == "differs":
            return DivergenceError(finding.message)
        doing = self._doing or "goes on"
        message = f"{finding.message} Rank {self.rank} {doing}, in step {max(self._number, finding.step)}."
        return PeerError(message, rank=finding.rank)

    # --- for the thread ---------------------------------------------------------------------------------------

    def status(self, beat: int) -> Status:
        """How this rank is doing."""
        return replace(
            self._status,
            steps=tuple(self._steps),
            doing=self._doing,
            meeting=self._meeting,
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
        if self._doing and not self._meeting and other.number < self._number != self._said and waited > SAYS_SO_AFTER:
            self._said = self._number
            doing = f"rank {self.rank} {self._doing} in step {self._number}"
            log.warning("%s and has waited %.0f s; %s.", doing, waited, other)

    def found(self, finding: Finding) -> None:
        """A rank has found out why others cannot go on; if this one waits in a collective, it need not any more."""
        if self._finding is None:
            self._finding = finding
            if finding.how == "differs":
                log.error("%s", finding.message)
        if self._doing and not self._meeting and self._ends(finding):
            for name in self.groups:
                hang_up(process_group(name))
            self.groups.clear()

    def leave(self, why: str) -> None:
        """Say that this rank makes no more steps."""
        self._watch.stop()
        status = replace(self.status(-1), ended=why)
        finding = Finding("ended", self.rank, self._number + 1, f"{status}.")
        with contextlib.suppress(RuntimeError):  # the store has ended before
            self._own_store.set(str(self.rank), status.to_json())
            self._own_store.compare_set("finding", "", finding.to_json())

    def forget(self) -> None:
        """End the thread: C++ that it is in cannot be left while the interpreter is taken down."""
        self._watch.stop()


class _Running:
    """A step that runs. A class, as a context manager made of a generator takes three times as long."""

    def __init__(self, peers: Peers, label: str, text: str) -> None:
        self._peers, self._label, self._text = peers, label, text

    def __enter__(self) -> None:
        self._peers.begin(self._label, self._text)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._peers.finish(error)


def _leave_at_exit(known: weakref.ref[Peers]) -> None:
    peers = known()
    if peers is None or peers.status(0).process.pid != os.getpid():  # a forked child
        return
    if not peers.is_current():  # the thread may just be saying so
        peers.forget()
    else:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        peers.leave(f"has ended with {told(error)}" if error is not None else "has ended")
