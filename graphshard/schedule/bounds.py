"""What no schedule can beat, whatever its memory.

For each number of buckets, a chain that only gathers has an exact optimum: with k buckets over the first j transfers,
the channel finishes them at k latencies and their bytes wherever the cuts are, so

    d[k][j] = min over i of max(d[k-1][i], k * latency + bytes[j] * rate) + compute between the uses of i and j

A chain that only reduces is the same backwards in time. No schedule of both is shorter than either of them, than either
with what must come before or after it, or than the link's whole work; and fewer buckets make that work shorter and
these longer. The bound is the least, over the numbers of buckets, of the largest of these.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphshard.schedule.problem import KINDS, Chain, Link, Problem, Rate, Transfer
from graphshard.schedule.rates import at_once, rate_below

# Beyond so many buckets of a kind only their latencies count.
_MOST_BUCKETS = 256

Times = NDArray[np.float64]


def lower_bound(problem: Problem, *, limit: float = math.inf, kept: frozenset[str] | None = None) -> float:
    """Seconds that every step takes at least.

    Args:
        limit: bytes that schedules may use; it bounds what can stay gathered.
        kept: the parameters that stay gathered for backward; None is for any choice among those that may.
    """
    if kept is not None:
        return sum(chain_bound(chain, problem.link) for chain in problem.keep(kept).chains)
    if not problem.keepable:
        return sum(chain_bound(chain, problem.link) for chain in problem.chains)
    forward, backward, *rest = problem.chains
    bounds = [chain_bound(chain, problem.link) for chain in (forward, *rest)]
    return sum(bounds) + _keeping_bound(problem, backward, limit)


@functools.lru_cache(maxsize=64)
def chain_bound(chain: Chain, link: Link, *, spared: float = 0.0) -> float:
    """Seconds that a chain takes at least.

    Args:
        spared: bytes that need not be gathered, whichever they are.
    """
    gather, reduce = (rate_below(chain, link, kind) for kind in KINDS)
    if spared > 0:
        # Which gathers are spared is open, so none is known to gate compute. What is certain is the bytes that are
        # left.
        only = Chain(chain.name, chain.seconds, chain.base, (), chain.reductions)
        work = max(0.0, sum(g.num_bytes for g in chain.gathers) - spared) * gather.per_byte
        work += sum(r.num_bytes for r in chain.reductions) * reduce.per_byte
        return max(chain_bound(only, link), work)
    compute = chain.elapsed[-1]
    gathers = _by_buckets(_needs(chain), chain.elapsed, gather)
    reductions = _by_buckets(_mirrored(chain), _reversed_elapsed(chain), reduce)
    gathers = np.maximum(gathers, gathers + _tail(chain, reduce))
    reductions = np.maximum(reductions, reductions + _head(chain, gather))
    # Entry i is for i + 1 buckets, or for none if there is nothing to send.
    num_gathers = np.arange(len(gathers)) + (1 if chain.gathers else 0)
    num_reductions = np.arange(len(reductions)) + (1 if chain.reductions else 0)
    gathering = num_gathers * gather.latency + sum(g.num_bytes for g in chain.gathers) * gather.per_byte
    reducing = num_reductions * reduce.latency + sum(r.num_bytes for r in chain.reductions) * reduce.per_byte
    # On one channel the work adds up; of two, the longer one counts.
    work = np.maximum.outer(gathering, reducing) if link.separate else np.add.outer(gathering, reducing)
    # A schedule has some number of buckets of each kind, and takes at least each of the three there.
    least = np.maximum(np.maximum(gathers[:, None], reductions[None, :]), work).min()
    # Where work of the link lies beside compute it slows compute down by the contention; elsewhere it delays it in
    # full.
    return max(float(least), compute + link.contention * float(work.min()), _path(chain, gather, reduce))


def _keeping_bound(problem: Problem, backward: Chain, limit: float) -> float:
    """The backward pass when what need not be gathered again is limited by the memory at its start."""
    may = [g.num_bytes for g in backward.gathers if g.name in problem.keepable]
    room = limit - backward.base[0]
    if not may or room < min(may):
        return chain_bound(backward, problem.link)
    if room >= sum(may):
        # To keep all of them leaves the fewest gathers, so no choice is bounded lower.
        return sum(chain_bound(chain, problem.link) for chain in problem.keep(problem.keepable).chains[1:2])
    return chain_bound(backward, problem.link, spared=room)


@dataclass(frozen=True)
class _Need:
    """Bytes that must have come before the compute at a position goes on."""

    at: int
    num_bytes: int


def _needs(chain: Chain) -> list[_Need]:
    return [_Need(at, num_bytes) for at, num_bytes in at_once(chain.gathers)]


def _mirrored(chain: Chain) -> list[_Need]:
    """Reductions seen backwards in time: they gate the items before they are ready."""
    end = len(chain.seconds)
    return [_Need(end - at, num_bytes) for at, num_bytes in reversed(at_once(chain.reductions))]


def _reversed_elapsed(chain: Chain) -> tuple[float, ...]:
    return tuple(chain.elapsed[-1] - e for e in reversed(chain.elapsed))


def _by_buckets(needs: list[_Need], elapsed: Sequence[float], rate: Rate) -> Times:
    """The shortest time with exactly 1, 2, ... buckets, the last entry with that many or more; shape [buckets]."""
    if not needs:
        return np.array([elapsed[-1]])
    position = np.array([elapsed[need.at] for need in needs] + [elapsed[-1]])
    arrived = np.cumsum([0, *(need.num_bytes for need in needs)]) * rate.per_byte
    num = len(needs)
    later = np.tril(np.ones((num + 1, num + 1), dtype=bool), -1)  # [j, i]: i before j
    clock = np.full(num + 1, np.inf)
    clock[0] = position[0]
    least = _free(needs, elapsed, rate)
    found: list[float] = []
    for buckets in range(1, min(num, _MOST_BUCKETS) + 1):
        # The channel's clock behind transfer j is the same wherever the cuts are. `clock` is compute's, with one bucket
        # less, where it comes to the use of transfer i.
        channel = buckets * rate.latency + arrived
        waited = np.maximum(clock[None, :], channel[:, None]) - position[None, :]
        clock = np.where(later, waited, np.inf).min(axis=1) + position
        found.append(float(clock[num]))
        # More buckets take at least so long, and more work of the link. If they cannot be shorter, or if what was found
        # is as short as with latencies for free, no entry behind this one makes the bound lower.
        beyond = max(least, (buckets + 1) * rate.latency + arrived[-1])
        if beyond >= min(found) or found[-1] <= least * (1 + 1e-12):
            break
    else:
        beyond = math.inf if num <= _MOST_BUCKETS else beyond
    return np.array([*found, beyond]) if beyond < math.inf else np.array(found)


def _free(needs: list[_Need], elapsed: Sequence[float], rate: Rate) -> float:
    """The shortest time if every bucket but one had no latency."""
    arrived = itertools.accumulate(need.num_bytes for need in needs)
    rest = (elapsed[-1] - elapsed[need.at] + rate.latency + a * rate.per_byte for need, a in zip(needs, arrived))
    return max(elapsed[-1], *rest)


def _seconds(rate: Rate, transfers: Sequence[Transfer]) -> float:
    return rate.latency + sum(t.num_bytes for t in transfers) * rate.per_byte


def _tail(chain: Chain, reduce: Rate) -> float:
    """What follows on the compute that the gathers gate: the last reduction, less the compute beside it."""
    if not chain.reductions:
        return 0.0
    ready = chain.reductions[-1].at
    if chain.gathers and chain.gathers[-1].at >= ready:
        return 0.0
    last = [r for r in chain.reductions if r.at == ready]
    return _seconds(reduce, last) - (chain.elapsed[-1] - chain.elapsed[ready])


def _head(chain: Chain, gather: Rate) -> float:
    """What precedes the compute that releases the reductions: the first gather, less the compute beside it."""
    if not chain.gathers:
        return 0.0
    first = chain.gathers[0].at
    if chain.reductions and chain.reductions[0].at <= first:
        return 0.0
    needed = [g for g in chain.gathers if g.at == first]
    return _seconds(gather, needed) - chain.elapsed[first]


def _path(chain: Chain, gather: Rate, reduce: Rate) -> float:
    """The longest way along gathers, the compute they gate, and the reductions that it releases."""
    came = itertools.accumulate(g.num_bytes for g in chain.gathers)
    gated = [(g.at, gather.latency + a * gather.per_byte - chain.elapsed[g.at]) for g, a in zip(chain.gathers, came)]
    left = list(itertools.accumulate(r.num_bytes for r in reversed(chain.reductions)))[::-1]
    longest = lead = 0.0
    for reduction, remaining in zip(chain.reductions, left):
        # A gradient is ready behind the items before `at`, and so behind the gathers that gate these.
        while gated and gated[0][0] < reduction.at:
            lead = max(lead, gated.pop(0)[1])
        after = reduce.latency + remaining * reduce.per_byte
        longest = max(longest, lead + chain.elapsed[reduction.at] + after)
    return longest
