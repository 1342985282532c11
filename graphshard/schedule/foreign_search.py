"""Search for the shortest itinerary of an external graph, and seconds that none beats.

Candidates are ways to cut legs into buckets:

    given       the graph's own order: nothing that is longer is taken
    alone       every leg by itself, as soon as it can, the one that is needed first before others
    joined      neighbors of a kind and group, up to some multiples of a latency
    planned     gathers that start from inputs and reductions that end with the graph, as `Solver` plans them

The best of them is changed, with buckets joined, cut and moved, while that makes it shorter. Of all an itinerary that
starts later and takes as long is taken, as what travels takes memory.

The bound is the largest of compute, the work of each link, the pace of links (when each can have carried what is needed
at a position), and the bound of each group's gathers and reductions by themselves (`bounds.py`).
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from graphshard.schedule.bounds import chain_bound
from graphshard.schedule.foreign_graph import Bucket, Course, Itinerary, ItineraryRun, Leg, run
from graphshard.schedule.problem import Budget, Chain, Cost, Link, Problem, Transfer
from graphshard.schedule.solver import STEPS, Solver

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

# Returns whether an itinerary may be taken.
Fits = Callable[[Itinerary], bool]
Legs = tuple[int, ...]
# Position, urgency at that position, and legs.
_Entry = tuple[int, int, Legs]


@dataclass
class Best:
    """The shortest itinerary so far that fits."""

    course: Course
    fits: Fits
    budget: Budget
    itinerary: Itinerary
    outcome: ItineraryRun

    def consider(self, itinerary: Itinerary | None, most: float | None = None) -> bool:
        """Take an itinerary if it is shorter, or takes `most` seconds, and fits; return whether it was taken."""
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
    """Return the shortest itinerary found from candidates and changes; never longer than `start`."""
    outcome = run(course, start)
    assert outcome is not None, "the graph's own order is one"
    best = Best(course, fits, budget, start, outcome)
    for buckets in _candidates(course):
        asap = soon(course, buckets)
        best.consider(asap)
        if asap is not None and (ran := run(course, asap)) is not None:
            for margin in _MARGINS:
                best.consider(_late(course, asap, ran, margin))
    while not budget.ended and _change(best):
        pass
    _delay(best)
    return best


def soon(course: Course, buckets: Iterable[Legs]) -> Itinerary | None:
    """Return every bucket as soon as it can start; at a position the one that is needed first goes first."""
    windows = [(*course.window(legs), legs) for legs in buckets]
    if any(first > last for first, last, _ in windows):
        return None
    return _ordered(course, windows)


def frugal(course: Course, grows: Callable[[int], bool]) -> Itinerary | None:
    """Return every leg by itself: at the last moment if it leaves more alive than it takes, else at the first."""
    starts = (leg.last if grows(index) else leg.first for index, leg in enumerate(course.legs))
    return _ordered(course, [(at, index, (index,)) for index, at in enumerate(starts)])


def _ordered(course: Course, entries: Iterable[_Entry]) -> Itinerary | None:
    """Return the buckets by position and urgency, each after its predecessors; None if there is no such order."""
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


def _late(
    course: Course, itinerary: Itinerary, outcome: ItineraryRun, margin: float, since: int = 0
) -> Itinerary | None:
    """Start buckets from `since` on as late as keeps the clocks of a run, but `margin` times their length before."""
    behind: dict[str, tuple[int, float]] = {}
    entries: list[_Entry] = []
    following = course.end
    for number in reversed(range(len(itinerary))):
        position, legs = itinerary[number]
        link = course.link_of(legs[0])
        start, end = outcome.starts[number]
        at, limit = behind.get(link, (course.end, math.inf))
        seconds = end - start
        latest = max(start, min(limit - seconds, outcome.waits[number][0] - (1 + margin) * seconds))
        place = bisect.bisect_right(outcome.reached, latest) - 1
        place = max(position, min(place, at, following, course.window(legs)[1])) if number >= since else position
        behind[link] = place, max(start, min(latest, limit - seconds))
        following = min(following, place)
        entries.append((place, number, legs))
    return _ordered(course, entries)


def _delay(best: Best) -> None:
    """Start the last buckets later, as long as the step becomes no longer, or hardly."""
    itinerary, outcome = best.itinerary, best.outcome
    most = outcome.seconds * (1 + _EQUAL)
    first, none = 0, len(itinerary)
    while first < none:
        middle = (first + none) // 2
        if best.consider(_late(best.course, itinerary, outcome, _MARGINS[0], middle), most):
            none = middle
        else:
            first = middle + 1


def _candidates(course: Course) -> Iterator[list[Legs]]:
    """Yield ways to cut the legs into buckets."""
    yield [(index,) for index in range(len(course.legs))]
    for multiple in _MULTIPLES:
        yield _joined(course, multiple)
    if course.end:
        yield _planned(course)


def _joined(course: Course, multiple: int) -> list[Legs]:
    """Return neighbors together, in the order in which they are needed, until they take a number of latencies."""
    found: list[Legs] = []
    for legs in course.classes:
        first = course.legs[legs[0]]
        latency = course.cost(first.wire, first.kind, 0, 1)
        order = sorted(legs, key=lambda i: (course.legs[i].needed, course.legs[i].first, i))
        found += _cut(course, order, (1 + multiple) * latency)
    return found


def _planned(course: Course) -> list[Legs]:
    """Return buckets as the solver cuts them, group by group; legs that are not part of its problem travel alone."""
    found: list[Legs] = []
    for wire in sorted({leg.wire for leg in course.legs}):
        free = [i for i, leg in enumerate(course.legs) if leg.wire == wire and not leg.after]
        gathers = [i for i in free if course.legs[i].kind == "gather" and course.legs[i].first == 0]
        gathers = [i for i in gathers if course.legs[i].needed < course.end]
        closing = [i for i in free if course.legs[i].needed == course.end and course.legs[i].first > 0]
        kinds = [course.legs[i].kind for i in closing]
        kind = max(sorted(set(kinds)), key=kinds.count, default="")
        reductions = [i for i in closing if course.legs[i].kind == kind and kind != "gather"]
        if gathers or reductions:
            chain, link = _problem_of(course, wire, gathers, reductions)
            (placement,) = Solver(steps=STEPS // 4)(Problem((chain,), link)).schedule.placements
            for bucket in placement.buckets:
                # Fences of the graph may not let it be one.
                found += _cut(course, [int(member.name) for member in chain.members(bucket)], math.inf)
    known = {leg for legs in found for leg in legs}
    return found + [(index,) for index in range(len(course.legs)) if index not in known]


def _cut(course: Course, legs: Iterable[int], most: float) -> Iterator[Legs]:
    """Yield legs as buckets, each of which grows while it may, and takes `most` seconds at most."""
    bucket: Legs = ()
    for leg in legs:
        longer = (*bucket, leg)
        if bucket and (course.bucket_seconds(longer) > most or not course.may_join(longer)):
            yield bucket
            bucket = ()
        bucket = (*bucket, leg)
    yield bucket


def _change(best: Best) -> bool:
    """Try changes of the buckets that compute waits for, the longest wait first; return whether one was taken."""
    for number in sorted(range(len(best.itinerary)), key=lambda n: (-best.outcome.waits[n][1], n)):
        if best.outcome.waits[number][1] <= 0:
            return False
        if any(best.consider(other) for other in _changes(best.course, best.itinerary, number)):
            return True
    return False


def _changes(course: Course, itinerary: Itinerary, number: int) -> Iterator[Itinerary | None]:
    """Yield itineraries with one thing changed about a bucket."""
    position, legs = itinerary[number]
    every = [(at, index, bucket) for index, (at, bucket) in enumerate(itinerary)]
    others = [entry for entry in every if entry[1] != number]
    first, _ = course.window(legs)
    if first < position:  # as soon as it can, before or after what starts there
        yield _ordered(course, [*others, (first, -1, legs)])
        yield _ordered(course, [*others, (first, len(itinerary), legs)])
    link = course.link_of(legs[0])
    ahead = [n for n in range(number) if course.link_of(itinerary[n][1][0]) == link]
    if ahead:  # before the leg that it queues for, which starts where this one did
        at, _, bucket = every[ahead[-1]]
        later = max(at, min(position, course.window(bucket)[1]))
        rest = [(at, 2 * index, each) for at, index, each in every if index != ahead[-1]]
        yield _ordered(course, [*rest, (later, 2 * number + 1, bucket)])
    same = [n for n, (_, bucket) in enumerate(itinerary) if n != number and course.may_join((*bucket, *legs))]
    for other in [n for n in same if n < number][-1:] + [n for n in same if n > number][:1]:
        yield _merged(course, itinerary, number, other)
    for at, follower, bucket in every:  # later, so that compute does not wait for this bucket to start the other
        if any(earlier in legs for leg in bucket for earlier in course.legs[leg].after):
            rest = [entry for entry in every if entry[1] != follower]
            for later in _LATER:
                yield _ordered(course, [*rest, (at + later, follower, bucket)])
    if len(legs) > 1:
        half = len(legs) // 2
        for halves in ((legs[:half], legs[half:]), (legs[:1], legs[1:]), (legs[:-1], legs[-1:])):
            yield _ordered(course, [*others, *((max(position, course.window(p)[0]), number, p) for p in halves)])


def _merged(course: Course, itinerary: Itinerary, number: int, other: int) -> Itinerary | None:
    """Return two buckets as one, at the position of the earlier one if it can be there."""
    pair = sorted((number, other))
    legs = tuple(leg for index in pair for leg in itinerary[index][1])
    at = max(itinerary[pair[0]][0], course.window(legs)[0])
    rest = [(position, index, bucket) for index, (position, bucket) in enumerate(itinerary) if index not in pair]
    return _ordered(course, [*rest, (at, pair[0], legs)])


# --- bound -------------------------------------------------------------------------------------------------------


def course_bound(course: Course) -> float:
    """Return the seconds that no itinerary beats.

    Contention: as `bounds.py` shows, a step takes c W more than it would on links that take 1 - c of the seconds, next
    to undisturbed compute; W are the seconds in which a link is busy.
    """
    compute = sum(course.seconds) + sum(leg.packing + leg.unpacking for leg in course.legs)
    carried = max(
        (
            sum(_as_one(course, legs) for legs in course.classes if course.link_of(legs[0]) == link)
            for link in set(course.links)
        ),
        default=0.0,
    )
    beside = course.contention * carried + _pace(course, 1 - course.contention)
    works = [compute, carried, _pace(course, 1.0), beside]
    for wire in sorted({leg.wire for leg in course.legs}) if course.end else ():
        for gathers, reductions in _pairs(course, wire):
            works.append(chain_bound(*_problem_of(course, wire, gathers, reductions)))
    return max(works)


def _problem_of(course: Course, wire: int, gathers: list[int], reductions: list[int]) -> tuple[Chain, Link]:
    """Return one group's legs as a chain: gathers gate compute, reductions follow it; each of one kind.

    A gather may start at once, and a reduction may end with the last item.
    """
    legs = course.legs

    def cost(of: list[int]) -> Cost:
        kind = legs[of[0]].kind if of else "gather"
        return lambda num_bytes, num_tensors: course.cost(wire, kind, num_bytes, num_tensors)

    def transfer(index: int, at: int, last: int) -> Transfer:
        leg: Leg = legs[index]
        group = repr(leg.key) if leg.key is not None else f"alone {leg.name}"
        return Transfer(str(index), leg.num_bytes, at, last, group, leg.num_tensors)

    last = course.end - 1
    ahead = sorted(gathers, key=lambda i: (legs[i].needed, i))
    after = sorted(reductions, key=lambda i: (legs[i].first, i))
    chain = Chain(
        "graph",
        course.seconds,
        (0,) * course.end,
        tuple(transfer(i, min(legs[i].needed, last), last) for i in ahead),
        tuple(transfer(i, max(legs[i].first, 1), -1) for i in after),
    )
    return chain, Link(cost(gathers), cost(reductions), lambda _: 0.0, 2, contention=course.contention)


def _pairs(course: Course, wire: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield every two kinds of a group, one taken to gate compute and the other to follow it; each leg one of both."""
    of_wire = [i for i, leg in enumerate(course.legs) if leg.wire == wire]
    gating = [i for i in of_wire if course.legs[i].needed < course.end]
    closing = [i for i in of_wire if course.legs[i].needed == course.end and course.legs[i].first > 0]
    for kind in sorted({course.legs[i].kind for i in gating}) or [""]:
        for other in sorted({course.legs[i].kind for i in closing}) or [""]:
            gathers = [i for i in gating if course.legs[i].kind == kind]
            reductions = [i for i in closing if course.legs[i].kind == other]
            if gathers or reductions:
                yield gathers, reductions


