"""Find an itinerary: the planner of `graphshard.schedule` for what it knows, changes by the clock for the rest.

    given       what the graph does: nothing that is longer is taken
    alone       every leg by itself, as soon as it can, the one that is needed first before others
    joined      neighbours of a kind and group, up to some multiples of a latency
    planned     gathers that start from inputs and reductions that end with the graph, as `Solver` plans them
    changed     the best of these, with buckets joined, cut and moved while that makes it shorter

Of all an itinerary that starts later and takes as long is taken, as what travels takes memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from graphshard.foreign.bound import problem_of
from graphshard.foreign.course import Bucket, Course, Itinerary, Outcome, run
from graphshard.schedule.budget import Budget
from graphshard.schedule.problem import Problem
from graphshard.schedule.solve import STEPS, Solver

# Latencies that the joined buckets of a candidate take, beside their own.
_MULTIPLES = (1, 4, 16, 1 << 30)
# Shares by which a schedule must be shorter to be one, and may be longer if it starts later.
_SHORTER, _EQUAL = 1e-6, 5e-3
# Times of its own length that a bucket ends before it is needed, where that costs nothing.
_MARGINS = (1.0, 0.0)
# By how many positions what follows from a bucket starts later.
_LATER = (1, 2, 4)
# Steps of the budget for an event of a run.
_EVENT = 4

# Whether an itinerary may be taken.
Fits = Callable[[Itinerary], bool]


@dataclass
class Best:
    """The shortest itinerary so far that fits."""

    course: Course
    fits: Fits
    budget: Budget
    itinerary: Itinerary
    outcome: Outcome

    def consider(self, itinerary: Itinerary | None, most: float | None = None) -> bool:
        """Take an itinerary if it is shorter, or takes `most` seconds, and fits; whether it was taken."""
        if itinerary is None or itinerary == self.itinerary or self.budget.ended:
            return False
        self.budget.spend(_EVENT * (self.course.end + 2 * len(self.course.legs)))
        outcome = run(self.course, itinerary)
        allowed = self.outcome.seconds * (1 - _SHORTER) if most is None else most
        if outcome is None or outcome.seconds > allowed or not self.fits(itinerary):
            return False
        self.itinerary, self.outcome = itinerary, outcome
        return True


def search(course: Course, start: Itinerary, fits: Fits, budget: Budget) -> Best:
    """The shortest itinerary that is found from candidates and changes; never longer than `start`."""
    outcome = run(course, start)
    assert outcome is not None, "the graph's own order is one"
    best = Best(course, fits, budget, start, outcome)
    for buckets in _candidates(course):
        asap = soon(course, buckets)
        best.consider(asap)
        if asap is not None and (ran := run(course, asap)) is not None:
            for margin in _MARGINS:
                best.consider(late(course, asap, ran, margin))
    _change(best)
    _delay(best)
    return best


def _delay(best: Best) -> None:
    """Start as many of the last buckets later as takes no longer, or hardly."""
    itinerary, outcome = best.itinerary, best.outcome
    most = outcome.seconds * (1 + _EQUAL)
    first, none = 0, len(itinerary)
    while first < none:
        middle = (first + none) // 2
        if best.consider(late(best.course, itinerary, outcome, _MARGINS[0], middle), most):
            none = middle
        else:
            first = middle + 1


def soon(course: Course, buckets: Iterable[tuple[int, ...]]) -> Itinerary | None:
    """Every bucket as soon as it can; at a position the one that is needed first goes first."""
    windows = [(*course.window(legs), legs) for legs in buckets]
    if any(first > last for first, last, _ in windows):
        return None
    return ordered(course, sorted(((first, last, legs) for first, last, legs in windows)))


def ordered(course: Course, entries: Iterable[tuple[int, int, tuple[int, ...]]]) -> Itinerary | None:
    """Entries of (position, urgency, legs), each behind what it is made of; None if no order is that."""
    left, started = sorted(entries), set[int]()
    found: list[Bucket] = []
    while left:
        ready = (n for n, entry in enumerate(left) if all(started.issuperset(course.legs[i].after) for i in entry[2]))
        place = next(ready, None)
        if place is None:
            return None
        position, _, legs = left.pop(place)
        at = max(position, found[-1][0] if found else 0)
        if at > course.window(legs)[1]:
            return None
        found.append((at, legs))
        started.update(legs)
    return tuple(found)


def late(course: Course, itinerary: Itinerary, outcome: Outcome, margin: float, since: int = 0) -> Itinerary | None:
    """Start buckets from `since` on as late as keeps the clocks of a run, but `margin` times their length before."""
    behind: dict[str, tuple[int, float]] = {}
    entries: list[tuple[int, int, tuple[int, ...]]] = []
    following = course.end
    for number in reversed(range(len(itinerary))):
        position, legs = itinerary[number]
        link = course.links[course.legs[legs[0]].wire]
        start, end = outcome.starts[number]
        at, limit = behind.get(link, (course.end, float("inf")))
        seconds = end - start
        latest = max(start, min(limit - seconds, outcome.waits[number][0] - (1 + margin) * seconds))
        place = bisect.bisect_right(outcome.reached, latest) - 1
        place = max(position, min(place, at, following, course.window(legs)[1])) if number >= since else position
        behind[link] = place, max(start, min(latest, limit - seconds))
        following = min(following, place)
        entries.append((place, number, legs))
    return ordered(course, entries)


def _candidates(course: Course) -> Iterator[list[tuple[int, ...]]]:
    """Ways to cut the legs into buckets."""
    yield [(index,) for index in range(len(course.legs))]
    for multiple in _MULTIPLES:
        yield _joined(course, multiple)
    if course.end:
        yield _planned(course)


def _classes(course: Course) -> list[list[int]]:
    """Legs that may travel together as far as their keys say, in the order in which they are needed."""
    legs = course.legs
    return [sorted(each, key=lambda i: (legs[i].needed, legs[i].first, i)) for each in course.classes]


def _joined(course: Course, multiple: int) -> list[tuple[int, ...]]:
    """Neighbours together, until they take so many latencies."""
    found: list[tuple[int, ...]] = []
    for legs in _classes(course):
        first = course.legs[legs[0]]
        latency = course.cost(first.wire, first.kind, 0, 1)
        bucket: tuple[int, ...] = ()
        for leg in legs:
            longer = (*bucket, leg)
            moving = course.bucket_seconds(longer) - latency
            if bucket and (moving > multiple * latency or not course.may_join(longer)):
                found.append(bucket)
                bucket = ()
            bucket = (*bucket, leg)
        found.append(bucket)
    return found


def _planned(course: Course) -> list[tuple[int, ...]]:
    """Buckets as the planner cuts them, group by group; what it does not know travels alone."""
    found: list[tuple[int, ...]] = []
    for wire in sorted({leg.wire for leg in course.legs}):
        of_wire = [i for i, leg in enumerate(course.legs) if leg.wire == wire]
        free = [i for i in of_wire if not course.legs[i].after]
        gathers = [i for i in free if course.legs[i].kind == "gather" and course.legs[i].first == 0]
        gathers = [i for i in gathers if course.legs[i].needed < course.end]
        closing = [i for i in free if course.legs[i].needed == course.end and course.legs[i].first > 0]
        kinds = [course.legs[i].kind for i in closing]
        kind = max(sorted(set(kinds)), key=kinds.count, default="")
        reductions = [i for i in closing if course.legs[i].kind == kind and kind != "gather"]
        if gathers or reductions:
            chain, link = problem_of(course, wire, gathers, reductions)
            (placement,) = Solver(steps=STEPS // 4)(Problem((chain,), link)).schedule.placements
            for bucket in placement.buckets:
                members = chain.transfers(bucket.kind)[bucket.first : bucket.end]
                found += _allowed(course, [int(member.name) for member in members])
    known = {leg for legs in found for leg in legs}
    return found + [(index,) for index in range(len(course.legs)) if index not in known]


def _allowed(course: Course, legs: list[int]) -> Iterator[tuple[int, ...]]:
    """A bucket, cut where fences of the graph do not let it be one."""
    bucket: tuple[int, ...] = ()
    for leg in legs:
        if bucket and not course.may_join((*bucket, leg)):
            yield bucket
            bucket = ()
        bucket = (*bucket, leg)
    yield bucket


def _change(best: Best) -> None:
    """Try changes of the buckets that compute waits for, until none makes it shorter or the budget ends."""
    changed = True
    while changed and not best.budget.ended:
        changed = False
        held = sorted(range(len(best.itinerary)), key=lambda n: (-best.outcome.waits[n][1], n))
        for number in held:
            if best.outcome.waits[number][1] <= 0:
                break
            if any(best.consider(other) for other in _changes(best.course, best.itinerary, number)):
                changed = True
                break


def _changes(course: Course, itinerary: Itinerary, number: int) -> Iterator[Itinerary | None]:
    """Itineraries with one thing changed about a bucket."""
    position, legs = itinerary[number]
    others = [(at, index, bucket) for index, (at, bucket) in enumerate(itinerary) if index != number]
    first, _ = course.window(legs)
    if first < position:  # as soon as it can, before or behind what starts there
        yield ordered(course, [*others, (first, -1, legs)])
        yield ordered(course, [*others, (first, len(itinerary), legs)])
    wire = course.links[course.legs[legs[0]].wire]
    ahead = [n for n in range(number) if course.links[course.legs[itinerary[n][1][0]].wire] == wire]
    if ahead:  # before what it queues behind
        yield _swapped(course, itinerary, ahead[-1], number)
    same = [n for n, (_, bucket) in enumerate(itinerary) if _same(course, bucket, legs) and n != number]
    near = [n for n in same if n < number][-1:] + [n for n in same if n > number][:1]
    for other in near:
        yield _merged(course, itinerary, number, other)
    yield from _followed_later(course, itinerary, number)
    if len(legs) > 1:
        half = len(legs) // 2
        for one, two in ((legs[:half], legs[half:]), (legs[:1], legs[1:]), (legs[:-1], legs[-1:])):
            yield ordered(course, [*others, *((max(position, course.window(p)[0]), number, p) for p in (one, two))])


def _followed_later(course: Course, itinerary: Itinerary, number: int) -> Iterator[Itinerary | None]:
    """What follows from a bucket some positions later, so that compute does not wait for the bucket to start that."""
    legs = itinerary[number][1]
    for follower, (position, bucket) in enumerate(itinerary):
        if any(earlier in legs for leg in bucket for earlier in course.legs[leg].after):
            others = [(at, index, each) for index, (at, each) in enumerate(itinerary) if index != follower]
            for later in _LATER:
                yield ordered(course, [*others, (position + later, follower, bucket)])


def _same(course: Course, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    key = course.legs[one[0]].key
    return key is not None and key == course.legs[other[0]].key


def _swapped(course: Course, itinerary: Itinerary, one: int, other: int) -> Itinerary | None:
    """The second of two buckets behind what is before the first; the first starts where the second did."""
    entries: list[tuple[int, int, tuple[int, ...]]] = []
    for number, (position, legs) in enumerate(itinerary):
        if number == one:
            later = max(position, min(itinerary[other][0], course.window(legs)[1]))
            entries.append((later, 2 * other + 1, legs))
        else:
            entries.append((position, 2 * number, legs))
    return ordered(course, entries)


def _merged(course: Course, itinerary: Itinerary, number: int, other: int) -> Itinerary | None:
    """Two buckets as one, at the position of the earlier one if it can be there."""
    pair = sorted((number, other))
    legs = tuple(leg for index in pair for leg in itinerary[index][1])
    if not course.may_join(legs):
        return None
    at = max(itinerary[pair[0]][0], course.window(legs)[0])
    rest = [(position, index, bucket) for index, (position, bucket) in enumerate(itinerary) if index not in pair]
    return ordered(course, [*rest, (at, pair[0], legs)])


def frugal(course: Course, grows: Callable[[int], bool]) -> Itinerary | None:
    """Every leg by itself: at the last moment if it leaves more alive than it takes, else at the first."""
    entries: list[Bucket] = []
    for index, leg in enumerate(course.legs):
        entries.append((leg.last if grows(index) else leg.first, (index,)))
    return ordered(course, [(at, legs[0], legs) for at, legs in entries])
