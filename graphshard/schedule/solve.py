"""Choose a schedule for a problem: what stays gathered, buckets, launch positions; with the bound it is measured by.

Each phase is solved by itself, as it waits for everything it starts (`phase`). All phases and choices share a budget of
steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphshard.errors import InfeasibleError
from graphshard.schedule import simple
from graphshard.schedule.bounds import chain_bound, lower_bound
from graphshard.schedule.budget import Budget
from graphshard.schedule.phase import Found, best_of
from graphshard.schedule.problem import Chain, Link, Problem, Schedule
from graphshard.schedule.simulate import Timeline, simulate

# Steps of a solver: some seconds.
STEPS = 2_000_000


@dataclass(frozen=True)
class Solution:
    """A schedule and what the simulator says of it.

    Attributes:
        schedule: placements and what stays gathered.
        step_seconds: of one step.
        lower_bound: seconds that no schedule of the problem beats.
        peak: most bytes alive.
        stopped: the budget ended a search; what it had not looked at may be shorter.
    """

    schedule: Schedule
    step_seconds: float
    lower_bound: float
    peak: int
    stopped: bool = False

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
        steps: what all searches may take together, see `Budget`.
        below: seconds; longer steps are not looked for, beyond those that a search begins with.
    """

    limit: float = math.inf
    exact_transfers: int = 12
    exact_kept: int = 6
    margin: float = 1.0
    steps: int = STEPS
    below: float = math.inf

    def __call__(self, problem: Problem) -> Solution:
        """The best schedule found.

        Raises:
            InfeasibleError: no schedule fits in the limit; it has the least bytes one needs.
        """
        smallest = smallest_of(problem)
        if smallest > self.limit:
            raise InfeasibleError(
                f"no schedule fits in a memory_limit of {self.limit:,.0f} bytes. The least possible is {smallest:,} "
                f"bytes; {_explain(problem, smallest)}",
                smallest,
            )
        best: tuple[float, Schedule] | None = None
        bound = lower_bound(problem, limit=self.limit)
        budget, stopped = Budget(self.steps), False
        choices = list(self._choices(problem))
        for index, kept in enumerate(choices):
            with_kept = problem.keep(kept)
            if smallest_of(with_kept) > self.limit:
                continue
            if best is not None and lower_bound(with_kept, kept=frozenset()) >= best[0] * (1 - 1e-12):
                continue
            part = budget.part(len(choices) - index)
            found = list(self._phases(with_kept, part))
            budget.take(part)
            stopped |= any(phase.stopped for phase in found)
            schedule = Schedule(tuple(phase.placement for phase in found), kept)
            seconds = simulate(problem, schedule).step_seconds
            if best is None or seconds < best[0]:
                best = seconds, schedule
            if not problem.keepable:
                bound = max(bound, sum(phase.bound for phase in found))
        assert best is not None
        timeline = simulate(problem, best[1])
        return Solution(best[1], timeline.step_seconds, min(bound, timeline.step_seconds), timeline.peak, stopped)

    def _phases(self, problem: Problem, budget: Budget) -> Iterator[Found]:
        bounds = [chain_bound(chain, problem.link_of(chain)) for chain in problem.chains]
        room = self.below - sum(bounds)  # seconds that phases may take beyond their bounds
        for index, (chain, bound) in enumerate(zip(problem.chains, bounds)):
            part = budget.part(len(problem.chains) - index)
            found = best_of(
                chain,
                problem.link_of(chain),
                part,
                limit=self.limit,
                margin=self.margin,
                exact_transfers=self.exact_transfers,
                below=bound + room,
            )
            yield found
            budget.take(part)
            room -= found.seconds - bound

    def _choices(self, problem: Problem) -> Iterator[frozenset[str]]:
        """What may stay gathered: every choice of few; of many the first ones of backward."""
        yield frozenset()
        names = _to_keep(problem)
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
        return smallest_of(problem.keep(frozenset(names))) <= self.limit


def _to_keep(problem: Problem) -> list[str]:
    """What may stay gathered, first what backward needs first: nothing hides that gather, and it is let go of first."""
    return [g.name for g in problem.chains[1].gathers if g.name in problem.keepable] if problem.keepable else []


def one_ahead(problem: Problem, limit: float = 0) -> Solution:
    """FSDP2's order: a gather starts when the one before it has arrived; a reduction ends when the next one starts.

    Args:
        limit: bytes in which as much as may stays gathered.
    """
    names, most = _to_keep(problem), 0
    above = len(names) + 1
    while above - most > 1:
        middle = (most + above) // 2
        if _one_ahead(problem, frozenset(names[:middle])).peak <= limit:
            most = middle
        else:
            above = middle
    return _one_ahead(problem, frozenset(names[:most]))


def _one_ahead(problem: Problem, kept: frozenset[str]) -> Solution:
    keeping = problem.keep(kept)
    found = (simple.one_ahead(chain, second=problem.link_of(chain).all_reduce is not None) for chain in keeping.chains)
    schedule = Schedule(tuple(found), kept)
    timeline = simulate(problem, schedule)
    return Solution(schedule, timeline.step_seconds, lower_bound(problem), timeline.peak)


def smallest_peak(chain: Chain, link: Link) -> int:
    """The least bytes in which a chain can run."""
    return _laziest(chain, link).peak


def smallest_of(problem: Problem) -> int:
    """The least bytes in which all chains of a problem can run, if nothing stays gathered that need not."""
    return max(smallest_peak(chain, problem.link_of(chain)) for chain in problem.chains)


def _laziest(chain: Chain, link: Link) -> Timeline:
    placement = simple.laziest(chain, second=link.all_reduce is not None)
    return simulate(Problem((chain,), link), Schedule((placement,)))


def _explain(problem: Problem, smallest: int) -> str:
    """Where the least memory is needed and for what."""
    for chain in problem.chains:
        timeline = _laziest(chain, problem.link_of(chain))
        if timeline.peak == smallest:
            largest = sorted(timeline.alive.items(), key=lambda pair: -pair[1])[:3]
            what = ", ".join(f"{size:,} {name or 'activations, shards and inputs'}" for name, size in largest)
            return (
                f"it is needed in {chain.name}: {what}. Use smaller units, a smaller batch, more ranks, or activation "
                "checkpointing."
            )
    raise AssertionError("the smallest peak belongs to a chain")
