"""Choose a schedule for a problem: what stays gathered, buckets, launch positions; with the bound it is measured by.

Each phase is solved by itself, as it waits for everything it starts: by dynamic programming over several bucket sizes
and reserves of memory, each placed under the memory limit; the shortest counts, and of equally short ones that with the
least memory. A phase of few transfers is then searched exactly. Where communication slows compute down, that is counted
when schedules are compared, not in the search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from graphshard.ir.errors import InfeasibleError
from graphshard.schedule.bounds import chain_bound, lower_bound
from graphshard.schedule.deep import EXACT, Effort, channel_order
from graphshard.schedule.exact import best_placement
from graphshard.schedule.place import delay, place
from graphshard.schedule.problem import (
    KINDS,
    Bucketed,
    Chain,
    Link,
    Occurrence,
    Placement,
    Problem,
    Schedule,
    modes,
)
from graphshard.schedule.rates import rate_below
from graphshard.schedule.simulate import simulate

# Two schedules whose times differ by less are equally short, as far as costs are known.
_EQUAL = 1e-4
# Latencies of all transfers beside the compute, from which very large buckets are worth a look.
_LONG = 0.1


@dataclass(frozen=True)
class Solution:
    """A schedule and what the simulator says of it.

    Attributes:
        schedule: placements and what stays gathered.
        step_seconds: of one step.
        lower_bound: seconds that no schedule of the problem beats.
        peak: most bytes alive.
    """

    schedule: Schedule
    step_seconds: float
    lower_bound: float
    peak: int

    @property
    def gap(self) -> float:
        """How much longer than the bound, as a fraction of it."""
        return self.step_seconds / self.lower_bound - 1 if self.lower_bound else 0.0


@dataclass(frozen=True)
class Solver:
    """Solves problems.

    Attributes:
        limit: bytes that may be alive at any time.
        exact_transfers: phases with at most so many transfers are searched exactly.
        exact_kept: with at most so many parameters that may stay gathered, every choice is tried.
        margin: gathers end this many times their own length before they are needed, where that costs nothing.
    """

    limit: float = math.inf
    exact_transfers: int = 12
    exact_kept: int = 6
    margin: float = 1.0

    def __call__(self, problem: Problem) -> Solution:
        """The best schedule found.

        Raises:
            InfeasibleError: no schedule fits in the limit; it has the least bytes one needs.
        """
        smallest = max(smallest_peak(chain, problem.link) for chain in problem.chains)
        if smallest > self.limit:
            raise InfeasibleError(
                f"no schedule fits in a memory_limit of {self.limit:,.0f} bytes. The least possible is {smallest:,} "
                f"bytes; {_explain(problem, smallest)}",
                smallest,
            )
        best: tuple[float, Schedule] | None = None
        for kept in self._choices(problem):
            with_kept = problem.keep(kept)
            if max(smallest_peak(chain, problem.link) for chain in with_kept.chains) > self.limit:
                continue
            if best is not None and lower_bound(with_kept, kept=frozenset()) >= best[0] * (1 - 1e-12):
                continue
            placements = tuple(self._chain(chain, problem.link) for chain in with_kept.chains)
            schedule = Schedule(placements, kept)
            seconds = simulate(problem, schedule).step_seconds
            if best is None or seconds < best[0]:
                best = seconds, schedule
        assert best is not None
        timeline = simulate(problem, best[1])
        bound = lower_bound(problem, limit=self.limit)
        return Solution(best[1], timeline.step_seconds, bound, timeline.peak)

    def _choices(self, problem: Problem) -> Iterator[frozenset[str]]:
        """What may stay gathered: every choice of few; of many the last ones of forward, the first of backward."""
        yield frozenset()
        names = [g.name for g in reversed(problem.chains[0].gathers) if g.name in problem.keepable]
        if len(names) <= self.exact_kept:
            sizes = range(1, len(names) + 1)
            yield from (frozenset(c) for size in sizes for c in itertools.combinations(names, size))
            return
        fitting = [k for k in range(1, len(names) + 1) if self._fits(problem, names[:k])]
        most = max(fitting, default=0)
        for k in sorted({1, most // 4, most // 2, 3 * most // 4, most} - {0}, reverse=True):
            if k <= most:
                yield frozenset(names[:k])

    def _fits(self, problem: Problem, names: Sequence[str]) -> bool:
        chains = problem.keep(frozenset(names)).chains
        return max(smallest_peak(chain, problem.link) for chain in chains) <= self.limit

    def _chain(self, chain: Chain, link: Link) -> Placement:
        bound = chain_bound(chain, link)
        number = len(chain.gathers) + len(chain.reductions)
        small = number <= self.exact_transfers
        best = (math.inf, 0, Placement())
        for effort in self._efforts(chain, link, small):
            if effort is None:
                order: list[Bucketed] | None = singles(chain)
            else:
                order = channel_order(chain, link, replace(effort, below=best[0]), self.limit)
            for margin in (math.inf, self.margin) if order is not None else ():
                placement = place(chain, link, order or [], self.limit, margin)
                if placement is not None:
                    best = _better(best, _measured(chain, link, delay(chain, link, placement, self.margin)))
            if best[0] <= bound * (1 + _EQUAL):
                break
        if best[0] == math.inf:  # the user's starts leave no order that the others know
            best = _measured(chain, link, laziest(chain))
        if small and best[0] > bound * (1 + 1e-9):
            exact = best_placement(chain, link, self.limit, best[0] * (1 - 1e-12))
            if exact is not None:
                best = _measured(chain, link, delay(chain, link, exact[1], self.margin))
        return best[2]

    def _efforts(self, chain: Chain, link: Link, small: bool) -> Iterator[Effort | None]:
        """What is tried, from small buckets to large; None is for no buckets of several transfers."""
        yield None
        sizes = sorted(t.num_bytes for t in (*chain.gathers, *chain.reductions))
        if not sizes:
            return
        typical = float(sizes[len(sizes) * 9 // 10])
        tried = [(2 * typical, 0.0), (math.inf, 1.0)]
        latencies = sum(rate_below(chain, link, kind).latency * len(chain.transfers(kind)) for kind in KINDS)
        if latencies > _LONG * chain.elapsed[-1]:
            tried.append((math.inf, 4.0))
        for most, coarse in tried:
            yield Effort(most_bytes=most, coarse=coarse)
            if self.limit < math.inf:
                yield Effort(most_bytes=most, coarse=coarse, reserve=typical)
        if small:
            yield EXACT


def singles(chain: Chain) -> list[Bucketed]:
    """Every transfer by itself, in the order in which compute meets them."""
    found = [(r.at, 0, i, Bucketed("reduce", i, i + 1, bool(r.packed))) for i, r in enumerate(chain.reductions)]
    found += [(g.at, 1, i, Bucketed("gather", i, i + 1, bool(g.packed))) for i, g in enumerate(chain.gathers)]
    return [bucket for *_, bucket in sorted(found, key=lambda entry: entry[:3])]


def laziest(chain: Chain) -> Placement:
    """Everything by itself and at the last moment: no schedule needs less memory."""
    buckets = singles(chain)
    events: list[Occurrence] = []
    for index, bucket in enumerate(buckets):
        member = chain.transfers(bucket.kind)[bucket.first]
        start = member.at if member.start is None else member.start
        events += [Occurrence("start", index, start), Occurrence("wait", index, max(start, member.at))]
    return Placement(tuple(buckets), tuple(sorted(events, key=lambda event: event.at)))


def one_ahead(problem: Problem) -> Solution:
    """FSDP2's order: a gather starts when the one before it has arrived; a reduction ends when the next one starts."""
    schedule = Schedule(tuple(map(_one_ahead, problem.chains)))
    timeline = simulate(problem, schedule)
    return Solution(schedule, timeline.step_seconds, lower_bound(problem, kept=frozenset()), timeline.peak)


