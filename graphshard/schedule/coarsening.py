"""Smaller problems: buckets that may be cut at given places only."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from graphshard.schedule.problem import Bucketed, Chain, Transfer


@dataclass(frozen=True)
class Coarse:
    """A chain, and for each kind the ranges of its transfers that are joined."""

    chain: Chain
    gathers: tuple[tuple[int, int], ...]
    reductions: tuple[tuple[int, int], ...]

    @staticmethod
    def at_cuts(chain: Chain, gathers: Iterable[int], reductions: Iterable[int]) -> Coarse:
        """Return the chain whose buckets are cut after these numbers of transfers, and where transfers must be."""
        return Coarse(chain, _between(chain.gathers, gathers), _between(chain.reductions, reductions))

    @cached_property
    def joined(self) -> Chain:
        """The chain with fewer transfers."""
        return replace(
            self.chain,
            gathers=tuple(_join(self.chain.gathers[a:b], first=True) for a, b in self.gathers),
            reductions=tuple(_join(self.chain.reductions[a:b], first=False) for a, b in self.reductions),
        )

    def original(self, order: Sequence[Bucketed]) -> list[Bucketed]:
        """Return buckets of the joined transfers as buckets of the chain."""
        ranges = {"gather": self.gathers, "reduce": self.reductions}
        return [replace(b, first=ranges[b.kind][b.first][0], end=ranges[b.kind][b.end - 1][1]) for b in order]


def even_cuts(transfers: Sequence[Transfer], num: int) -> list[int]:
    """Return where transfers are cut into a number of parts of about the same bytes; everywhere if they are few."""
    if len(transfers) <= num:
        return list(range(1, len(transfers) + 1))
    came = list(itertools.accumulate((t.num_bytes for t in transfers), initial=0))
    return sorted({bisect.bisect_left(came, came[-1] * part / num) for part in range(1, num + 1)})


def cuts_around(cuts: Iterable[int], num: int, step: int) -> set[int]:
    """Return cuts of `num` transfers, and those one or two steps before and after them."""
    return {cut + step * i for cut in cuts for i in range(-2, 3) if 0 < cut + step * i < num} | {*cuts, num} - {0}


def _between(transfers: Sequence[Transfer], cuts: Iterable[int]) -> tuple[tuple[int, int], ...]:
    num = len(transfers)
    must = (i for i in range(1, num) if not _may_join(transfers[i - 1], transfers[i]))
    return tuple(itertools.pairwise(sorted({0, num, *must, *(cut for cut in cuts if cut <= num)})))


def _may_join(a: Transfer, b: Transfer) -> bool:
    return a.group == b.group and a.packed == b.packed and a.start is None and b.start is None


def _join(transfers: Sequence[Transfer], *, first: bool) -> Transfer:
    return replace(
        transfers[0],
        # A bucket of gathers is needed with its first member, one of reductions is ready with its last.
        at=transfers[0].at if first else transfers[-1].at,
        num_bytes=sum(t.num_bytes for t in transfers),
        last=max(t.last for t in transfers),
        num_tensors=sum(t.num_tensors for t in transfers),
        num_small=sum(t.num_small for t in transfers),
        small_bytes=sum(t.small_bytes for t in transfers),
    )
