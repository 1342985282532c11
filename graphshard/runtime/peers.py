"""The ranks that run a model together: rendezvous for what they agree on, and the steps that they make.

A rank that waits for others, in a rendezvous or in a collective, checks again and again if they can still come
(`health_monitor.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import TracebackType
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphshard.errors import ArgumentError, DivergenceError, PeerError
from graphshard.runtime.gloo import has_closed_connection
from graphshard.runtime.health_monitor import (
    SAME_CALLS,
    WARNS_AFTER,
    HealthMonitor,
    RankStatus,
    differ_text,
    error_text,
)
from graphshard.runtime.process_groups import is_fake, ranks_of
from graphshard.runtime.rendezvous import End, Look, Rendezvous, Tell
from graphshard.torch_compat.autograd_state import without_dispatch_modes
from graphshard.torch_compat.dtensor import rendezvous_store
from graphshard.utils.progress import cancelled_by

log = logging.getLogger(__name__)

CHECK, PATIENCE = "GRAPHSHARD_CHECK", "GRAPHSHARD_PATIENCE"
# Beginning of what a rank does while it compiles, which others wait for longer.
MAKES = "makes a program"

# Seconds that a rank waits for one that lives and does something else: it may load data, or save a checkpoint.
_PATIENT, _IMPATIENT = 600.0, 4.0
_LOOKS_EVERY = 0.5
# Seconds until the other ranks have found out why a connection was closed.
_UNTIL_FOUND = 3.0
# How often a rank that makes a program asks if another has failed to, and how often all ranks together.
_ASKS_EVERY, _ASK_A_SECOND = 0.5, 500
# Seconds that it goes on then, as it may be about to fail in the same way: its own error says more.
_FAILS_ALIKE = 2.5

_OF_A_COLLECTIVE = re.compile("gloo|nccl|connection|socket|pair closure|broken pipe", re.IGNORECASE)

# One for each set of ranks of a store: the order of calls matters between models, too.
_known: weakref.WeakKeyDictionary[dist.Store, dict[tuple[int, ...], Peers]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class PeerSettings:
    """Settings of the environment.

    Attributes:
        checks_steps: ranks meet before each step.
        patience: seconds that a rank waits for one that lives and does not come.
    """

    checks_steps: bool
    patience: float

    @staticmethod
    def read() -> PeerSettings:
        """Read the environment; raises ArgumentError."""
        check, patience = os.environ.get(CHECK, ""), os.environ.get(PATIENCE, "")
        if check not in ("", "steps"):
            raise ArgumentError(f"{CHECK} must be 'steps' or not set, got {check!r}.")
        if not patience:
            return PeerSettings(bool(check), _IMPATIENT if check else _PATIENT)
        if not re.fullmatch(r"\d+(\.\d+)?", patience):
            raise ArgumentError(f"{PATIENCE} must be a number of seconds, got {patience!r}.")
        return PeerSettings(bool(check), float(patience))


def peers_of(mesh: DeviceMesh, groups: Iterable[str]) -> Peers | None:
    """Return the ranks of a mesh, None for a single or fake one. All ranks of the mesh call this in the same order.

    Args:
        groups: names of the process groups that they communicate in.

    Raises:
        ArgumentError: GRAPHSHARD_CHECK or GRAPHSHARD_PATIENCE is wrong.
    """
    settings = PeerSettings.read()
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

    Attributes:
        monitor: progress of this rank, and findings about the others.
        groups: names of the process groups that they communicate in.
    """

    def __init__(self, ranks: tuple[int, ...], store: dist.Store, settings: PeerSettings) -> None:
        self.ranks, self.rank, self._settings = ranks, dist.get_rank(), settings
        name = hashlib.sha256(str(ranks).encode()).hexdigest()[:16]
        # A store may outlive a process group.
        prefix = f"graphshard/{name}-{store.add(f'graphshard/{name}/{self.rank}', 1)}"
        self._store = dist.PrefixStore(prefix, store)
        self._attempt = self._met = 0
        self._asked = 0.0
        self._failure_seen = ("", 0.0)
        self._hear: Callable[[int], None] | None = None
        own: dist.Store = store.clone()  # type: ignore[attr-defined]
        own.set_timeout(timedelta(seconds=10))
        self.monitor = HealthMonitor(ranks, self.rank, dist.PrefixStore(prefix, own)).start(store)
        self.groups = self.monitor.groups

    # --- rendezvous ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Mark a block in which all ranks do the same, such as make a program; if one fails, all of them do."""
        before, self.monitor.doing = self.monitor.doing, doing
        try:
            with cancelled_by(self._still_wanted):
                yield
        except BaseException as error:
            if not isinstance(error, (DivergenceError, PeerError)):
                with contextlib.suppress(RuntimeError):  # the store is gone
                    self._next().fail(self.rank, f"rank {self.rank} {doing} and failed: {error_text(error)}")
            self._attempt, self._met = self._attempt + 1, 0
            raise
        finally:
            self.monitor.doing = before

    @contextlib.contextmanager
    def listening(self, hear: Callable[[int], None]) -> Iterator[None]:
        """While a long block runs, call `hear` with the largest number that other ranks have left, 0 before one has."""
        self._hear = hear
        try:
            yield
        finally:
            self._hear = None

    def _still_wanted(self) -> None:
        """Raise PeerError if another rank has failed to make the program that this rank makes, or has ended."""
        now = time.monotonic()
        if now < self._asked + max(_ASKS_EVERY, len(self.ranks) / _ASK_A_SECOND):
            return
        self._asked = now
        # Outside of the trace that asks. If the store is gone, the next rendezvous says so.
        with without_dispatch_modes(), contextlib.suppress(dist.DistError):
            meeting = self._next()
            if (end := meeting.failure()) is not None:
                if self._failure_seen[0] != meeting.name:
                    self._failure_seen = meeting.name, now
                if now < self._failure_seen[1] + _FAILS_ALIKE:
                    return
                raise PeerError(end.message, rank=end.rank)
            if self._hear is not None:
                self._hear(meeting.most())
            self.monitor.check_meeting(self.monitor.number + 1)
            following = self.ranks[(self.ranks.index(self.rank) + 1) % len(self.ranks)]
            if not self._store.check([str(following)]):
                _check_not_gone(following, meeting, self.monitor.doing)

    def agree(self, text: str, tell: Tell) -> None:
        """Wait until all ranks have come with the same text.

        Raises:
            DivergenceError: one has come with another text; `tell` says how it differs.
            PeerError: one has failed, or does not come.
        """
        end = self._meet(text, tell)
        if end.how == "differ":
            raise DivergenceError(end.message)

    def unanimous(self, text: str) -> bool:
        """Wait until all ranks have come with a text, and return whether all have the same; raises PeerError."""
        return self._meet(text).how == "same"

    def share(self, make: Callable[[], str]) -> str:
        """Return what the first rank makes, on all ranks; raises PeerError."""
        meeting = self._next()
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

    def most(self, number: int) -> int:
        """Return the largest number that a rank has come with, on all ranks; raises PeerError."""
        meeting = self._next()
        meeting.raise_to(number)
        self._meet("")
        return meeting.most()

    def follow(self, others: Peers) -> None:
        """Adopt the step count of the ranks that run the steps, where these ranks run none themselves."""
        now = others.monitor.number, others._attempt
        if now != (self.monitor.number, self._attempt):
            self.monitor.follow(now[0])
            self._attempt, self._met = now[1], 0

    def _next(self) -> Rendezvous:
        """Return the next rendezvous: ranks with the same number of steps have met the same number of times."""
        occasion = f"{self.monitor.number + 1}.{self._attempt}"
        return Rendezvous(self._store, occasion, self._met, self.rank, len(self.ranks))

    def _meet(self, text: str, tell: Tell = lambda first, theirs, mine: "") -> End:
        meeting = self._next()
        with self._at(meeting) as look:
            end = _end_of(meeting, text, tell, look)
        self._met += 1
        return end

    @contextlib.contextmanager
    def _at(self, meeting: Rendezvous, step: int | None = None) -> Iterator[Look]:
        """While a rank is at a rendezvous: yield the function that ends its wait.

        Args:
            step: that all ranks are to begin; by default they are to come to the rendezvous, before the next step.
        """
        name = "" if step else meeting.name
        waiting = _Waiting(meeting, self.monitor.doing, self.ranks, self._settings.patience, step)

        def look(waited: float) -> None:
            self.monitor.check_meeting(step or self.monitor.number + 1)
            waiting.look(waited)

        self.monitor.meeting = name
        try:
            yield look
        except dist.DistError as error:
            raise PeerError(
                f"rank {self.rank} {self.monitor.doing} and cannot reach the rendezvous store any more: the process "
                "that serves it has ended, which is torchrun's, or that of rank 0.",
                rank=0,
            ) from error
        finally:
            self.monitor.meeting = ""

    # --- steps ---------------------------------------------------------------------------------------------------

    def begin(self, label: str, text: str) -> None:
        """Begin a step that communicates `text`."""
        self._attempt = self._met = 0
        self.monitor.begin(label, text)
        try:
            self.monitor.check_step()
            if self._settings.checks_steps:
                self._check(label, text)
        except BaseException:
            self.monitor.doing = ""
            raise

    def _check(self, label: str, text: str) -> None:
        """Wait until all ranks are at the same step."""
        number = self.monitor.number

        def tell(first: int, theirs: str, mine: str) -> str:
            label_of_first, *lines = theirs.split("\n")
            differ = differ_text(number, f"rank {first} runs {label_of_first}", f"rank {self.rank} runs {label}")
            for index, (a, b) in enumerate(itertools.zip_longest(lines, text.splitlines(), fillvalue="nothing")):
                if a != b:
                    first_of = f"They first differ at collective {index}"
                    return f"{differ} {first_of}: rank {first} starts {a}, rank {self.rank} {b}."
            return differ

        meeting = Rendezvous(self._store, f"step {number}", 0, self.rank, len(self.ranks))
        with self._at(meeting, number) as look:
            end = _end_of(meeting, f"{label}\n{text}", tell, look)
        if end.how == "differ":
            raise DivergenceError(end.message)
        if self.rank == self.ranks[0] and number > 1:
            replace(meeting, occasion=f"step {number - 1}").forget()

    def step(self, label: str, text: str) -> _RunningStep:
        """Return the context manager in which a step runs."""
        return _RunningStep(self, label, text)

    def finish(self, error: BaseException | None) -> None:
        """End a step, with the error of a collective replaced by the finding that explains it."""
        doing, self.monitor.doing = self.monitor.doing, ""
        if not isinstance(error, RuntimeError) or not _OF_A_COLLECTIVE.search(str(error)):
            return
        deadline = time.monotonic() + _UNTIL_FOUND
        while self.monitor.finding is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.monitor.finding is not None:
            self.monitor.doing = doing
            raise self.monitor.error(self.monitor.finding) from error