def _as_one(course: Course, legs: list[int]) -> float:
    """Return legs of one key as one launch, or apart if that is shorter: costs need not be concave in the tensors."""
    return min(course.bucket_seconds(legs), sum(course.bucket_seconds([leg]) for leg in legs))


def _pace(course: Course, share: float) -> float:
    """Return when compute can be through, position by position, as it waits there for each link's work by then.

    Of the legs that are needed at a position or before, take those of a link that may not start before some time.
    They are carried after that time, at best as one launch of each key. Without other legs it is the longest path.

    Args:
        share: of a leg's seconds that count.
    """
    came = [0.0] * (course.end + 1)  # when compute can be at a position, before it waits for anything there
    carried: dict[str, list[tuple[float, int]]] = {}  # by link, when legs may start
    due: dict[int, list[int]] = {}
    for index, leg in enumerate(course.legs):
        due.setdefault(leg.needed, []).append(index)

    @functools.cache  # it depends on earlier positions only
    def start(index: int) -> float:
        leg = course.legs[index]
        return max([came[leg.first] + leg.packing, *(arrival(earlier) for earlier in leg.after)])

    def arrival(index: int) -> float:
        leg = course.legs[index]
        return start(index) + share * course.cost(leg.wire, leg.kind, leg.num_bytes, 1)

    for position in range(course.end + 1):
        held = came[position]
        for index in due.get(position, ()):
            held = max(held, arrival(index) + course.legs[index].unpacking)
            carried.setdefault(course.link_of(index), []).append((start(index), index))
        for link in {course.link_of(index) for index in due.get(position, ())}:
            held = max(held, _through(course, carried[link], share))
        if position < course.end:
            came[position + 1] = held + course.seconds[position]
    return max(held, _packed(course, came, share))


