"""Smaller problems: buckets that may be cut at given places only, and fewer of many equal blocks."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from graphshard.ir.repeats import longest_run
from graphshard.schedule.problem import Bucketed, Chain, Problem, Transfer

# Blocks that are left in a reduced problem, half of them at either end.
BLOCKS = 6
# Most items of a block that are looked for.
_LONGEST = 64


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


@dataclass(frozen=True)
class Reduced:
    """A problem with fewer blocks.

        items    embedding | 0 | 1 | 2 | 3 ... N-4 | N-3 | N-2 | N-1 | head
        reduced  embedding | 0 | 1 | 2 |             N-3 | N-2 | N-1 | head

    A schedule gains something at the ends over another, and something for each block, as long as its buckets span no
    more blocks than are left. If it gains g in the reduced problem, which has a share s of the blocks, it gains at most
    g / s in all. Bytes that are alive belong to the blocks that are left, so a memory limit is as tight.

    Attributes:
        share: of the blocks that are left, in the chain that has the least of them.
        gone: by chain how many are left out.
    """

    problem: Problem
    share: float
    gone: dict[str, int]


def reduced(problem: Problem) -> Reduced | None:
    """Return the problem with fewer blocks; None if it has too few, or a choice what stays gathered."""
    if problem.keepable:
        return None
    found = [_reduced(chain) for chain in problem.chains if chain.gathers or chain.reductions]
    gone = {chain.name: blocks for chain, blocks in found if blocks}
    if not gone:
        return None
    share = min(BLOCKS / (BLOCKS + blocks) for blocks in gone.values())
    return Reduced(replace(problem, chains=tuple(chain for chain, _ in found)), share, gone)


def _reduced(chain: Chain) -> tuple[Chain, int]:
    """Return a chain with fewer blocks, and how many are gone."""
    first, length, blocks = longest_run(_facts(chain), longest=_LONGEST)
    if blocks < 2 * BLOCKS or chain.fixed:
        return chain, 0
    start, gone = first + BLOCKS // 2 * length, (blocks - BLOCKS) * length
    end = start + gone

    def moved(position: int) -> int:
        return position - gone if position >= end else position

    # What a block that is gone reads last of the one before it, the next block that is left reads instead.
    last = len(chain.seconds) - gone - 1
    gathers = [replace(g, at=moved(g.at), last=moved(g.last)) for g in chain.gathers if not start <= g.at < end]
    made = replace(
        chain,
        seconds=(*chain.seconds[:start], *chain.seconds[end:]),
        base=(*chain.base[:start], *chain.base[end:]),
        gathers=tuple(replace(g, last=max(g.at, min(g.last, last))) for g in gathers),
        reductions=tuple(replace(r, at=moved(r.at)) for r in chain.reductions if not start < r.at <= end),
    )
    return made, blocks - BLOCKS


def _facts(chain: Chain) -> list[Hashable]:
    """Return what is to be equal of each item: its seconds, and what it waits for and releases."""
    gathers: list[list[Hashable]] = [[] for _ in chain.seconds]
    reductions: list[list[Hashable]] = [[] for _ in chain.seconds]
    for gather in chain.gathers:
        gathers[gather.at].append((_without_place(gather), gather.last - gather.at))
    for reduction in chain.reductions:
        reductions[reduction.at - 1].append(_without_place(reduction))
    return [(seconds, tuple(a), tuple(b)) for seconds, a, b in zip(chain.seconds, gathers, reductions)]


def _without_place(transfer: Transfer) -> Transfer:
    start = None if transfer.start is None else 0
    return replace(transfer, name="", group="", at=0, last=0, start=start)