@dataclass(frozen=True)
class _RunningStep:
    """A step that runs. A class, as a context manager made of a generator takes three times as long."""

    peers: Peers
    label: str
    text: str

    def __enter__(self) -> None:
        self.peers.begin(self.label, self.text)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.peers.finish(error)


def _end_of(meeting: Rendezvous, text: str, tell: Tell, look: Look) -> End:
    meeting.join(text, tell, look)
    end = meeting.end(look)
    if end.how == "failed":
        raise PeerError(end.message, rank=end.rank)
    return end


@dataclass
class _Waiting:
    """The wait of one rank at a rendezvous. Only the rank that came first asks who is missing, and tells the others:
    if all asked, a big job would keep the store busy with it.

    Attributes:
        doing: of the rank that waits.
        ranks: that are expected.
        step: that they are to begin; None if they are to come to the rendezvous.
    """

    meeting: Rendezvous
    doing: str
    ranks: tuple[int, ...]
    patience: float
    step: int | None
    _looked: float = field(default=0.0, init=False)
    _warned: bool = field(default=False, init=False)

    def look(self, waited: float) -> None:
        """Ask who is missing, every now and then; raise PeerError if that rank has ended, or takes too long."""
        if waited < self._looked + _LOOKS_EVERY:
            return
        self._looked = waited
        if self.meeting.rank != self.meeting.first_rank():
            return
        rank, status = self._missing()
        if status is None and rank != self.meeting.rank:
            _check_not_gone(rank, self.meeting, self.doing)
        text = f"rank {self.meeting.rank} {self.doing} and has waited {waited:.0f} s for rank {rank}: "
        text += f"{status or f'rank {rank} has not compiled a model for these ranks'}."
        if waited > self.patience and (waited > _PATIENT or status is None or not status.doing.startswith(MAKES)):
            _give_up(f"{text} {SAME_CALLS}", rank, self.meeting)
        if waited > WARNS_AFTER and not self._warned:
            self._warned = True
            log.warning("%s", text)

    def _missing(self) -> tuple[int, RankStatus | None]:
        """Return a rank that has not come, and its status if it has published one."""
        store = self.meeting.store
        for rank in self.ranks:
            if rank != self.meeting.rank:
                known = RankStatus.from_json(store.get(str(rank))) if store.check([str(rank)]) else None
                if known is None or not self._is_here(known):
                    return rank, known
        return self.meeting.rank, None

    def _is_here(self, status: RankStatus) -> bool:
        return status.meeting == self.meeting.name if self.step is None else status.number >= self.step


def _check_not_gone(rank: int, meeting: Rendezvous, doing: str) -> None:
    """Raise PeerError, on all ranks, if one that has not published a status has closed its connection."""
    if has_closed_connection(rank):
        _give_up(f"rank {rank} has ended. Rank {meeting.rank} {doing}.", rank, meeting)


def _give_up(message: str, rank: int, meeting: Rendezvous) -> NoReturn:
    """Raise PeerError, on all ranks that come to a rendezvous."""
    meeting.fail(rank, message)
    raise PeerError(message, rank=rank)
