"""How long a rank waits at a meeting, and what it says about those who are not there."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from graphshard.errors import ArgumentError, PeerError
from graphshard.runtime.hang_up import has_hung_up
from graphshard.runtime.meeting import Meeting
from graphshard.runtime.status import SAME_CALLS, Status

log = logging.getLogger(__name__)

CHECK, PATIENCE = "GRAPHSHARD_CHECK", "GRAPHSHARD_PATIENCE"

# What a rank does that is waited for longer: it compiles.
MAKES = "makes a program"

# How long a rank waits for one that lives and does something else: it may load data, or save a checkpoint.
_PATIENT, _IMPATIENT = 600.0, 4.0
# After which time a rank that waits says for whom.
SAYS_SO_AFTER = 4.0
_LOOKS_EVERY = 0.5


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes:
        checks_steps: whether ranks meet before each step.
        patience: seconds that a rank waits for one that lives and does not come.
    """

    checks_steps: bool
    patience: float

    @staticmethod
    def read() -> Settings:
        """Raises `ArgumentError` for what is wrong."""
        check, patience = os.environ.get(CHECK, ""), os.environ.get(PATIENCE, "")
        if check not in ("", "steps"):
            raise ArgumentError(f"{CHECK} must be 'steps' or not set, got {check!r}.")
        if not patience:
            return Settings(bool(check), _IMPATIENT if check else _PATIENT)
        if not re.fullmatch(r"\d+(\.\d+)?", patience):
            raise ArgumentError(f"{PATIENCE} must be a number of seconds, got {patience!r}.")
        return Settings(bool(check), float(patience))


@dataclass
class Waiting:
    """The wait of one rank at one meeting. The first rank that came asks who is missing, and tells the others: if all
    asked, a big job would keep the store busy with it.

    Attributes:
        doing: what the rank does that waits.
        ranks: that are expected.
        is_here: whether a rank has come, by what it says of itself.
    """

    meeting: Meeting
    doing: str
    ranks: tuple[int, ...]
    patience: float
    is_here: Callable[[Status], bool]
    _looked: float = field(default=0.0, init=False)
    _warned: bool = field(default=False, init=False)

    def look(self, waited: float) -> None:
        """Every now and then, ask who is missing; raise PeerError if that rank has ended, or takes too long."""
        if waited < self._looked + _LOOKS_EVERY:
            return
        self._looked = waited
        if self.meeting.rank != self.meeting.first_to_come():
            return
        rank, status = self._missing()
        if status is None and rank != self.meeting.rank:
            check_not_gone(rank, self.meeting, self.doing)
        if waited > self.patience and (waited > _PATIENT or status is None or not status.doing.startswith(MAKES)):
            give_up(f"{self._told(waited, rank, status)} {SAME_CALLS}", rank, self.meeting)
        if waited > SAYS_SO_AFTER and not self._warned:
            self._warned = True
            log.warning("%s", self._told(waited, rank, status))

    def _missing(self) -> tuple[int, Status | None]:
        """A rank that has not come, and what is known of it."""
        store = self.meeting.store
        for rank in self.ranks:
            if rank != self.meeting.rank:
                known = Status.from_json(store.get(str(rank))) if store.check([str(rank)]) else None
                if known is None or not self.is_here(known):
                    return rank, known
        return self.meeting.rank, None

    def _told(self, waited: float, rank: int, status: Status | None) -> str:
        what = f"{status}" if status else f"rank {rank} has not compiled a model for these ranks"
        return f"rank {self.meeting.rank} {self.doing} and has waited {waited:.0f} s for rank {rank}: {what}."


def check_not_gone(rank: int, meeting: Meeting, doing: str) -> None:
    """Raise PeerError, on all ranks, if one that has never said anything has closed its connection."""
    if has_hung_up(rank):
        give_up(f"rank {rank} has ended. Rank {meeting.rank} {doing}.", rank, meeting)


def give_up(message: str, rank: int, meeting: Meeting) -> NoReturn:
    """Raise PeerError, on all ranks that come to a meeting."""
    meeting.fail(rank, message)
    raise PeerError(message, rank=rank)
