"""Every bucket that begins with one transfer, and what it costs, as columns.

Blocks that are equal have equal transfers, so that buckets which begin with corresponding ones cost the same: those
that begin with the first of them are asked about, and as many of them are taken for the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.problem import Bucketed, Chain, Link
from graphshard.schedule.together import Load, Together

Numbers = NDArray[np.float64]
_Integers = NDArray[np.int64]

# Of those that begin with an equal transfer, how many are compared.
_MOST_COMPARED = 8


@dataclass(frozen=True)
class Beginning:
    """Buckets of a kind that begin with transfer `first`, by their length; the columns have a row for each.

    Attributes:
        ends: behind the last transfer.
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
        """One of them."""
        return Bucketed(self.kind, self.first, int(self.ends[row]), bool(self.packed[row]))


@dataclass
class _Rows:
    """Of buckets that begin alike: what is in them by their length, and the rows of their columns."""

    contents: _Integers
    rows: list[tuple[float, ...]] = field(default_factory=list)
    columns: Numbers = field(default_factory=lambda: np.empty((0, 5)))


class Beginnings:
    """The buckets of one kind in a chain, by their first transfer."""

    def __init__(self, chain: Chain, link: Link, kind: CollectiveKind) -> None:
        self.link, self.kind, self.transfers = link, kind, chain.transfers(kind)
        each = [
            (t.num_bytes, t.num_tensors, t.num_small, t.small_bytes, t.packed is True, t.packed is False)
            for t in self.transfers
        ]
        self.came = np.zeros((len(each) + 1, 6), dtype=np.int64)
        if each:
            np.cumsum(np.array(each, dtype=np.int64), axis=0, out=self.came[1:])
        groups = [len(list(members)) for _, members in itertools.groupby(self.transfers, lambda t: t.group)]
        ends = itertools.accumulate(groups)
        self._ends = [end for end, num in zip(ends, groups) for _ in range(num)]
        self._known: dict[Hashable, list[_Rows]] = {}
        self._loads: dict[Hashable, list[tuple[bool, Load]]] = {}

    def end_of_group(self, first: int) -> int:
        """Where a bucket ends at the latest, as others are of another group."""
        return self._ends[first]

    def num_bytes(self, first: int, end: int) -> _Integers:
        """Bytes of the buckets that begin with a transfer and end at `end` or before, by their length."""
        found: _Integers = self.came[first + 1 : end + 1, 0] - self.came[first, 0]
        return found

    def of(self, first: int, end: int) -> Beginning:
        """The buckets that begin with a transfer and end at `end` or before."""
        contents = self.came[first + 1 : end + 1] - self.came[first]
        rows = self._rows(first, contents)
        of_these = rows.columns[: np.searchsorted(rows.columns[:, 0], end - first, side="right")]
        lengths, packed, seconds, copy_in, copy_out = of_these.T
        return Beginning(
            self.kind, first, first + lengths.astype(np.int64), packed.astype(np.bool_), seconds, copy_in, copy_out
        )

    def _rows(self, first: int, contents: _Integers) -> _Rows:
        alike = self._known.setdefault((self.transfers[first].way, contents[0].tobytes()), [])
        for known in alike[-_MOST_COMPARED:]:
            both = min(len(known.contents), len(contents))
            if np.array_equal(known.contents[:both], contents[:both]):
                break
        else:
            known, both = _Rows(contents[:0]), 0
            alike.append(known)
        if both < len(contents):
            for length in range(both + 1, len(contents) + 1):
                for packed, cost in self._best(self.transfers[first].way, *contents[length - 1].tolist()):
                    known.rows.append((length, packed, cost.seconds, cost.copy_in, cost.copy_out))
            known.contents = contents
            known.columns = np.array(known.rows, dtype=np.float64).reshape(-1, 5)
        return known

    def _best(self, way: int, *contents: int) -> list[tuple[bool, Load]]:
        """The ways to send some transfers of which no other is better."""
        key = way, *contents
        if key not in self._loads:
            num_bytes, num_tensors, num_small, small_bytes, must, must_not = contents
            forced = {packed for packed, times in ((True, must), (False, must_not)) if times}
            together = Together(num_bytes, num_tensors, num_small, small_bytes, way, forced)
            self._loads[key] = list(_no_worse([(p, together.load(self.link, self.kind, p)) for p in together.modes]))
        return self._loads[key]


def _no_worse(costs: list[tuple[bool, Load]]) -> Iterator[tuple[bool, Load]]:
    for packed, cost in costs:
        # The other way is better if it takes less of the channel, and no more with its copies.
        others = (c for p, c in costs if p != packed and c.seconds < cost.seconds)
        if not any(c.seconds + c.copy_in + c.copy_out <= cost.seconds for c in others):
            yield packed, cost
