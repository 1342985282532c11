"""Buckets: costs of transfers that travel together, whether they may be packed, and where they may start."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.problem import Bucketed, Chain, Link, Transfer

Numbers = NDArray[np.float64]
_Integers = NDArray[np.int64]

# Earlier buckets that begin with an equal transfer and are compared with a new one.
_MOST_COMPARED = 8


class Load(NamedTuple):
    """Costs of a bucket.

    Attributes:
        seconds: on its channel.
        copy_in, copy_out: seconds of copies on the compute stream.
        transient: bytes while it is copied.
        second: seconds of its second leg on the channel of that.
        twice: bytes of scattered gradients that exist twice while the second leg is under way.
    """

    seconds: float
    copy_in: float
    copy_out: float
    transient: int
    second: float = 0.0
    twice: int = 0


class Contents(NamedTuple):
    """Sums over the transfers of a bucket; `must` and `must_not` count the transfers that are packed or not by rule."""

    num_bytes: int
    num_tensors: int
    num_small: int
    small_bytes: int
    must: int
    must_not: int

    @staticmethod
    def of(transfer: Transfer) -> Contents:
        """Return the contents of one transfer."""
        t = transfer
        return Contents(t.num_bytes, t.num_tensors, t.num_small, t.small_bytes, t.packed is True, t.packed is False)

    @property
    def modes(self) -> tuple[bool, ...]:
        """The values of `Bucketed.packed` that a bucket may have."""
        if self.must or self.must_not:
            return () if self.must and self.must_not else (self.must > 0,)
        return (False, True) if self.num_small > 1 else (False,)

    def load(self, link: Link, kind: CollectiveKind, packed: bool) -> Load:
        """Return the costs as a bucket; `link` is the link of the transfers' way."""
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


def contents_of(members: Sequence[Transfer]) -> Contents:
    """Return the contents of a bucket of transfers."""
    return Contents(*(sum(column) for column in zip(*map(Contents.of, members))))


def load(chain: Chain, link: Link, bucket: Bucketed) -> Load:
    """Return the costs of a chain's bucket."""
    members = chain.members(bucket)
    return contents_of(members).load(link.of(members[0].way), bucket.kind, bucket.packed)


def modes(members: Sequence[Transfer]) -> tuple[bool, ...]:
    """Return the values of `Bucketed.packed` that a bucket of these transfers may have."""
    return contents_of(members).modes


def startable(members: Sequence[Transfer], kind: CollectiveKind, at: int) -> bool:
    """Return whether a bucket may start at a position: ready, not yet needed, and where the user wants it."""
    pinned = {m.start for m in members} - {None}
    if pinned and pinned != {at}:
        return False
    return at <= members[0].at if kind == "gather" else at >= members[-1].at


@dataclass(frozen=True)
class Beginning:
    """Buckets of a kind that begin with transfer `first`, by their length; the columns have a row for each.

    Attributes:
        ends: after the last transfer.
        packed: whether small tensors travel in one buffer.
        seconds, copy_in, copy_out: see `Load`.
    """

    kind: CollectiveKind
    first: int
    ends: _Integers
    packed: NDArray[np.bool_]
    seconds: Numbers
    copy_in: Numbers
    copy_out: Numbers

    def bucket(self, row: int) -> Bucketed:
        """Return one of them."""
        return Bucketed(self.kind, self.first, int(self.ends[row]), bool(self.packed[row]))


@dataclass
class _Rows:
    """Contents of buckets that begin alike, by their length, and the rows of their columns."""

    contents: _Integers
    rows: list[tuple[float, ...]] = field(default_factory=list)
    columns: Numbers = field(default_factory=lambda: np.empty((0, 5)))


class Beginnings:
    """The buckets of one kind in a chain, by their first transfer.

    Equal blocks have equal transfers, so buckets that begin with corresponding ones cost the same: costs are asked for
    once and used for all.
    """

    def __init__(self, chain: Chain, link: Link, kind: CollectiveKind) -> None:
        self.kind, self.link, self.transfers = kind, link, chain.transfers(kind)
        each = np.array([Contents.of(t) for t in self.transfers], dtype=np.int64).reshape(-1, 6)
        self._before = np.concatenate((np.zeros((1, 6), dtype=np.int64), each.cumsum(axis=0)))
        groups = [len(list(members)) for _, members in itertools.groupby(self.transfers, lambda t: t.group)]
        self._ends = [end for end, num in zip(itertools.accumulate(groups), groups) for _ in range(num)]
        self._known: dict[Hashable, list[_Rows]] = {}
        self._loads: dict[Hashable, list[tuple[bool, Load]]] = {}

    def end_of_group(self, first: int) -> int:
        """Return the latest end of a bucket, as later transfers are of another group."""
        return self._ends[first]

    def num_bytes(self, first: int, end: int) -> _Integers:
        """Return the bytes of the buckets that begin with a transfer and end at `end` or before, by their length."""
        found: _Integers = self._before[first + 1 : end + 1, 0] - self._before[first, 0]
        return found

    def of(self, first: int, end: int) -> Beginning:
        """Return the buckets that begin with a transfer and end at `end` or before."""
        rows = self._rows(first, self._before[first + 1 : end + 1] - self._before[first])
        of_these = rows.columns[: np.searchsorted(rows.columns[:, 0], end - first, side="right")]
        lengths, packed, seconds, copy_in, copy_out = of_these.T
        ends = first + lengths.astype(np.int64)
        return Beginning(self.kind, first, ends, packed.astype(np.bool_), seconds, copy_in, copy_out)

    def _rows(self, first: int, contents: _Integers) -> _Rows:
        way = self.transfers[first].way
        alike = self._known.setdefault((way, contents[0].tobytes()), [])
        for known in alike[-_MOST_COMPARED:]:
            both = min(len(known.contents), len(contents))
            if np.array_equal(known.contents[:both], contents[:both]):
                break
        else:
            known, both = _Rows(contents[:0]), 0
            alike.append(known)
        if both < len(contents):
            for length in range(both + 1, len(contents) + 1):
                for packed, cost in self._best(way, Contents(*contents[length - 1].tolist())):
                    known.rows.append((length, packed, cost.seconds, cost.copy_in, cost.copy_out))
            known.contents = contents
            known.columns = np.array(known.rows, dtype=np.float64).reshape(-1, 5)
        return known

    def _best(self, way: int, contents: Contents) -> list[tuple[bool, Load]]:
        """Return the modes and loads for which no other mode is better: less of the channel, no more with copies."""
        key = way, contents
        if key not in self._loads:
            link = self.link.of(way)
            costs = [(packed, contents.load(link, self.kind, packed)) for packed in contents.modes]
            self._loads[key] = [
                (packed, cost)
                for packed, cost in costs
                if not any(
                    other.seconds < cost.seconds and other.seconds + other.copy_in + other.copy_out <= cost.seconds
                    for mode, other in costs
                    if mode != packed
                )
            ]
        return self._loads[key]
