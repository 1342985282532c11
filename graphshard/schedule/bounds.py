"""What no schedule can beat, whatever its memory.

What the model communicates is compute where it runs at once, and work of its channel in any case.

In a step of T seconds every gather has a deadline, and no reduction may start before its gradient can be ready. How
much work of the link each of the two kinds needs at the least, by itself, to keep to that is exact (`deadlines`). If a
kind cannot keep to it, or if both together are more work than T, then no schedule takes T. The bound is the least T
that is not ruled out, found by halving.

Contention. Compute loses a share c of every second that it runs beside the link. Let W be the seconds in which the link
is busy, C those of compute, and I those in which compute waits. At most I of W lie beside no compute, so

    T  >=  C + I + c (W - I)  =  c W + (1 - c) (C / (1 - c) + I)

A slower compute waits no longer: every path through the schedule has each item once at the most, so what items take
longer delays the end by no more. So I is at least what the same schedule waits if all compute takes C / (1 - c). The
second term is then at least that schedule without contention on a link with (1 - c) of the seconds:

    T  >=  c W + T'        T': the step on a link that takes (1 - c) of the seconds, beside undisturbed compute
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from graphshard.schedule.deadlines import Jobs, jobs
from graphshard.schedule.legs import least_tail, one_legged
from graphshard.schedule.own import pass_own
from graphshard.schedule.problem import Chain, Link, Problem

# Transfers that halving may look at, together: some tenths of a second. It is known to a few 1e-4 then, or better.
_MOST_LOOKS = 6_000
# How often what contention costs is taken off a step before the work is asked for once more.
_ROUNDS = 3
# Intervals that are smaller, as a fraction, are not halved.
_NARROW = 1e-10


def lower_bound(problem: Problem, *, limit: float = math.inf, kept: frozenset[str] | None = None) -> float:
    """Seconds that every step takes at least.

    Args:
        limit: bytes that schedules may use; it bounds what can stay gathered.
        kept: the parameters that stay gathered for backward; None is for any choice among those that may.
    """
    if kept is not None:
        return sum(chain_bound(chain, problem.link_of(chain)) for chain in problem.keep(kept).chains)
    if not problem.keepable:
        return sum(chain_bound(chain, problem.link_of(chain)) for chain in problem.chains)
    forward, backward, *rest = problem.chains
    bounds = [chain_bound(chain, problem.link_of(chain)) for chain in (forward, *rest)]
    return sum(bounds) + _keeping_bound(problem, backward, limit)


@functools.lru_cache(maxsize=64)
def chain_bound(chain: Chain, link: Link, *, spared: float = 0.0) -> float:
    """Seconds that a chain takes at least.

    Args:
        spared: bytes that need not be gathered, whichever they are.
    """
    if link.all_reduce is not None:
        bounds = (chain_bound(chain, one, spared=spared) for one in one_legged(chain, link))
        return max(least_tail(chain, link), *bounds)
    gathers, reductions = jobs(chain, link)
    own = chain.own_seconds(0), chain.own_seconds(1)
    if spared > 0:
        # Which gathers are spared is open, so none is known to gate compute. What is certain is the bytes that are
        # left.
        only = replace(chain, gathers=())
        left = max(0.0, sum(g.num_bytes for g in chain.gathers) - spared)
        work = _together(link, gathers.least(left), reductions.together[-1], own)
        return max(chain_bound(only, link), work)
    work = _together(link, gathers.together[-1], reductions.together[-1])
    # Where work of the link lies beside compute it slows compute down by the contention; elsewhere it delays it in
    # full, as do at least what the first item reads and what the last one releases.
    first = gathers.least(sum(g.num_bytes for g in chain.gathers if g.at == 0))
    last = reductions.least(sum(r.num_bytes for r in chain.reductions if r.at == len(chain.seconds)))
    compute = chain.elapsed[-1] + link.contention * work + (1 - link.contention) * (first + last)
    whole = _together(link, gathers.together[-1], reductions.together[-1], own)
    ruled_out = max(compute, whole, _own_path(chain), gathers.shortest, reductions.shortest)
    beside = jobs(chain, link, 1 - link.contention) if link.contention else None
    if _possible(gathers, reductions, beside, link, ruled_out, own):
        return ruled_out
    possible = max(gathers.longest, reductions.longest, whole, ruled_out)
    looks = _MOST_LOOKS
    while looks > 0 and possible - ruled_out > _NARROW * possible:
        middle = (ruled_out + possible) / 2
        if _possible(gathers, reductions, beside, link, middle, own):
            possible = middle
        else:
            ruled_out = middle
        looks -= (len(gathers.behind) + len(reductions.behind)) * (1 if beside is None else 1 + _ROUNDS)
    return ruled_out


def _together(link: Link, gathering: float, reducing: float, own: tuple[float, float] = (0.0, 0.0)) -> float:
    """On one channel the work adds up, with the model's own there; of two, the longer one counts."""
    first, second = (gathering, reducing) if link.separate else (gathering + reducing, 0.0)
    return float(max(first + own[0], second + own[1]))


def _own_path(chain: Chain) -> float:
    """Seconds of compute and of what the model communicates, without anything else on the link."""
    compute, channels = 0.0, (0.0, 0.0)
    flying: tuple[tuple[int, float], ...] = ()
    for (starting, waited), seconds in zip(chain.own_of, chain.seconds):
        compute, channels, flying = pass_own(starting, waited, 0.0, compute, channels, flying)
        compute += seconds
    return compute


def _possible(
    gathers: Jobs,
    reductions: Jobs,
    beside: tuple[Jobs, Jobs] | None,
    link: Link,
    seconds: float,
    own: tuple[float, float],
) -> bool:
    """Whether so many seconds are not ruled out.

    Args:
        beside: the jobs if (1 - contention) of their seconds count; None without contention.
        own: seconds of each channel for what the model communicates.
    """
    if _work(link, gathers, reductions, seconds, own) > seconds * (1 + 1e-12):
        return False
    step = seconds  # T' at the most: the less there is for it, the more work it takes, and the less is left
    for _ in range(_ROUNDS if beside is not None else 0):
        assert beside is not None
        work = _work(link, *beside, step)
        if work > step * (1 + 1e-12):
            return False
        step = seconds - link.contention / (1 - link.contention) * work
    return True


def _work(link: Link, gathers: Jobs, reductions: Jobs, seconds: float, own: tuple[float, float] = (0.0, 0.0)) -> float:
    """The least work of the link in a step of so many seconds; or infinity."""
    gathering = float(gathers.work(seconds)[-1])
    return _together(link, gathering, float(reductions.work(seconds)[-1]), own) if gathering <= seconds else math.inf


def _keeping_bound(problem: Problem, backward: Chain, limit: float) -> float:
    """The backward pass when what need not be gathered again is limited by the memory at its start."""
    link = problem.link_of(backward)
    may = [g.num_bytes for g in backward.gathers if g.name in problem.keepable]
    room = limit - backward.base[0]
    if not may or room < min(may):
        return chain_bound(backward, link)
    if room >= sum(may):
        # To keep all of them leaves the fewest gathers, so no choice is bounded lower.
        return sum(chain_bound(chain, link) for chain in problem.keep(problem.keepable).chains[1:2])
    return chain_bound(backward, link, spared=room)
