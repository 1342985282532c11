"""Seconds that no schedule beats, whatever its memory.

Deadlines. In a step of T seconds every gather has a deadline, and no reduction starts before its gradient can be ready:

    gathers      a | b b | c c c          a bucket must have ended when its first transfer is needed, if the step is to
    compute          1     2     3        end in time; where the cuts are best is one pass over the transfers

The bucket whose first transfer is i must end by T less what follows the use of i. So with `work[j]` for the least
seconds of the link in which the first j transfers arrive in time,

    work[j] = min over i of work[i] + seconds of a bucket from i to j, where that is no later than i's deadline

Reductions are the same backwards in time. For one kind alone this is exact, for any concave cost. If a kind cannot keep
to T, or if both together are more work than T, then no schedule takes T. The bound is the least T that is not ruled
out, found by halving. The model's own collectives are compute where compute waits for them at once, and work of their
channel in any case.

Two legs. Leaving out a collective makes no schedule longer, so a step with both legs takes no less than one with either
alone. If they share a channel, it takes no less than with reductions as long as both: all of that is work of the
channel after the gradients are ready.

Contention. Compute loses a share c of every second next to the busy link. Let W be the seconds in which the link is
busy, C the seconds of compute, and I the seconds in which compute waits. At most I of W lie next to no compute, so

    T  >=  C + I + c (W - I)  =  c W + (1 - c) (C / (1 - c) + I)

A slower compute waits no longer: every path through the schedule has each item at most once, so what items take longer
delays the end by no more. So I is at least what the same schedule waits if all compute takes C / (1 - c). The second
term is then at least that schedule without contention on a link with (1 - c) of the seconds:

    T  >=  c W + T'        T': the step on a link that takes (1 - c) of the seconds, next to undisturbed compute
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.problem import Chain, Clocks, Cost, Link, Problem, Rate, Transfer

_Numbers = NDArray[np.float64]

# Sizes at which a cost is asked.
_SAMPLES = 512
# Fraction by which seconds for a tensor are lowered, as they round differently from the cost.
_ROUNDING = 1e-10
# Transfers that the halving of a bound may look at: some tenths of a second, for a precision of a few 1e-4 or better.
_MOST_LOOKS = 6_000
# How often the cost of contention is taken off a step before the work is asked for once more.
_ROUNDS = 3
# Intervals that are smaller, as a fraction, are not halved.
_NARROW = 1e-10


@functools.lru_cache(maxsize=64)  # bounds of a problem ask hundreds of times
def _samples_below(cost: Cost, smallest: int, largest: int) -> tuple[_Numbers, _Numbers]:
    """Return bytes and seconds between which lines are no more than a cost, and close to it.

    Costs of links are the least of several rates, or any other concave function: above its chords. Where a cost is not
    concave, later chords are no steeper than earlier ones.
    """
    sizes = np.unique(np.geomspace(max(smallest, 1), max(largest, 1), _SAMPLES).round())
    seconds = np.array([cost(int(size), 1) for size in sizes])
    slopes = np.minimum.accumulate(np.diff(seconds) / np.diff(sizes))
    before = min(cost(0, 1), seconds[0] - slopes[0] * sizes[0]) if slopes.size else cost(0, 1)
    rises = np.concatenate(([0.0], np.cumsum(slopes * np.diff(sizes))))
    return np.concatenate(([0.0], sizes)), np.concatenate(([before], seconds[0] + rises))


def _tensor_below(cost: Cost, transfers: Sequence[Transfer]) -> float:
    """Return the seconds that every tensor of a bucket beyond the first takes at least."""
    if isinstance(cost, Rate):
        return cost.per_tensor
    most = max(2, sum(t.num_tensors for t in transfers))
    sizes = [t.num_bytes for t in transfers] or [0]
    return min(
        (cost(size, num) - cost(size, 1)) / (num - 1) * (1 - _ROUNDING)
        for size in (min(sizes), max(sizes), sum(sizes))
        for num in {2, min(8, most), most}
    )


@dataclass(frozen=True)
class LeastCosts:
    """A lower bound of any bucket's seconds: the least of some curves, and seconds for each tensor beyond the first."""

    curves: tuple[tuple[_Numbers, _Numbers], ...]  # bytes and seconds
    per_tensor: float

    @staticmethod
    def of(chain: Chain, link: Link, kind: CollectiveKind, share: float = 1.0) -> LeastCosts:
        """Return the costs of a chain's transfers; `share` is what of the seconds counts."""
        transfers = chain.transfers(kind)
        curves: list[tuple[_Numbers, _Numbers]] = []
        per_tensor = math.inf
        for link_index in sorted({t.link_index for t in transfers}) or [0]:
            members, over = [t for t in transfers if t.link_index == link_index], link.of(link_index)
            cost = over.gather if kind == "gather" else over.reduce
            sizes = [t.num_bytes for t in members] or [0]
            curves.append(_samples_below(cost, min(sizes), sum(t.num_bytes for t in transfers)))
            per_tensor = min(per_tensor, _tensor_below(cost, members))
        # With more than a latency for a tensor it would pay to send each by itself, as the first one is free.
        per_tensor = min(per_tensor, *(float(seconds[0]) for _, seconds in curves))
        return LeastCosts(tuple((sizes, share * seconds) for sizes, seconds in curves), share * per_tensor)

    def __call__(self, num_bytes: _Numbers, num_tensors: _Numbers) -> _Numbers:
        """Return the seconds of buckets."""
        found: _Numbers = functools.reduce(np.minimum, (np.interp(num_bytes, *curve) for curve in self.curves))
        if self.per_tensor:
            found = found + np.maximum(num_tensors - 1, 0) * self.per_tensor
        return found


