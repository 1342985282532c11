"""Search for the shortest schedule of an external graph, and seconds that none beats.

Candidates cut transfers into buckets:

    given       the graph's own order: nothing that is longer is taken
    alone       every transfer by itself, as soon as it can, the one that is needed first before others
    joined      neighbors of a kind and group, up to some multiples of a latency
    planned     gathers that start from inputs and reductions that end with the graph, as `Solver` plans them

The best of them is changed, with buckets joined, cut and moved, while that makes it shorter. Of schedules that take as
long, the one that starts latest is taken, as transfers take memory.

The bound is the largest of compute, the work of each link, the pace of links (when each can have carried what is needed
at a position), and the bound of each group's gathers and reductions by themselves (`bounds.py`).
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from graphshard.schedule._graph_problem import GraphProblem, GraphRun, GraphSchedule, run
from graphshard.schedule._solver import STEPS, Solver
from graphshard.schedule.bounds import chain_bound
from graphshard.schedule.problem import Budget, Chain, Cost, Link, Problem, Transfer

# Latencies that the joined buckets of a candidate take in addition to their own.
_MULTIPLES = (1, 4, 16, 1 << 30)
# Shares by which a schedule must be shorter to be one, and may be longer if it starts later.
_SHORTER, _EQUAL = 1e-6, 5e-3
# Times its own length that a bucket ends before it is needed, where that costs nothing.
_MARGINS = (1.0, 0.0)
# Positions by which the successors of a bucket start later.
_LATER = (1, 2, 4)
# Steps of the budget for an event of a run.
_EVENT = 4

# Returns whether a schedule may be taken.
Fits = Callable[[GraphSchedule, GraphRun], bool]
Members = tuple[int, ...]
# Position, urgency at that position, and transfers.
_Entry = tuple[int, int, Members]


@dataclass
class Best:
    """The shortest schedule so far that fits."""

    problem: GraphProblem
    fits: Fits
    budget: Budget
    schedule: GraphSchedule
    outcome: GraphRun

    def run(self, schedule: GraphSchedule | None) -> GraphRun | None:
        """Run a schedule, if the budget has not ended."""
        if schedule is None or self.budget.ended:
            return None
        self.budget.spend(_EVENT * (self.problem.end + 2 * len(self.problem.transfers)))
        return run(self.problem, schedule)

    def consider(self, schedule: GraphSchedule | None, most: float | None = None) -> bool:
        """Take a schedule if it is shorter, or takes `most` seconds, and fits; return whether it was taken."""
        return schedule != self.schedule and self.take(schedule, self.run(schedule), most)

    def take(self, schedule: GraphSchedule | None, outcome: GraphRun | None, most: float | None = None) -> bool:
        """Take a schedule as `consider` does, after it has run."""
        most = self.outcome.seconds * (1 - _SHORTER) if most is None else most
        if schedule is None or outcome is None or outcome.seconds > most or not self.fits(schedule, outcome):
            return False
        self.schedule, self.outcome = schedule, outcome
        return True


def search(best: Best) -> None:
    """Replace a schedule with the shortest that is found from candidates and changes."""
    for buckets in _candidates(best.problem):
        asap = soon(best.problem, buckets)
        outcome = best.run(asap)
        best.take(asap, outcome)
        if asap is not None and outcome is not None:
            for margin in _MARGINS:
                best.consider(_late(best.problem, asap, outcome, margin))
    while not best.budget.ended and _change(best):
        pass
    _delay(best)


def soon(problem: GraphProblem, buckets: Iterable[Members]) -> GraphSchedule | None:
    """Return every bucket as soon as it can start; at a position the one that is needed first goes first."""
    windows = [(*problem.window(transfers), transfers) for transfers in buckets]
    if any(first > last for first, last, _ in windows):
        return None
    return _ordered(problem, windows)


def frugal(problem: GraphProblem, grows: Callable[[int], bool]) -> GraphSchedule | None:
    """Return every transfer by itself: at the last moment if it leaves more alive than it takes, else at the first."""
    starts = (transfer.last if grows(index) else transfer.first for index, transfer in enumerate(problem.transfers))
    return _ordered(problem, [(at, index, (index,)) for index, at in enumerate(starts)])


def _ordered(problem: GraphProblem, entries: Iterable[_Entry]) -> GraphSchedule | None:
    """Return the buckets by position and urgency, each after its predecessors; None if there is no such order."""
    left, started = sorted(entries), set[int]()
    found: list[tuple[int, Members]] = []

    def ready(entry: _Entry) -> bool:
        return all(started.issuperset(problem.transfers[index].after) for index in entry[2])

    while left:
        place = next((number for number, entry in enumerate(left) if ready(entry)), None)
        if place is None:
            return None
        position, _, transfers = left.pop(place)
        at = max(position, found[-1][0] if found else 0)
        if at > problem.window(transfers)[1]:
            return None
        found.append((at, transfers))
        started.update(transfers)
    return tuple(found)


def _late(
    problem: GraphProblem, schedule: GraphSchedule, outcome: GraphRun, margin: float, since: int = 0
) -> GraphSchedule | None:
    """Start buckets from `since` on as late as keeps the clocks of a run, but `margin` times their length before."""
    behind: dict[str, tuple[int, float]] = {}
    entries: list[_Entry] = []
    following = problem.end
    for number in reversed(range(len(schedule))):
        position, transfers = schedule[number]
        link = problem.link_of(transfers[0])
        start, end = outcome.starts[number]
        at, limit = behind.get(link, (problem.end, math.inf))
        seconds = end - start
        latest = max(start, min(limit - seconds, outcome.waits[number][0] - (1 + margin) * seconds))
        place = bisect.bisect_right(outcome.reached, latest) - 1
        place = max(position, min(place, at, following, problem.window(transfers)[1])) if number >= since else position
        behind[link] = place, max(start, min(latest, limit - seconds))
        following = min(following, place)
        entries.append((place, number, transfers))
    return _ordered(problem, entries)


def _delay(best: Best) -> None:
    """Start the last buckets later, as long as the step becomes no longer, or hardly."""
    schedule, outcome = best.schedule, best.outcome
    most = outcome.seconds * (1 + _EQUAL)
    first, none = 0, len(schedule)
    while first < none:
        middle = (first + none) // 2
        if best.consider(_late(best.problem, schedule, outcome, _MARGINS[0], middle), most):
            none = middle
        else:
            first = middle + 1


def _candidates(problem: GraphProblem) -> Iterator[list[Members]]:
    yield [(index,) for index in range(len(problem.transfers))]
    for multiple in _MULTIPLES:
        yield _joined(problem, multiple)
    if problem.end:
        yield _planned(problem)


def _joined(problem: GraphProblem, multiple: int) -> list[Members]:
    """Return neighbors together, in the order in which they are needed, until they take a number of latencies."""
    found: list[Members] = []
    for transfers in problem.classes:
        first = problem.transfers[transfers[0]]
        latency = problem.cost(first.group, first.kind, 0, 1)
        order = sorted(transfers, key=lambda i: (problem.transfers[i].needed, problem.transfers[i].first, i))
        found += _cut(problem, order, (1 + multiple) * latency)
    return found


def _planned(problem: GraphProblem) -> list[Members]:
    """Return buckets as the solver cuts them, group by group; transfers that it does not plan travel alone."""
    found: list[Members] = []
    for group in sorted({transfer.group for transfer in problem.transfers}):
        gating, closing = _kinds_of(problem, group)
        gathers = [i for i in gating.get("gather", ()) if problem.transfers[i].first == 0]
        gathers = [i for i in gathers if not problem.transfers[i].after]
        closing.pop("gather", None)
        free = [[i for i in closing[kind] if not problem.transfers[i].after] for kind in sorted(closing)]
        reductions = max(free, key=len, default=[])
        if gathers or reductions:
            chain, link = _chain_of(problem, gathers, reductions)
            (placement,) = Solver(steps=STEPS // 4)(Problem((chain,), link)).schedule.placements
            for bucket in placement.buckets:
                # Fences of the graph may not let it be one.
                found += _cut(problem, [int(member.name) for member in chain.members(bucket)], math.inf)
    known = {index for members in found for index in members}
    return found + [(index,) for index in range(len(problem.transfers)) if index not in known]


def _kinds_of(problem: GraphProblem, group: int) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return one group's transfers by kind: those that gate compute, and those that follow it to the end."""
    found: tuple[dict[str, list[int]], dict[str, list[int]]] = {}, {}
    for index, transfer in enumerate(problem.transfers):
        gates = transfer.needed < problem.end
        if transfer.group == group and (gates or transfer.first > 0):
            found[not gates].setdefault(transfer.kind, []).append(index)
    return found


