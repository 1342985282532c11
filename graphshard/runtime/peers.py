"""The ranks that run a model together: what they agree on in meetings, and the steps that they make.

A rank that waits for others, in a meeting or in a collective, asks again and again if there is still something to wait
for. `watch.py` finds that out in a thread, and leaves it where this rank stands (`standing.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import TracebackType

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphshard.errors import DivergenceError, PeerError
from graphshard.runtime.groups import is_fake, ranks_of
from graphshard.runtime.meeting import End, Look, Meeting, Tell
from graphshard.runtime.standing import Standing
from graphshard.runtime.status import SAME_CALLS, Status, difference_of_lines, told
from graphshard.runtime.waiting import Settings, Waiting, check_not_gone
from graphshard.torch_compat.autograd_state import without_dispatch_modes
from graphshard.torch_compat.dtensor import rendezvous_store
from graphshard.utils.progress import cancelled_by

# How long it takes the others to find out why a connection was closed.
_UNTIL_FOUND = 3.0
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

    Attributes:
        standing: how this rank stands among them.
        groups: names of the process groups that they communicate in.
    """

    def __init__(self, ranks: tuple[int, ...], store: dist.Store, settings: Settings) -> None:
        self.ranks, self.rank, self._settings = ranks, dist.get_rank(), settings
        name = hashlib.sha256(str(ranks).encode()).hexdigest()[:16]
        # A store may outlive a process group.
        prefix = f"graphshard/{name}-{store.add(f'graphshard/{name}/{self.rank}', 1)}"
        self._store = dist.PrefixStore(prefix, store)
        self._attempt = self._met = 0
        self._asked = 0.0
        self._failure_seen = ("", 0.0)
        self._hear: Callable[[int], None] | None = None
        self.standing = Standing(ranks, store, prefix)
        self.groups = self.standing.groups

    # --- meetings ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """In the block all ranks make the same program, say; if one fails, those that wait for it do, too."""
        before, self.standing.doing = self.standing.doing, doing
        try:
            with cancelled_by(self._still_wanted):
                yield
        except BaseException as error:
            if not isinstance(error, (DivergenceError, PeerError)):
                with contextlib.suppress(RuntimeError):  # the store is gone
                    self._meet().fail(self.rank, f"rank {self.rank} {doing} and failed: {told(error)}")
            self._attempt, self._met = self._attempt + 1, 0
            raise
        finally:
            self.standing.doing = before

    @contextlib.contextmanager
    def listening(self, hear: Callable[[int], None]) -> Iterator[None]:
        """In the block, which takes its time, tell `hear` the largest number that others have come with; 0 before."""
        self._hear = hear
        try:
            yield
        finally:
            self._hear = None

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
            if self._hear is not None:
                self._hear(meeting.most())
            self.standing.check_meeting(self.standing.number + 1)
            following = self.ranks[(self.ranks.index(self.rank) + 1) % len(self.ranks)]
            if not self._store.check([str(following)]):
                check_not_gone(following, meeting, self.standing.doing)

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
        now = others.standing.number, others._attempt
        if now != (self.standing.number, self._attempt):
            self.standing.follow(now[0])
            self._attempt, self._met = now[1], 0

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
        return Meeting(
            self._store, f"{self.standing.number + 1}.{self._attempt}", self._met, self.rank, len(self.ranks)
        )

    @contextlib.contextmanager
    def _at(self, meeting: Meeting, is_here: IsHere | None = None) -> Iterator[Look]:
        """While a rank is at a meeting; yields what ends its wait."""
        name, step = ("", self.standing.number) if is_here else (meeting.name, self.standing.number + 1)
        is_here = is_here or (lambda status: status.meeting == name)
        waiting = Waiting(meeting, self.standing.doing, self.ranks, self._settings.patience, is_here)

        def look(waited: float) -> None:
            self.standing.check_meeting(step)
            waiting.look(waited)

        self.standing.meeting = name
        try:
            yield look
        except dist.DistError as error:
            raise PeerError(
                f"rank {self.rank} {self.standing.doing} and cannot reach the rendezvous store any more: the process "
                "that serves it has ended, which is torchrun's, or that of rank 0.",
                rank=0,
            ) from error
        finally:
            self.standing.meeting = ""

    # --- steps ------------------------------------------------------------------------------------------------

    def begin(self, label: str, text: str) -> None:
        """A step with collectives begins; what it sends is `text`."""
        self._attempt = self._met = 0
        self.standing.begin(label, text)
        try:
            self.standing.check_step()
            if self._settings.checks_steps:
                self._check(label, text)
        except BaseException:
            self.standing.doing = ""
            raise

    def _check(self, label: str, text: str) -> None:
        """Wait until all ranks are at the same step."""

        number = self.standing.number

        def tell(first: int, theirs: str, mine: str) -> str:
            their_label, *their_lines = theirs.split("\n")
            return (
                f"ranks do not run the same in step {number}: rank {first} runs {their_label}, rank {self.rank} "
                f"runs {label}. {SAME_CALLS}{difference_of_lines(first, their_lines, self.rank, text.splitlines())}"
            )

        meeting = Meeting(self._store, f"step {number}", 0, self.rank, len(self.ranks))
        self._compare(meeting, f"{label}\n{text}", tell, lambda status: status.number >= number)
        if self.rank == self.ranks[0] and number > 1:
            replace(meeting, occasion=f"step {number - 1}").forget()

    def step(self, label: str, text: str) -> _Running:
        """A block in which a step runs."""
        return _Running(self, label, text)

    def finish(self, error: BaseException | None) -> None:
        """A step has ended, with an error or without."""
        doing, self.standing.doing = self.standing.doing, ""
        if not isinstance(error, RuntimeError) or not _OF_A_COLLECTIVE.search(str(error)):
            return
        deadline = time.monotonic() + _UNTIL_FOUND
        while self.standing.finding is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.standing.finding is not None:
            self.standing.doing = doing
            raise self.standing.error(self.standing.finding) from error


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