@dataclass(frozen=True)
class Jobs:
    """Transfers of one kind in the order in which deadlines fall: gathers as they are used, reductions backwards."""

    costs: LeastCosts  # of buckets
    came: _Numbers  # bytes before each transfer, and of all
    tensors: _Numbers  # the same for tensors that are not worth packing
    # Least seconds of a step from the end of a bucket whose first transfer is this one; of reductions, from the begin
    # of the step to the start of the bucket.
    behind: _Numbers
    # Seconds of what a bucket must wait for in addition, by its contents; None for nothing.
    lead: LeastCosts | None = None

    @cached_property
    def leads(self) -> _Numbers:
        """Least seconds that the bucket of each transfer waits for."""
        zeros = np.zeros(len(self.behind))
        return zeros if self.lead is None else self.lead(np.diff(self.came), zeros)

    @cached_property
    def together(self) -> _Numbers:
        """Least seconds of the transfers before each, and of all: one bucket, as costs are concave."""
        return np.where(self.came > 0, self.costs(self.came, self.tensors), 0.0)

    def least(self, num_bytes: float) -> float:
        """Return the least seconds of a number of bytes, in any number of tensors and buckets."""
        return float(self.costs(np.array([num_bytes]), np.zeros(1))[0]) if num_bytes > 0 else 0.0

    @property
    def shortest(self) -> float:
        """Seconds that every step takes at least, from closed forms."""
        return float((self.together[1:] + self.behind + self.leads).max(initial=0.0))

    @property
    def longest(self) -> float:
        """Seconds in which one bucket is enough."""
        all_of_it = float(self.lead(self.came[-1:], self.tensors[-1:])[0]) if self.lead is not None else 0.0
        return float(self.together[-1] + self.behind.max(initial=0.0)) + all_of_it

    def between(self, first: int) -> _Numbers:
        """Return the least seconds of the buckets that begin with a transfer, by their length."""
        return self.costs(self.came[first + 1 :] - self.came[first], self.tensors[first + 1 :] - self.tensors[first])

    def work(self, seconds: float) -> _Numbers:
        """Return the least work of the link before each transfer, and of all, in a step of a given length; or inf."""
        num = len(self.behind)
        # Rounding must not make that impossible which is just possible.
        deadline = seconds * (1 + 1e-12) - self.behind
        work = np.full(num + 1, math.inf)
        work[0] = 0.0
        first = 0
        for end in range(1, num + 1):
            members = self.came[end] - self.came[first:end], self.tensors[end] - self.tensors[first:end]
            ends = self.costs(*members) + work[first:end]
            late = ends > deadline[first:end] - (0.0 if self.lead is None else self.lead(*members))
            shortest = int(late.argmin())
            if late[shortest]:
                break
            ends[late] = math.inf
            work[end] = ends.min()
            # A bucket that is too long for its deadline is no shorter with more in it.
            first += shortest
        return work


