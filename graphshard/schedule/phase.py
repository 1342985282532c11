"""The best schedule of one phase that a budget of steps finds, and what no schedule of it beats.

    start     FSDP2's order, and every transfer by itself: there is always a plan, and none is longer
    rough     buckets that may be cut at a few places only, and any of these together
    refined   the same around the cuts of the best, until nothing gets shorter
    fine      every transfer may be cut off, but buckets are no longer than a window
    proof     every cut and every order, of what is shorter than the best: without a limit of memory nothing is left out

Where reductions have two legs the searches but the exact one look at the first ones alone, at the second ones, and at
both as one; what they find is placed and simulated with both.

It ends as soon as a schedule is as short as the bound. Of equally short ones that with the least memory counts. Where
communication slows compute down, searches count what it takes at the least (`deep`), and the simulator all of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphshard.schedule.bounds import chain_bound
from graphshard.schedule.budget import Budget
from graphshard.schedule.coarse import Coarse, at_cuts, cuts_around, even_cuts
from graphshard.schedule.deadlines import jobs
from graphshard.schedule.deep import Effort, channel_order, shortest_order
from graphshard.schedule.delay import delay
from graphshard.schedule.exact import best_placement
from graphshard.schedule.place import place
from graphshard.schedule.problem import KINDS, Bucketed, Chain, Link, Placement, Problem, Schedule, Transfer
from graphshard.schedule.rates import rate_below
from graphshard.schedule.simple import laziest, one_ahead, singles
from graphshard.schedule.simulate import simulate
from graphshard.schedule.together import load, modes

# Two schedules whose times differ by less are equally short, as far as costs are known.
_EQUAL = 1e-4
# Latencies of all transfers beside the compute, from which very large buckets are worth a look.
_LONG = 0.1
# Places at which rough buckets of a kind may be cut.
_PLACES = 24
# Steps between the cuts that are tried around those of the best.
_AROUND = (8, 4, 2, 1)
# Longer than the bound by so much, the least work that keeps to it tells where rough buckets may be cut, too.
_BEYOND = (1e-6, 0.003, 0.01)
# Shares by which a schedule must be shorter to be looked for, one after the other: the larger, the sooner ruled out.
_GAINS = (0.02, 0.01, 0.005, 0.001)
# Under a limit of memory, which the proof does not know, it is only tried for gaps that are smaller.
_PROVABLE = 0.03
# Steps of a budget for an item or a bucket that is placed and simulated.
_PLACED = 10


@dataclass(frozen=True)
class Found:
    """A schedule of a phase.

    Attributes:
        seconds, peak: as the simulator says.
        bound: seconds that no schedule beats.
        stopped: the budget ended the search.
    """

    seconds: float
    peak: int
    placement: Placement
    bound: float
    stopped: bool


def best_of(
    chain: Chain,
    link: Link,
    budget: Budget,
    *,
    limit: float = math.inf,
    margin: float = 1.0,
    exact_transfers: int = 12,
    below: float = math.inf,
) -> Found:
    """The shortest schedule found that keeps to `limit` bytes, which every schedule of `laziest` must do.

    Args:
        budget: of what is spent; the schedules at the start cost nothing of it.
        margin: gathers end this many times their own length before they are needed, where that costs nothing.
        exact_transfers: phases with at most so many transfers are searched exactly.
        below: seconds; longer schedules are not looked for, beyond those at the start.
    """
    return _Phase(chain, link, budget, limit, margin, below).found(exact_transfers)


class _Phase:
    def __init__(self, chain: Chain, link: Link, budget: Budget, limit: float, margin: float, below: float) -> None:
        self.chain, self.link, self.budget, self.limit, self.margin = chain, link, budget, limit, margin
        self.below = below
        self.bound = chain_bound(chain, link)
        two = link.all_reduce is not None and bool(chain.reductions)
        # What a search for buckets and their order takes the link to be.
        self.looks = [link.first_legs, link.second_legs, link.both_legs] if two else [link.first_legs]
        self.seconds, self.peak, self.placement = math.inf, 0, Placement()
        self.refined = math.inf  # seconds of what was last refined

    def found(self, exact_transfers: int) -> Found:
        """Everything, until the bound is met or the budget ends."""
        self._start()
        num = len(self.chain.gathers) + len(self.chain.reductions)
        searches = [self._rough, self._fine, self._proof] if num else []
        if 0 < num <= exact_transfers:
            searches.append(self._exact)
        stopped = False
        for index, search in enumerate(searches):
            if not self._met:
                part = self.budget.part(len(searches) - index)
                search(part)
                stopped |= part.ended
                self.budget.take(part)
        return Found(self.seconds, self.peak, self.placement, min(self.bound, self.seconds), stopped and not self._met)

    @property
    def _met(self) -> bool:
        return self.bound >= self.below or self.seconds <= self.bound * (1 + _EQUAL)

    @property
    def _to_beat(self) -> float:
        """Seconds below which a schedule is of interest."""
        return min(self.seconds, self.below)

    def _start(self) -> None:
        second = self.link.all_reduce is not None
        self._consider(laziest(self.chain, second=second))
        if all(g.start is None for g in self.chain.gathers):
            self._consider(one_ahead(self.chain, second=second))
        self._order(Budget(0), singles(self.chain))

    def _rough(self, budget: Budget) -> None:
        cuts = [even_cuts(self.chain.transfers(kind), _PLACES) for kind in KINDS]
        num = len(self.chain.reductions)
        for look in self.looks:
            gathers, reductions = jobs(self.chain, look)
            for beyond in _BEYOND:
                cuts[0] += gathers.cuts(self.bound * (1 + beyond))
                cuts[1] += [num - cut for cut in reductions.cuts(self.bound * (1 + beyond))]
        self._search(at_cuts(self.chain, *cuts), Effort(window=1 << 30, lag=1 << 30), budget)
        self._refine(budget)

    def _refine(self, budget: Budget) -> None:
        while not self._met and not budget.ended and self.seconds < self.refined * (1 - _GAINS[-1]):
            self.refined = self.seconds
            for step in _AROUND:
                buckets = self.placement.buckets
                ends = ([b.end for b in buckets if b.kind == kind] for kind in KINDS)
                cuts = (cuts_around(e, len(self.chain.transfers(kind)), step) for e, kind in zip(ends, KINDS))
                self._search(at_cuts(self.chain, *cuts), Effort(window=16, lag=16), budget)

    def _fine(self, budget: Budget) -> None:
        sizes = sorted(t.num_bytes for t in (*self.chain.gathers, *self.chain.reductions))
        typical = float(sizes[len(sizes) * 9 // 10])
        tried = [(2 * typical, 0.0), (math.inf, 1.0)]
        latencies = sum(
            rate_below(self.chain, self.looks[-1], kind).latency * len(self.chain.transfers(kind)) for kind in KINDS
        )
        if latencies > _LONG * self.chain.elapsed[-1]:
            tried.append((math.inf, 4.0))
        for most, coarse in tried:
            self._search(self.chain, Effort(most_bytes=most, coarse=coarse, labels=4), budget)
        self._refine(budget)

    def _search(self, chain: Chain | Coarse, effort: Effort, budget: Budget) -> None:
        """Consider the best order of a chain, or of a coarse one, with and without room for gradients."""
        sizes = sorted(t.num_bytes for t in (*self.chain.gathers, *self.chain.reductions))
        reserves = (0.0, float(sizes[len(sizes) * 9 // 10])) if self.limit < math.inf else (0.0,)
        for look, reserve in itertools.product(self.looks, reserves):
            if self._met:
                return
            # Two legs one behind the other may take longer than what they are to beat.
            below = math.inf if look.reduce is not self.link.reduce else self._to_beat
            looking = replace(effort, below=below, reserve=reserve)
            joined = chain.joined if isinstance(chain, Coarse) else chain
            order = channel_order(joined, look, looking, budget, self.limit)
            if order is not None:
                found = chain.original(order) if isinstance(chain, Coarse) else order
                self._order(budget, found)
                if self.link.all_reduce is not None and not self.link.separate:
                    self._order(budget, self._by_position(found))

    def _by_position(self, order: Sequence[Bucketed]) -> list[Bucketed]:
        """Reductions as soon as they are ready: where second legs take longest, gathers that could come first wait."""

        def key(bucket: Bucketed) -> tuple[int, bool]:
            members = self.chain.transfers(bucket.kind)[bucket.first : bucket.end]
            return (members[0].at, True) if bucket.kind == "gather" else (members[-1].at, False)

        return sorted(order, key=key)

    def _proof(self, budget: Budget) -> None:
        """Every order that is shorter than the best, of transfers whose small tensors are packed for nothing."""
        if self.link.separate and self.chain.gathers and self.chain.reductions:
            return
        if self.limit < math.inf and self.seconds > self.bound * (1 + _PROVABLE):
            return
        free = replace(
            self.chain,
            gathers=tuple(map(_without_copies, self.chain.gathers)),
            reductions=tuple(map(_without_copies, self.chain.reductions)),
        )
        first, seconds = self.link.first_legs, self._to_beat
        for gain in _GAINS if seconds == self.seconds else (0.0,):
            below = seconds / (1 + gain)
            found = shortest_order(free, first, budget, below) if below > self.bound else None
            if found is not None:  # nothing is shorter than this
                self.bound = max(self.bound, found[0])
                self._order(budget, [self._with_copies(bucket) for bucket in found[1]])
            if found is not None or budget.ended:
                return
            self.bound = max(self.bound, below)

    def _with_copies(self, bucket: Bucketed) -> Bucketed:
        """Packed or not, as it may be, and as takes less time in all."""
        members = self.chain.transfers(bucket.kind)[bucket.first : bucket.end]
        costs = {packed: load(self.link, bucket.kind, members, packed) for packed in modes(members)}
        seconds = {packed: cost.seconds + cost.copy_in + cost.copy_out for packed, cost in costs.items()}
        return replace(bucket, packed=min(seconds, key=lambda packed: seconds[packed]))

    def _exact(self, budget: Budget) -> None:
        if self.seconds <= self.bound * (1 + _GAINS[-1]):
            return
        found = best_placement(self.chain, self.link, budget, self.limit, self._to_beat * (1 - 1e-12))
        if found.placement is not None:
            self._delayed(found.placement)
        self.bound = max(self.bound, found.bound)

    def _order(self, budget: Budget, order: Sequence[Bucketed]) -> None:
        lates = (False, True) if self.link.all_reduce is not None and self.chain.reductions else (False,)
        asides = (False, True) if any(own.at_once for own in self.chain.own) else (False,)
        for margin, late, aside in itertools.product((math.inf, self.margin), lates, asides):
            budget.spend(_PLACED * (len(self.chain.seconds) + 2 * len(order)))
            placement = place(self.chain, self.link, order, self.limit, margin, late=late, aside=aside)
            if placement is not None:
                self._delayed(placement)

    def _delayed(self, placement: Placement) -> None:
        """Consider it with starts as late as they may be; that is no slower if nothing slows compute down."""
        if self.link.contention:
            self._consider(placement)
        self._consider(delay(self.chain, self.link, placement, self.margin))

    def _consider(self, placement: Placement) -> None:
        timeline = simulate(Problem((self.chain,), self.link), Schedule((placement,)))
        if timeline.peak > self.limit:
            return
        # Infinity is equal to nothing.
        equal = abs(timeline.step_seconds - self.seconds) <= _EQUAL * min(timeline.step_seconds, self.seconds)
        if timeline.peak < self.peak if equal else timeline.step_seconds < self.seconds:
            self.seconds, self.peak, self.placement = timeline.step_seconds, timeline.peak, placement


def _without_copies(transfer: Transfer) -> Transfer:
    """What takes no longer than a transfer, packed or not: its small tensors travel in another's buffer, uncopied."""
    large = transfer.num_tensors - transfer.num_small
    apart = "" if transfer.packed is None else f" {transfer.packed}"
    group = f"{transfer.group}{apart}"  # those that must be packed and those that must not share no bucket
    return replace(transfer, group=group, num_tensors=large, num_small=0, small_bytes=0, packed=None)
