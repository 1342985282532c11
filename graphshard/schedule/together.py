"""Transfers that travel together as one bucket: what they cost, whether they may be packed, where they may start."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.problem import Link, Transfer


@dataclass(frozen=True)
class Load:
    """What a bucket costs.

    Attributes:
        seconds: on its channel.
        copy_in, copy_out: seconds of copies on the compute stream.
        transient: bytes while it is copied.
        second: seconds of its second leg on the channel of that.
        twice: bytes of what was scattered, which are there twice while the second leg is under way.
    """

    seconds: float
    copy_in: float
    copy_out: float
    transient: int
    second: float = 0.0
    twice: int = 0


def load(link: Link, kind: CollectiveKind, members: Sequence[Transfer], packed: bool) -> Load:
    """Costs of a bucket of these transfers."""
    return Together().more(members).load(link, kind, packed)


@dataclass
class Together:
    """What transfers of a kind have together, for the costs of buckets that grow."""

    num_bytes: int = 0
    num_tensors: int = 0
    num_small: int = 0
    small_bytes: int = 0
    way: int = 0
    forced: set[bool] = field(default_factory=set)

    def more(self, members: Iterable[Transfer]) -> Together:
        """This, with more transfers."""
        for member in members:
            self.num_bytes += member.num_bytes
            self.num_tensors += member.num_tensors
            self.num_small += member.num_small
            self.small_bytes += member.small_bytes
            self.way = member.way
            if member.packed is not None:
                self.forced.add(member.packed)
        return self

    @property
    def small(self) -> tuple[int, int]:
        """How many are worth packing, and their bytes."""
        return self.num_small, self.small_bytes

    @property
    def modes(self) -> tuple[bool, ...]:
        """Whether a bucket of them may be packed, must be, or must not be."""
        if self.forced:
            return tuple(self.forced) if len(self.forced) == 1 else ()
        return (False, True) if self.num_small > 1 else (False,)

    def load(self, link: Link, kind: CollectiveKind, packed: bool) -> Load:
        """Costs of them as a bucket."""
        link = link.of(self.way)
        num_tensors = self.num_tensors - self.num_small + 1 if packed else self.num_tensors
        seconds, transient = link.seconds(kind, self.num_bytes, num_tensors), self.small_bytes if packed else 0
        copy = link.copy(self.small_bytes) if packed else 0.0
        if kind == "gather":
            copy_in = link.copy(self.small_bytes // (link.num_pieces or link.num_shards)) if packed else 0.0
            return Load(seconds, copy_in, copy, transient)
        if link.all_reduce is None:
            return Load(seconds, copy, 0.0, transient)
        second = link.all_reduce(self.num_bytes, num_tensors)
        return Load(seconds, copy, 0.0, transient, second, self.num_bytes // link.num_shards)


def modes(members: Sequence[Transfer]) -> tuple[bool, ...]:
    """Whether a bucket of these may be packed, must be, or must not be."""
    return Together().more(members).modes


def startable(members: Sequence[Transfer], kind: CollectiveKind, at: int) -> bool:
    """Whether a bucket may start at a position: ready, needed no earlier, and where the user wants it."""
    pinned = {m.start for m in members} - {None}
    if pinned and pinned != {at}:
        return False
    return at <= members[0].at if kind == "gather" else at >= members[-1].at


def runs(transfers: Sequence[Transfer], first: int) -> Iterator[int]:
    """Every end of a bucket that begins at `first`."""
    for end in range(first + 1, len(transfers) + 1):
        member = transfers[end - 1]
        if member.group != transfers[first].group:
            return
        yield end


def rests(transfers: Sequence[Transfer]) -> list[int]:
    """Bytes of the transfers from each on, and 0."""
    return [*itertools.accumulate((t.num_bytes for t in reversed(transfers)), initial=0)][::-1]
