"""Fewer transfers for the dynamic program: where a latency is long, what lies together is joined before it looks.

The transfers at either end of a phase stay apart: the first gather and the last reduction are exposed. Or buckets may
only be cut at given places: evenly spread ones, and then those around the cuts of what was found.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.problem import Bucketed, Chain, Link, Transfer
from graphshard.schedule.rates import rate_below

# Transfers at the ends of a phase that stay as they are.
_ENDS = 4


@dataclass(frozen=True)
class Coarse:
    """A chain, and for each kind the ranges of its transfers that are joined."""

    chain: Chain
    gathers: tuple[tuple[int, int], ...]
    reductions: tuple[tuple[int, int], ...]

    @cached_property
    def joined(self) -> Chain:
        """The chain with fewer transfers."""
        return replace(
            self.chain,
            gathers=tuple(_join(self.chain.gathers[a:b], first=True) for a, b in self.gathers),
            reductions=tuple(_join(self.chain.reductions[a:b], first=False) for a, b in self.reductions),
        )

    def original(self, order: Sequence[Bucketed]) -> list[Bucketed]:
        """Buckets of the joined transfers as buckets of the chain's own."""
        ranges = {"gather": self.gathers, "reduce": self.reductions}
        return [replace(b, first=ranges[b.kind][b.first][0], end=ranges[b.kind][b.end - 1][1]) for b in order]


def coarsen(chain: Chain, link: Link, latencies: float) -> Coarse | None:
    """Join neighbours until their bytes take as long as so many latencies; None if they all do already."""
    coarse = Coarse(chain, _ranges(chain, link, "gather", latencies), _ranges(chain, link, "reduce", latencies))
    if len(coarse.gathers) + len(coarse.reductions) == len(chain.gathers) + len(chain.reductions):
        return None
    return coarse


def at_cuts(chain: Chain, gathers: Iterable[int], reductions: Iterable[int]) -> Coarse:
    """Buckets are cut behind so many transfers of a kind, and nowhere else but where transfers must not be joined."""
    return Coarse(chain, _between(chain.gathers, gathers), _between(chain.reductions, reductions))


def even_cuts(transfers: Sequence[Transfer], num: int) -> list[int]:
    """Where transfers are cut into so many parts of about the same bytes."""
    came = list(itertools.accumulate((t.num_bytes for t in transfers), initial=0))
    return sorted({bisect.bisect_left(came, came[-1] * part / num) for part in range(1, num + 1)}) if transfers else []


def cuts_around(cuts: Iterable[int], num: int, step: int) -> set[int]:
    """Cuts of `num` transfers, and those one or two steps before and behind them."""
    return {cut + step * i for cut in cuts for i in range(-2, 3) if 0 < cut + step * i < num} | {*cuts, num} - {0}


def _between(transfers: Sequence[Transfer], cuts: Iterable[int]) -> tuple[tuple[int, int], ...]:
    num = len(transfers)
    must = (i for i in range(1, num) if _differ(transfers[i - 1], transfers[i]))
    return tuple(itertools.pairwise(sorted({0, num, *must, *(cut for cut in cuts if cut <= num)})))


def _ranges(chain: Chain, link: Link, kind: CollectiveKind, latencies: float) -> tuple[tuple[int, int], ...]:
    transfers = chain.transfers(kind)
    rate = rate_below(chain, link, kind)
    found: list[tuple[int, int]] = []
    moving = 0.0
    for index, transfer in enumerate(transfers):
        inside = _ENDS <= index < len(transfers) - _ENDS
        # In latencies of the link: a bucket whose bytes take that long loses little by a latency of its own.
        apart = not found or not inside or index == _ENDS or moving >= latencies * rate.latency
        if apart or _differ(transfers[index - 1], transfer):
            found.append((index, index + 1))
            moving = 0.0
        else:
            found[-1] = found[-1][0], index + 1
        moving += transfer.num_bytes * rate.per_byte
    return tuple(found)


def _differ(a: Transfer, b: Transfer) -> bool:
    """Whether two transfers must not be joined."""
    return a.group != b.group or a.packed != b.packed or a.start is not None or b.start is not None


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
