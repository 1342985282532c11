"""Gathers alone, or reductions alone, against deadlines: the least work of the link with which they can all be met.

    gathers      a | b b | c c c          a bucket must have ended when its first transfer is needed, if the step is to
    compute          1     2     3        end in time; where the cuts are best is one pass over the transfers

If a step is to take T seconds, the bucket whose first transfer is i must end by T less what follows the use of i. So
with `work[j]` for the least seconds of the link in which the first j transfers arrive in time,

    work[j] = min over i of work[i] + seconds of a bucket from i to j, where that is no later than i's deadline

Reductions are the same backwards in time: no bucket starts before its last gradient is ready, and a second leg not
before the first one of its bucket has ended.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.problem import Chain, Link, Rate, Transfer
from graphshard.schedule.rates import lines_below, tensor_below

_Numbers = NDArray[np.float64]
_NONE: _Numbers = np.zeros(0)


@dataclass(frozen=True)
class Costs:
    """What no bucket of a kind beats: the least of some rates, and seconds for every tensor beyond the first."""

    lines: tuple[Rate, ...]
    per_tensor: float

    @staticmethod
    def of(chain: Chain, link: Link, kind: CollectiveKind, share: float = 1.0) -> Costs:
        """For the transfers of a chain; `share` is what of the seconds counts."""
        transfers = chain.transfers(kind)
        lines = tuple(lines_below(transfers, link, kind))
        # With more than a latency for a tensor it would pay to send each by itself, as the first one is free.
        per_tensor = min(tensor_below(transfers, link, kind), *(rate.latency for rate in lines))
        return Costs(tuple(Rate(share * r.latency, share * r.per_byte) for r in lines), share * per_tensor)

    def __call__(self, num_bytes: _Numbers, num_tensors: _Numbers) -> _Numbers:
        """Seconds of buckets."""
        found = float(self.lines[0].latency) + num_bytes * float(self.lines[0].per_byte)
        for rate in self.lines[1:]:
            found = np.minimum(found, rate.latency + num_bytes * rate.per_byte)
        if self.per_tensor:
            found += np.maximum(num_tensors - 1, 0) * self.per_tensor
        return found


@dataclass(frozen=True)
class Jobs:
    """Transfers of one kind in the order in which deadlines fall: gathers as they are used, reductions backwards.

    Attributes:
        costs: of buckets.
        came: bytes of those before each, and of all.
        tensors: the same for tensors that are not worth packing.
        behind: seconds that a step takes, at the least, from the end of a bucket whose first transfer is this one;
            of reductions, from the begin of the step to the start of the bucket.
        lead: of what a bucket must wait for in addition, by what is in it; None if for nothing.
    """

    costs: Costs
    came: _Numbers
    tensors: _Numbers
    behind: _Numbers
    lead: Costs | None = None

    @cached_property
    def leads(self) -> _Numbers:
        """Seconds that the bucket of each waits for at the least."""
        if self.lead is None:
            return np.zeros(len(self.behind))
        return self.lead(np.diff(self.came), np.zeros(len(self.behind)))

    @cached_property
    def together(self) -> _Numbers:
        """Seconds that those before each take at the least, and all."""
        # Of concave costs without a discount for nothing, that of the sum is no more than the sum: one bucket.
        return np.where(self.came > 0, self.costs(self.came, self.tensors), 0.0)

    def least(self, num_bytes: float) -> float:
        """Seconds of so many bytes at the least, in any number of tensors and buckets."""
        return float(self.costs(np.array([num_bytes]), np.zeros(1))[0]) if num_bytes > 0 else 0.0

    @property
    def shortest(self) -> float:
        """Seconds that every step takes at the least, from closed forms."""
        return float((self.together[1:] + self.behind + self.leads).max(initial=0.0))

    @property
    def longest(self) -> float:
        """Seconds in which one bucket is enough."""
        all_of_it = float(self.lead(self.came[-1:], self.tensors[-1:])[0]) if self.lead is not None else 0.0
        return float(self.together[-1] + self.behind.max(initial=0.0)) + all_of_it

    def between(self, first: int) -> _Numbers:
        """Seconds that a transfer takes at the least together with those behind it, by how many these are."""
        return self.costs(self.came[first + 1 :] - self.came[first], self.tensors[first + 1 :] - self.tensors[first])

    def work(self, seconds: float) -> _Numbers:
        """The least work of the link for those before each, and all, in a step of so many seconds; or infinity."""
        return self._met(seconds)[0]

    def cuts(self, seconds: float) -> list[int]:
        """The ends of the buckets with the least work in a step of so many seconds; none if there are none."""
        work, before = self._met(seconds)
        cuts = [len(self.behind)] if work[-1] < math.inf else [0]
        while cuts[-1] > 0:
            cuts.append(int(before[cuts[-1]]))
        return cuts[-2::-1]

    def _up_to(self, end: int, first: int) -> tuple[_Numbers, _Numbers | float]:
        """Seconds of the buckets that end before a transfer, by where they begin, and of what they wait for."""
        begin, costs, leads = self._known.get(end, (end, _NONE, _NONE))
        if first < begin:
            begin = max(0, 2 * first - end)  # a longer step asks for more
            members = self.came[end] - self.came[begin:end], self.tensors[end] - self.tensors[begin:end]
            costs = self.costs(*members)
            leads = _NONE if self.lead is None else self.lead(*members)
            self._known[end] = begin, costs, leads
        return costs[first - begin :], 0.0 if self.lead is None else leads[first - begin :]

    @cached_property
    def _known(self) -> dict[int, tuple[int, _Numbers, _Numbers]]:
        """By the end of buckets: where the first of them begins, and `_up_to` of those."""
        return {}

    def _met(self, seconds: float) -> tuple[_Numbers, NDArray[np.int64]]:
        num = len(self.behind)
        # Rounding must not make that impossible which is just possible.
        deadline = seconds * (1 + 1e-12) - self.behind
        work, before = np.full(num + 1, math.inf), np.zeros(num + 1, dtype=np.int64)
        work[0] = 0.0
        first = 0
        for end in range(1, num + 1):
            costs, leads = self._up_to(end, first)
            ends = costs + work[first:end]
            late = ends > deadline[first:end] - leads
            shortest = int(late.argmin())
            if late[shortest]:
                break
            ends[late] = math.inf
            best = int(ends.argmin())
            work[end], before[end] = ends[best], first + best
            # A bucket that is too long for its deadline is no shorter with more in it.
            first += shortest
        return work, before


def jobs(chain: Chain, link: Link, share: float = 1.0) -> tuple[Jobs, Jobs]:
    """The gathers of a chain, and its reductions; `share` is what of the link's seconds counts."""
    total, elapsed = chain.elapsed[-1], np.array(chain.elapsed)
    used = elapsed[[g.at for g in chain.gathers]]
    ready = total - elapsed[[r.at for r in reversed(chain.reductions)]]
    gathers = _alone(Costs.of(chain, link, "gather", share), chain.gathers, total - used)
    reductions = _alone(Costs.of(chain, link, "reduce", share), chain.reductions[::-1], total - ready)
    if link.leading is not None:
        reductions = replace(reductions, lead=Costs.of(chain, link.leading, "reduce", share))
    # What takes longest behind a position: the compute that is left, or some of it and what it releases.
    tails = np.maximum.accumulate([total, *(reductions.together[1:] + reductions.leads + total - ready)])
    heads = np.maximum.accumulate([total, *(gathers.together[1:] + total - used)])
    read, made = [g.at for g in chain.gathers], [r.at for r in chain.reductions]
    gated = [len(made) - bisect.bisect_right(made, at) for at in read]
    gating = [bisect.bisect_left(read, at) for at in reversed(made)]
    return (
        replace(gathers, behind=tails[gated] - used),
        replace(reductions, behind=heads[gating] - ready),
    )


def _alone(costs: Costs, transfers: Sequence[Transfer], behind: _Numbers) -> Jobs:
    sizes = [0, *(t.num_bytes for t in transfers)]
    tensors = [0, *(t.num_tensors - t.num_small for t in transfers)]
    return Jobs(costs, np.cumsum(sizes, dtype=np.float64), np.cumsum(tensors, dtype=np.float64), behind)
