"""Find the shortest schedule of a problem within a budget of steps, with the bound it is measured by.

Each phase is solved by itself, as it waits for everything that it starts. A phase is searched in this order:

    start     FSDP2's order, and every transfer by itself: there is always a schedule, and none is longer
    rough     buckets that may be cut at a few places only, and any of these together
    refined   the same around the cuts of the best, until nothing gets shorter
    proof     every cut and every order, of what is shorter than the best: without a memory limit nothing is left out
    exact     of a small phase, every sequence of events

The search ends as soon as a schedule is as short as the bound. Of equally short ones that with the least memory counts.
Where reductions have two legs, the dynamic program looks at the first ones alone, at the second ones, and at both as
one; the orders it finds are placed and simulated with both. Where communication slows compute down, it counts the least
cost of contention, and the simulator all of it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from graphshard.errors import InfeasibleError
from graphshard.schedule._dynamic_program import ANY, Effort, channel_order, shortest_order
from graphshard.schedule._exact_search import search_exactly
from graphshard.schedule._placement import delay, laziest, one_ahead, place, singles
from graphshard.schedule.bounds import chain_bound, lower_bound
from graphshard.schedule.problem import (
    KINDS,
    Bucketed,
    Budget,
    Chain,
    Link,
    Placement,
    Problem,
    Schedule,
    Transfer,
    contents_of,
    modes,
)
from graphshard.schedule.simulator import ChainRun, ExplainedRun, simulate

# Steps of a solver: some seconds.
STEPS = 2_000_000
# Two schedules whose times differ by less are equally short, as far as costs are known.
_EQUAL = 1e-4
# Places at which rough buckets of a kind may be cut.
_PLACES = 24
# Steps between the cuts that are tried around the cuts of the best.
_AROUND = (8, 4, 2, 1)
# Shares by which a schedule must be shorter to be looked for, one after the other: the larger, the sooner ruled out.
_GAINS = (0.02, 0.01, 0.005, 0.001)
# Under a memory limit, which the proof does not know, it is only tried for gaps that are smaller.
_PROVABLE = 0.03
# Steps of a budget for an item or a bucket that is placed and simulated.
_PLACED = 10


@dataclass(frozen=True)
class Solution:
    """A schedule and its simulation."""

    schedule: Schedule  # placements and what stays gathered
    step_seconds: float  # of one step
    lower_bound: float  # seconds that no schedule of the problem beats
    peak: int  # most bytes alive
    stopped: bool = False  # the budget ended a search; schedules it had not looked at may be shorter

    @property
    def gap(self) -> float:
        """How much longer than the bound, as a fraction of it."""
        return self.step_seconds / self.lower_bound - 1 if self.lower_bound else 0.0


@dataclass(frozen=True)
class Solver:
    """Solver of problems."""

    limit: float = math.inf  # bytes that may be alive at any time
    exact_kept: int = 6  # with at most this many parameters that may stay gathered, every choice is tried
    steps: int = STEPS  # shared by all searches, see `Budget`
    exact_transfers: int = 12  # phases with at most this many transfers are searched exactly
    below: float = math.inf  # seconds; longer steps are not looked for, except the first ones of a search

    def __call__(self, problem: Problem) -> Solution:
        """Return the best schedule found.

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
        best: Solution | None = None
        bound = lower_bound(problem, limit=self.limit)
        budget, stopped = Budget(self.steps), False
        choices = list(self._choices(problem))
        for index, kept in enumerate(choices):
            with_kept = problem.keep(kept)
            if smallest_of(with_kept) > self.limit:
                continue
            if best is not None and lower_bound(with_kept, kept=frozenset()) >= best.step_seconds * (1 - 1e-12):
                continue
            part = budget.part(len(choices) - index)
            found = list(self._phases(with_kept, part))
            budget.take(part)
            stopped |= any(phase.stopped for phase in found)
            seconds, peak = sum(phase.seconds for phase in found), max(phase.peak for phase in found)
            if best is None or seconds < best.step_seconds:
                best = Solution(Schedule(tuple(phase.placement for phase in found), kept), seconds, bound, peak)
            if not problem.keepable:
                bound = max(bound, sum(phase.bound for phase in found))
        assert best is not None
        return replace(best, lower_bound=min(bound, best.step_seconds), stopped=stopped)

    def _phases(self, problem: Problem, budget: Budget) -> Iterator[PhaseSearch]:
        bounds = [chain_bound(chain, problem.link_of(chain)) for chain in problem.chains]
        room = self.below - sum(bounds)  # seconds that phases may take beyond their bounds
        for index, (chain, bound) in enumerate(zip(problem.chains, bounds)):
            part = budget.part(len(problem.chains) - index)
            found = PhaseSearch(chain, problem.link_of(chain), replace(self, below=bound + room))
            found.run(part)
            yield found
            budget.take(part)
            room -= found.seconds - bound

    def _choices(self, problem: Problem) -> Iterator[frozenset[str]]:
        """Yield what may stay gathered: every choice of few; of many the first ones of backward."""
        yield frozenset()
        names = _to_keep(problem)
        if len(names) <= self.exact_kept:
            sizes = range(1, len(names) + 1)
            yield from (frozenset(c) for size in sizes for c in itertools.combinations(names, size))
            return
        fits = (k for k in range(1, len(names) + 1) if smallest_of(problem.keep(frozenset(names[:k]))) <= self.limit)
        most = max(fits, default=0)
        for k in sorted({1, most // 4, most // 2, 3 * most // 4, most} - {0}, reverse=True):
            if k <= most:
                yield frozenset(names[:k])


def _to_keep(problem: Problem) -> list[str]:
    """Return what may stay gathered, first what backward needs first: nothing hides that gather, and it dies first."""
    return [g.name for g in problem.chains[1].gathers if g.name in problem.keepable] if problem.keepable else []


def fsdp2_solution(problem: Problem, limit: float = 0) -> Solution:
    """Return FSDP2's order (`one_ahead`), with the most parameters gathered in between that fit in `limit` bytes."""

    def keeping(number: int) -> Solution:
        kept = frozenset(names[:number])
        placements = tuple(one_ahead(chain, problem.link_of(chain)) for chain in problem.keep(kept).chains)
        run = simulate(problem, Schedule(placements, kept))
        return Solution(Schedule(placements, kept), run.step_seconds, lower_bound(problem), run.peak)

    names = _to_keep(problem)
    return keeping(bisect.bisect_right(range(1, len(names) + 1), limit, key=lambda number: keeping(number).peak))


def smallest_of(problem: Problem) -> int:
    """Return the least bytes in which all chains of a problem can run, if nothing stays gathered that need not."""
    return max(_smallest_peak(chain, problem.link_of(chain)) for chain in problem.chains)


def _smallest_peak(chain: Chain, link: Link) -> int:
    return ChainRun(chain, link, laziest(chain, link)).peak


def _explain(problem: Problem, smallest: int) -> str:
    """Return where the least memory is needed and for what."""
    chain = next(chain for chain in problem.chains if _smallest_peak(chain, problem.link_of(chain)) == smallest)
    link = problem.link_of(chain)
    alive = ExplainedRun(chain, link, laziest(chain, link)).at_peak
    largest = sorted(alive.items(), key=lambda pair: -pair[1])[:3]
    what = ", ".join(f"{size:,} {name or 'activations, shards and inputs'}" for name, size in largest if size)
    return (
        f"it is needed in {chain.name}: {what}. Use smaller units, a smaller batch, more ranks, or activation "
        "checkpointing."
    )


class PhaseSearch:
    """A search for the shortest schedule of a phase, in whose limit `placement.laziest` must fit, and the best so far.

    Longer schedules than `solver.below` are not looked for, beyond those at the start, which cost no steps.
    """

    def __init__(self, chain: Chain, link: Link, solver: Solver) -> None:
        self.chain, self.link, self.solver, self.limit = chain, link, solver, solver.limit
        self.bound = chain_bound(chain, link)  # seconds that no schedule beats
        self.stopped = False  # whether the budget ended the search
        self.seconds, self.peak, self.placement = math.inf, 0, Placement()
        self.two_legs = link.all_reduce is not None and bool(chain.reductions)
        # Links that the search for buckets and their order assumes.
        self.looks = [link.first_legs, *([link.second_legs, link.both_legs] if self.two_legs else [])]

    def run(self, budget: Budget) -> None:
        """Search until the bound is met or the budget ends."""
        self._consider(laziest(self.chain, self.link))
        if all(g.start is None for g in self.chain.gathers):
            self._consider(one_ahead(self.chain, self.link))
        self._order(Budget(0), singles(self.chain))
        num = len(self.chain.gathers) + len(self.chain.reductions)
        searches = [self._rough, self._proof] if num else []
        if 0 < num <= self.solver.exact_transfers:
            searches.append(self._exact)
        for index, search in enumerate(searches):
            if not self._met:
                part = budget.part(len(searches) - index)
                search(part)
                self.stopped |= part.ended
                budget.take(part)
        self.bound = min(self.bound, self.seconds)
        self.stopped &= not self._met

    @property
    def _met(self) -> bool:
        return self.bound >= self.solver.below or self.seconds <= self.bound * (1 + _EQUAL)

    @property
    def _to_beat(self) -> float:
        return min(self.seconds, self.solver.below)

    def _rough(self, budget: Budget) -> None:
        cuts = (even_cuts(self.chain.transfers(kind), _PLACES) for kind in KINDS)
        self._search(Coarse.at_cuts(self.chain, *cuts), ANY, budget)
        before = math.inf
        while not self._met and not budget.ended and self.seconds < before * (1 - _GAINS[-1]):
            before = self.seconds
            for step in _AROUND:
                buckets = self.placement.buckets
                ends = ([b.end for b in buckets if b.kind == kind] for kind in KINDS)
                around = (cuts_around(e, len(self.chain.transfers(kind)), step) for e, kind in zip(ends, KINDS))
                self._search(Coarse.at_cuts(self.chain, *around), 16, budget)

    def _search(self, coarse: Coarse, window: int, budget: Budget) -> None:
        """Consider the best orders of a coarse chain."""
        for look in self.looks:
            if self._met:
                return
            # Two legs one after the other may take longer than what they are to beat.
            below = math.inf if look.reduce is not self.link.reduce else self._to_beat
            order = channel_order(coarse.joined, look, Effort(window, below=below), budget, self.limit)
            if order is not None:
                found = coarse.original(order)
                self._order(budget, found)
                if self.two_legs and not self.link.separate:
                    self._order(budget, sorted(found, key=self._ready))

    def _ready(self, bucket: Bucketed) -> tuple[int, bool]:
        """Sort reductions as soon as they are ready: where second legs take longest, early gathers wait."""
        members = self.chain.members(bucket)
        return (members[0].at, True) if bucket.kind == "gather" else (members[-1].at, False)

    def _proof(self, budget: Budget) -> None:
        """Look for every order that is shorter than the best, of transfers whose small tensors are packed for free."""
        if self.link.separate and self.chain.gathers and self.chain.reductions:
            return
        if self.limit < math.inf and self.seconds > self.bound * (1 + _PROVABLE):
            return
        free = replace(
            self.chain,
            gathers=tuple(map(_without_copies, self.chain.gathers)),
            reductions=tuple(map(_without_copies, self.chain.reductions)),
        )
        seconds = self._to_beat
        for gain in _GAINS if seconds == self.seconds else (0.0,):
            below = seconds / (1 + gain)
            found = shortest_order(free, self.link.first_legs, budget, below) if below > self.bound else None
            if found is not None:  # nothing is shorter than this
                self.bound = max(self.bound, found[0])
                self._order(budget, [self._with_copies(bucket) for bucket in found[1]])
            if found is not None or budget.ended:
                return
            self.bound = max(self.bound, below)

    def _with_copies(self, bucket: Bucketed) -> Bucketed:
        """Return the bucket packed or not, as it may be, and as takes less time in all."""
        members = self.chain.members(bucket)
        contents, link = contents_of(members), self.link.of(members[0].link_index)

        def seconds(packed: bool) -> float:
            cost = contents.load(link, bucket.kind, packed)
            return cost.seconds + cost.copy_in + cost.copy_out

        return replace(bucket, packed=min(modes(members), key=seconds))

    def _exact(self, budget: Budget) -> None:
        if self.seconds <= self.bound * (1 + _GAINS[-1]):
            return
        found = search_exactly(self.chain, self.link, budget, self.limit, self._to_beat * (1 - 1e-12))
        if found.placement is not None:
            self._delayed(found.placement)
        self.bound = max(self.bound, found.bound)

    def _order(self, budget: Budget, order: Sequence[Bucketed]) -> None:
        for urgent in (False, True):
            budget.spend(_PLACED * (len(self.chain.seconds) + 2 * len(order)))
            placement = place(self.chain, self.link, order, self.limit, urgent=urgent)
            if placement is not None:
                self._delayed(placement)

    def _delayed(self, placement: Placement) -> None:
        """Consider a placement with starts as late as they may be, which is no slower without contention."""
        if self.link.contention:
            self._consider(placement)
        self._consider(delay(self.chain, self.link, placement))

    def _consider(self, placement: Placement) -> None:
        run = ChainRun(self.chain, self.link, placement)
        if run.peak > self.limit:
            return
        # Infinity is equal to nothing.
        equal = abs(run.seconds - self.seconds) <= _EQUAL * min(run.seconds, self.seconds)
        if run.peak < self.peak if equal else run.seconds < self.seconds:
            self.seconds, self.peak, self.placement = run.seconds, run.peak, placement


def _without_copies(transfer: Transfer) -> Transfer:
    """Return a transfer that takes no longer, packed or not: small tensors travel in another's buffer, uncopied."""
    large = transfer.num_tensors - transfer.num_small
    apart = "" if transfer.packed is None else f" {transfer.packed}"
    group = f"{transfer.group}{apart}"  # transfers that must be packed share no bucket with ones that must not
    return replace(transfer, group=group, num_tensors=large, num_small=0, small_bytes=0, packed=None)


# --- buckets that may be cut at given places only ---------------------------------------------------------------


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