def _cut(problem: GraphProblem, transfers: Iterable[int], most: float) -> Iterator[Members]:
    """Yield transfers as buckets, each of which grows while it may, and takes `most` seconds at most."""
    bucket: Members = ()
    for transfer in transfers:
        longer = (*bucket, transfer)
        if bucket and (problem.bucket_seconds(longer) > most or not problem.may_join(longer)):
            yield bucket
            bucket = ()
        bucket = (*bucket, transfer)
    yield bucket


def _change(best: Best) -> bool:
    """Try changes of the buckets that compute waits for, the longest wait first; return whether one was taken."""
    for number in sorted(range(len(best.schedule)), key=lambda n: (-best.outcome.waits[n][1], n)):
        if best.outcome.waits[number][1] <= 0:
            return False
        if any(best.consider(other) for other in _changes(best.problem, best.schedule, number)):
            return True
    return False


def _changes(problem: GraphProblem, schedule: GraphSchedule, number: int) -> Iterator[GraphSchedule | None]:
    """Yield schedules with one thing changed about a bucket."""
    position, transfers = schedule[number]
    every = [(at, index, bucket) for index, (at, bucket) in enumerate(schedule)]
    others = [entry for entry in every if entry[1] != number]
    first, _ = problem.window(transfers)
    if first < position:  # as soon as it can, before or after what starts there
        yield _ordered(problem, [*others, (first, -1, transfers)])
        yield _ordered(problem, [*others, (first, len(schedule), transfers)])
    link = problem.link_of(transfers[0])
    ahead = [n for n in range(number) if problem.link_of(schedule[n][1][0]) == link]
    if ahead:  # before the transfer that it queues for, which starts where this one did
        at, _, bucket = every[ahead[-1]]
        later = max(at, min(position, problem.window(bucket)[1]))
        rest = [(at, 2 * index, each) for at, index, each in every if index != ahead[-1]]
        yield _ordered(problem, [*rest, (later, 2 * number + 1, bucket)])
    same = [n for n, (_, bucket) in enumerate(schedule) if n != number and problem.may_join((*bucket, *transfers))]
    for other in [n for n in same if n < number][-1:] + [n for n in same if n > number][:1]:
        yield _merged(problem, schedule, number, other)
    for at, follower, bucket in every:  # later, so that compute does not wait for this bucket to start the other
        if any(earlier in transfers for transfer in bucket for earlier in problem.transfers[transfer].after):
            rest = [entry for entry in every if entry[1] != follower]
            for later in _LATER:
                yield _ordered(problem, [*rest, (at + later, follower, bucket)])
    if len(transfers) > 1:
        for at in (len(transfers) // 2, 1, -1):
            halves = ((max(position, problem.window(p)[0]), number, p) for p in (transfers[:at], transfers[at:]))
            yield _ordered(problem, [*others, *halves])


def _merged(problem: GraphProblem, schedule: GraphSchedule, number: int, other: int) -> GraphSchedule | None:
    """Return two buckets as one, at the position of the earlier one if it can be there."""
    pair = sorted((number, other))
    transfers = tuple(transfer for index in pair for transfer in schedule[index][1])
    at = max(schedule[pair[0]][0], problem.window(transfers)[0])
    rest = [(position, index, bucket) for index, (position, bucket) in enumerate(schedule) if index not in pair]
    return _ordered(problem, [*rest, (at, pair[0], transfers)])


# --- bound -------------------------------------------------------------------------------------------------------


def graph_bound(problem: GraphProblem) -> float:
    """Return the seconds that no schedule beats.

    Contention: as `bounds.py` shows, a step takes c W more than it would on links that take 1 - c of the seconds, next
    to undisturbed compute; W are the seconds in which a link is busy.
    """
    compute = sum(problem.seconds) + sum(transfer.packing + transfer.unpacking for transfer in problem.transfers)
    carried = max(
        (
            sum(_as_one(problem, transfers) for transfers in problem.classes if problem.link_of(transfers[0]) == link)
            for link in set(problem.links)
        ),
        default=0.0,
    )
    beside = problem.contention * carried + _pace(problem, 1 - problem.contention)
    works = [compute, carried, _pace(problem, 1.0), beside]
    for group in sorted({transfer.group for transfer in problem.transfers}) if problem.end else ():
        gating, closing = _kinds_of(problem, group)
        # Of every two kinds, one is taken to gate compute and the other to follow it.
        for pair in itertools.product(list(gating.values()) or [[]], list(closing.values()) or [[]]):
            if any(pair):
                works.append(chain_bound(*_chain_of(problem, *pair)))
    return max(works)


def _chain_of(problem: GraphProblem, gathers: list[int], reductions: list[int]) -> tuple[Chain, Link]:
    """Return one group's transfers as a chain: gathers gate compute, reductions follow it; each of one kind.

    A gather may start at once, and a reduction may end with the last item.
    """
    transfers, last = problem.transfers, problem.end - 1

    def cost(of: list[int]) -> Cost:
        first = transfers[of[0] if of else 0]
        return lambda num_bytes, num_tensors: problem.cost(first.group, first.kind, num_bytes, num_tensors)

    def chained(index: int, at: int, last: int) -> Transfer:
        one = transfers[index]
        group = repr(one.key) if one.key is not None else f"alone {one.name}"
        return Transfer(str(index), one.num_bytes, at, last, group, one.num_tensors)

    ahead = sorted(gathers, key=lambda i: (transfers[i].needed, i))
    after = sorted(reductions, key=lambda i: (transfers[i].first, i))
    chain = Chain(
        "graph",
        problem.seconds,
        (0,) * problem.end,
        tuple(chained(i, min(transfers[i].needed, last), last) for i in ahead),
        tuple(chained(i, max(transfers[i].first, 1), -1) for i in after),
    )
    return chain, Link(cost(gathers), cost(reductions), lambda _: 0.0, 2, contention=problem.contention)


def _as_one(problem: GraphProblem, transfers: list[int]) -> float:
    """Return the seconds of one launch of transfers, or of one each if that is less: costs need not be concave."""
    return min(problem.bucket_seconds(transfers), sum(problem.bucket_seconds([transfer]) for transfer in transfers))


def _pace(problem: GraphProblem, share: float) -> float:
    """Return when compute can be through, position by position, as it waits there for each link's work by then.

    Of the transfers that are needed at a position or before, take those of a link that may not start before some time.
    They are carried after that time, at best as one launch of each key. Without other transfers it is the longest path.

    Only a `share` of a transfer's seconds counts.
    """
    came = [0.0] * (problem.end + 1)  # when compute can be at a position, before it waits for anything there
    carried: dict[str, list[tuple[float, int]]] = {}  # by link, when transfers may start
    due: dict[int, list[int]] = {}
    for index, transfer in enumerate(problem.transfers):
        due.setdefault(transfer.needed, []).append(index)

    @functools.cache  # it depends on earlier positions only
    def start(index: int) -> float:
        transfer = problem.transfers[index]
        return max([came[transfer.first] + transfer.packing, *(arrival(earlier) for earlier in transfer.after)])

    def arrival(index: int) -> float:
        transfer = problem.transfers[index]
        return start(index) + share * problem.cost(transfer.group, transfer.kind, transfer.num_bytes, 1)

    for position in range(problem.end + 1):
        held = came[position]
        for index in due.get(position, ()):
            held = max(held, arrival(index) + problem.transfers[index].unpacking)
            carried.setdefault(problem.link_of(index), []).append((start(index), index))
        for link in {problem.link_of(index) for index in due.get(position, ())}:
            held = max(held, _through(problem, carried[link], share))
        if position < problem.end:
            came[position + 1] = held + problem.seconds[position]
    return max(held, _packed(problem, came, share))


def _through(problem: GraphProblem, carried: list[tuple[float, int]], share: float) -> float:
    """Return when a link can have carried all of these: the latest of any start and the work that starts after it."""
    together: dict[object, list[int]] = {}
    work: dict[object, float] = {}
    latest = 0.0
    for start, index in sorted(carried, reverse=True):
        key = problem.transfers[index].key or index
        together.setdefault(key, []).append(index)
        work[key] = share * _as_one(problem, together[key])
        latest = max(latest, start + sum(work.values()))
    return latest


def _packed(problem: GraphProblem, came: list[float], share: float) -> float:
    """Return when compute that packs its results can be through, and one link has carried what the last item makes.

    A transfer that may not start before a position is packed after it. If that is not until all else is computed, the
    link carries it then, which takes as long as it adds to all that it might travel with: costs are concave.
    Compute can be at each position at `came`.
    """
    added: dict[int, float] = {}  # by transfer, seconds that it adds to a launch of all that it may travel with
    for transfers in problem.classes:
        whole = problem.bucket_seconds(transfers)
        for index in transfers:
            rest = [other for other in transfers if other != index]
            added[index] = max(0.0, whole - problem.bucket_seconds(rest)) if rest else whole
    latest = 0.0
    for link in set(problem.links):
        packing = [0.0] * (problem.end + 1)  # of transfers that may not start before a position
        closing: dict[object, list[int]] = {}
        for index, transfer in enumerate(problem.transfers):
            if problem.link_of(index) == link and transfer.first == problem.end:
                closing.setdefault(transfer.key or index, []).append(index)
            elif problem.link_of(index) == link:
                packing[transfer.first] += min(transfer.packing, share * added[index])
        left = share * sum(_as_one(problem, transfers) for transfers in closing.values())
        for position in reversed(range(problem.end)):
            left += problem.seconds[position] + packing[position]
            latest = max(latest, came[position] + left)
    return latest
