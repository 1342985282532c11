"""What no schedule can beat, whatever its memory.

In a step of T seconds every gather has a deadline, and no reduction may start before its gradient can be ready. How
much work of the link each of the two kinds needs at the least, by itself, to keep to that is exact (`deadlines`). If a
kind cannot keep to it, or if both together are more work than T, then no schedule takes T. The bound is the least T
that is not ruled out, found by halving.
"""

from __future__ import annotations

import functools
import math

from graphshard.schedule.deadlines import Jobs, jobs
from graphshard.schedule.problem import Chain, Link, Problem

# Transfers that halving may look at, together: some tenths of a second. It is known to a few 1e-4 then, or better.
_MOST_LOOKS = 6_000
# Intervals that are smaller, as a fraction, are not halved.
_NARROW = 1e-13


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
    gathers, reductions = jobs(chain, link)
    if spared > 0:
        # Which gathers are spared is open, so none is known to gate compute. What is certain is the bytes that are
        # left.
        only = Chain(chain.name, chain.seconds, chain.base, (), chain.reductions)
        left = max(0.0, sum(g.num_bytes for g in chain.gathers) - spared)
        work = _together(link, gathers.least(left), reductions.together[-1])
        return max(chain_bound(only, link), work)
    work = _together(link, gathers.together[-1], reductions.together[-1])
    # Where work of the link lies beside compute it slows compute down by the contention; elsewhere it delays it in
    # full.
    compute = chain.elapsed[-1] + link.contention * work
    ruled_out = max(compute, work, gathers.shortest, reductions.shortest)
    if _possible(gathers, reductions, link, ruled_out):
        return ruled_out
    possible = max(gathers.longest, reductions.longest, work, ruled_out)
    looks = _MOST_LOOKS
    while looks > 0 and possible - ruled_out > _NARROW * possible:
        middle = (ruled_out + possible) / 2
        if _possible(gathers, reductions, link, middle):
            possible = middle
        else:
            ruled_out = middle
        looks -= len(gathers.behind) + len(reductions.behind)
    return ruled_out


def _together(link: Link, gathering: float, reducing: float) -> float:
    """On one channel the work adds up; of two, the longer one counts."""
    return float(max(gathering, reducing) if link.separate else gathering + reducing)


def _possible(gathers: Jobs, reductions: Jobs, link: Link, seconds: float) -> bool:
    """Whether so many seconds are not ruled out."""
    gathering = gathers.work(seconds)[-1]
    return gathering <= seconds and _together(link, gathering, reductions.work(seconds)[-1]) <= seconds * (1 + 1e-12)


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