def _through(course: Course, carried: list[tuple[float, int]], share: float) -> float:
    """Return when a link can have carried all of these: the latest of any start and the work that starts after it."""
    together: dict[object, list[int]] = {}
    work: dict[object, float] = {}
    latest = 0.0
    for start, index in sorted(carried, reverse=True):
        key = course.legs[index].key or index
        together.setdefault(key, []).append(index)
        work[key] = share * _as_one(course, together[key])
        latest = max(latest, start + sum(work.values()))
    return latest


def _packed(course: Course, came: list[float], share: float) -> float:
    """Return when compute can be through that packs its results, and one link has carried the legs of the last item.

    A leg that may not start before a position is packed after it. If that is not until all else is computed, the link
    carries it then, which takes as long as it adds to all that it might travel with: costs are concave.

    Args:
        came: when compute can be at each position.
        share: of a leg's seconds that count.
    """
    added: dict[int, float] = {}  # by leg, seconds that it adds to a launch of all that it may travel with
    for legs in course.classes:
        whole = course.bucket_seconds(legs)
        for index in legs:
            rest = [other for other in legs if other != index]
            added[index] = max(0.0, whole - course.bucket_seconds(rest)) if rest else whole
    latest = 0.0
    for link in set(course.links):
        packing = [0.0] * (course.end + 1)  # of legs that may not start before a position
        closing: dict[object, list[int]] = {}
        for index, leg in enumerate(course.legs):
            if course.link_of(index) == link and leg.first == course.end:
                closing.setdefault(leg.key or index, []).append(index)
            elif course.link_of(index) == link:
                packing[leg.first] += min(leg.packing, share * added[index])
        left = share * sum(_as_one(course, legs) for legs in closing.values())
        for position in reversed(range(course.end)):
            left += course.seconds[position] + packing[position]
            latest = max(latest, came[position] + left)
    return latest