def jobs(chain: Chain, link: Link, share: float = 1.0) -> tuple[Jobs, Jobs]:
    """Return the gathers of a chain, and its reductions; `share` is what of the link's seconds counts."""
    total, elapsed = chain.elapsed[-1], np.array(chain.elapsed)
    used = elapsed[[g.at for g in chain.gathers]]
    ready = total - elapsed[[r.at for r in reversed(chain.reductions)]]
    gathers = _jobs(LeastCosts.of(chain, link, "gather", share), chain.gathers, total - used)
    reductions = _jobs(LeastCosts.of(chain, link, "reduce", share), chain.reductions[::-1], total - ready)
    if link.leading is not None:
        reductions = replace(reductions, lead=LeastCosts.of(chain, link.leading, "reduce", share))
    # What takes longest after a position: the compute that is left, or some of it and what it releases.
    tails = np.maximum.accumulate([total, *(reductions.together[1:] + reductions.leads + total - ready)])
    heads = np.maximum.accumulate([total, *(gathers.together[1:] + total - used)])
    read, made = [g.at for g in chain.gathers], [r.at for r in chain.reductions]
    gated = [len(made) - bisect.bisect_right(made, at) for at in read]
    gating = [bisect.bisect_left(read, at) for at in reversed(made)]
    return replace(gathers, behind=tails[gated] - used), replace(reductions, behind=heads[gating] - ready)


def _jobs(costs: LeastCosts, transfers: Sequence[Transfer], behind: _Numbers) -> Jobs:
    sizes = [0, *(t.num_bytes for t in transfers)]
    tensors = [0, *(t.num_tensors - t.num_small for t in transfers)]
    return Jobs(costs, np.cumsum(sizes, dtype=np.float64), np.cumsum(tensors, dtype=np.float64), behind)


def lower_bound(problem: Problem, *, limit: float = math.inf, kept: frozenset[str] | None = None) -> float:
    """Return the seconds that every step takes at least, with any `kept` parameters that fit in a limit if None."""
    if kept is not None:
        problem = problem.keep(kept)
    bounds = [chain_bound(chain, problem.link_of(chain)) for chain in problem.chains]
    if kept is None and problem.keepable:
        bounds[1] = _keeping_bound(problem, problem.chains[1], limit)
    return sum(bounds)


def _keeping_bound(problem: Problem, backward: Chain, limit: float) -> float:
    """Return the bound of backward when the memory at its start limits what need not be gathered again."""
    link = problem.link_of(backward)
    may = [g.num_bytes for g in backward.gathers if g.name in problem.keepable]
    room = limit - backward.base[0]
    if not may or room < min(may):
        return chain_bound(backward, link)
    if room >= sum(may):
        # To keep all of them leaves the fewest gathers, so no choice is bounded lower.
        return chain_bound(problem.keep(problem.keepable).chains[1], link)
    return chain_bound(backward, link, spared=room)