def _one_ahead(chain: Chain) -> Placement:
    buckets = [replace(b, packed=modes([chain.transfers(b.kind)[b.first]])[-1]) for b in singles(chain)]
    at = [chain.transfers(bucket.kind)[bucket.first].at for bucket in buckets]
    gathers, reductions = ([i for i, b in enumerate(buckets) if b.kind == kind] for kind in KINDS)
    events: list[Occurrence] = []
    for index, end in zip(reductions, [*(at[i] for i in reductions[1:]), len(chain.seconds)]):
        events += [Occurrence("start", index, at[index]), Occurrence("wait", index, end)]
    for index, start in zip(gathers, [0, *(at[i] for i in gathers)]):
        events += [Occurrence("start", index, start), Occurrence("wait", index, at[index])]
    return Placement(tuple(buckets), tuple(sorted(events, key=lambda event: event.at)))


def smallest_peak(chain: Chain, link: Link) -> int:
    """The least bytes in which a chain can run."""
    return simulate(Problem((chain,), link), Schedule((laziest(chain),))).peak


def _measured(chain: Chain, link: Link, placement: Placement) -> tuple[float, int, Placement]:
    timeline = simulate(Problem((chain,), link), Schedule((placement,)))
    return timeline.step_seconds, timeline.peak, placement


def _better(a: tuple[float, int, Placement], b: tuple[float, int, Placement]) -> tuple[float, int, Placement]:
    """The shorter one, or of two that are equally short the one with less memory."""
    if abs(a[0] - b[0]) <= _EQUAL * min(a[0], b[0]):
        return min(a, b, key=lambda found: found[1])
    return min(a, b, key=lambda found: found[0])


def _explain(problem: Problem, smallest: int) -> str:
    """Where the least memory is needed and for what."""
    for chain in problem.chains:
        timeline = simulate(Problem((chain,), problem.link), Schedule((laziest(chain),)))
        if timeline.peak == smallest:
            largest = sorted(timeline.alive.items(), key=lambda pair: -pair[1])[:3]
            what = ", ".join(f"{size:,} {name or 'activations, shards and inputs'}" for name, size in largest)
            return (
                f"it is needed in {chain.name}: {what}. Use smaller units, a smaller batch, more ranks, or activation "
                "checkpointing."
            )
    raise AssertionError("the smallest peak belongs to a chain")