@functools.lru_cache(maxsize=64)
def chain_bound(chain: Chain, link: Link, *, spared: float = 0.0) -> float:
    """Return the seconds that a chain takes at least; any `spared` bytes need not be gathered."""
    if link.all_reduce is not None:
        bounds = [chain_bound(chain, link.first_legs, spared=spared)]
        if chain.reductions:
            same = link.channel("all_reduce") == link.channel("reduce")
            one = link.both_legs if same else link.second_legs
            bounds.append(chain_bound(chain, one, spared=spared))
            # After a gradient, and the gathers that it needs, comes its first leg, and then all later second legs.
            bounds.append(jobs(chain, link.second_legs)[1].shortest)
        return max(bounds)
    gathers, reductions = jobs(chain, link)
    fixed = [sum(fixed.seconds for fixed in chain.fixed if fixed.channel == channel) for channel in (0, 1)]
    if spared > 0:
        # Which gathers are spared is open, so none is known to gate compute. Only the bytes that are left are certain.
        left = max(0.0, sum(g.num_bytes for g in chain.gathers) - spared)
        work = _together(link, gathers.least(left), float(reductions.together[-1]), fixed)
        return max(chain_bound(replace(chain, gathers=()), link), work)
    gathering, reducing = float(gathers.together[-1]), float(reductions.together[-1])
    # Where work of the link lies next to compute it slows compute down by the contention; elsewhere it delays it in
    # full, as do at least what the first item reads and what the last one releases.
    first = gathers.least(sum(g.num_bytes for g in chain.gathers if g.at == 0))
    last = reductions.least(sum(r.num_bytes for r in chain.reductions if r.at == len(chain.seconds)))
    slowed = link.contention * _together(link, gathering, reducing)
    compute = chain.elapsed[-1] + slowed + (1 - link.contention) * (first + last)
    whole = _together(link, gathering, reducing, fixed)
    ruled_out = max(compute, whole, _fixed_path(chain), gathers.shortest, reductions.shortest)
    beside = jobs(chain, link, 1 - link.contention) if link.contention else None

    def possible(seconds: float) -> bool:
        if _work(link, gathers, reductions, seconds, fixed) > seconds * (1 + 1e-12):
            return False
        step = seconds  # T' at most: the less there is for it, the more work it takes, and the less is left
        for _ in range(_ROUNDS if beside is not None else 0):
            assert beside is not None
            work = _work(link, *beside, step)
            if work > step * (1 + 1e-12):
                return False
            step = seconds - link.contention / (1 - link.contention) * work
        return True

    if possible(ruled_out):
        return ruled_out
    enough = max(gathers.longest, reductions.longest, whole, ruled_out)
    looks = _MOST_LOOKS
    while looks > 0 and enough - ruled_out > _NARROW * enough:
        middle = (ruled_out + enough) / 2
        if possible(middle):
            enough = middle
        else:
            ruled_out = middle
        looks -= (len(gathers.behind) + len(reductions.behind)) * (1 if beside is None else 1 + _ROUNDS)
    return ruled_out


def _fixed_path(chain: Chain) -> float:
    """Return the seconds of compute and of the model's own collectives, without anything else on the link."""
    clocks = Clocks()
    for item, seconds in enumerate(chain.seconds):
        clocks.begin_item(chain, item)
        clocks.compute += seconds
    return clocks.compute


def _work(link: Link, gathers: Jobs, reductions: Jobs, seconds: float, fixed: Sequence[float] = (0.0, 0.0)) -> float:
    """Return the least work of the link in a step of a given length; or infinity."""
    gathering = float(gathers.work(seconds)[-1])
    return _together(link, gathering, float(reductions.work(seconds)[-1]), fixed) if gathering <= seconds else math.inf


def _together(link: Link, gathering: float, reducing: float, fixed: Sequence[float] = (0.0, 0.0)) -> float:
    """Return the work of the busier channel: on one channel the work adds up, with the model's own there."""
    first, second = (gathering, reducing) if link.separate else (gathering + reducing, 0.0)
    return max(first + fixed[0], second + fixed[1])
