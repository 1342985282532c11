"""Seconds that no itinerary of a course beats."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from graphshard.foreign.course import Course, Leg
from graphshard.schedule.bounds import chain_bound
from graphshard.schedule.problem import Chain, Link, Transfer


def lower_bound(course: Course) -> float:
    """The largest of: compute, the pace of links, and what each group's gathers and reductions take by themselves.

    Contention: as `schedule/bounds.py` shows, a step takes c W more than it would on links that take 1 - c of the
    seconds, beside undisturbed compute; W are the seconds in which a link is busy.
    """
    compute = sum(course.seconds) + sum(leg.packing + leg.unpacking for leg in course.legs)
    carried = max(_link_work(course), default=0.0)
    beside = course.contention * carried + _pace(course, 1 - course.contention)
    works = [compute, carried, _pace(course, 1.0), beside]
    for wire in sorted({leg.wire for leg in course.legs}) if course.end else ():
        for gathers, reductions in _pairs(course, wire):
            works.append(chain_bound(*problem_of(course, wire, gathers, reductions)))
    return max(works)


def problem_of(course: Course, wire: int, gathers: list[int], reductions: list[int]) -> tuple[Chain, Link]:
    """One group's legs as a problem of `graphshard.schedule`: gathers gate compute, reductions follow it.

    A gather may start at once, and a reduction may end with the last item. All must be of one kind each.
    """
    legs = course.legs

    def cost(of: list[int]) -> Callable[[int, int], float]:
        kind = legs[of[0]].kind if of else "gather"
        return lambda num_bytes, num_tensors: course.cost(wire, kind, num_bytes, num_tensors)

    def group(leg: Leg) -> str:
        return repr(leg.key) if leg.key is not None else f"alone {leg.name}"

    base = (0,) * course.end
    last = course.end - 1
    ahead = sorted(gathers, key=lambda i: (legs[i].needed, i))
    behind = sorted(reductions, key=lambda i: (legs[i].first, i))
    chain = Chain(
        "graph",
        course.seconds,
        base,
        tuple(
            Transfer(str(i), legs[i].num_bytes, min(legs[i].needed, last), last, group(legs[i]), legs[i].num_tensors)
            for i in ahead
        ),
        tuple(
            Transfer(str(i), legs[i].num_bytes, max(legs[i].first, 1), -1, group(legs[i]), legs[i].num_tensors)
            for i in behind
        ),
    )
    return chain, Link(cost(gathers), cost(reductions), lambda _: 0.0, 2, contention=course.contention)


def _pairs(course: Course, wire: int) -> Iterator[tuple[list[int], list[int]]]:
    """Every two kinds of a group, one taken to gate compute and the other to follow it; each leg one of the two."""
    of_wire = [i for i, leg in enumerate(course.legs) if leg.wire == wire]
    gating = [i for i in of_wire if course.legs[i].needed < course.end]
    closing = [i for i in of_wire if course.legs[i].needed == course.end and course.legs[i].first > 0]
    gates = sorted({course.legs[i].kind for i in gating})
    closes = sorted({course.legs[i].kind for i in closing})
    for kind in gates or [""]:
        for other in closes or [""]:
            pair = (
                [i for i in gating if course.legs[i].kind == kind],
                [i for i in closing if course.legs[i].kind == other],
            )
            if any(pair):
                yield pair


def _link_work(course: Course) -> Iterator[float]:
    """What each link carries at the least: all that may travel together as one launch."""
    for link in sorted(set(course.links)):
        carried = (legs for legs in course.classes if course.links[course.legs[legs[0]].wire] == link)
        yield sum(_as_one(course, legs) for legs in carried)


def _as_one(course: Course, legs: list[int]) -> float:
    """Legs of one key as one launch, or apart if that is shorter: costs need not be concave in the tensors."""
    return min(course.bucket_seconds(legs), sum(course.bucket_seconds([leg]) for leg in legs))


def _pace(course: Course, share: float) -> float:
    """When compute can be through, position by position: it waits there for what each link has had to carry by then.

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

    @functools.cache  # what it depends on lies behind compute
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
            carried.setdefault(course.links[course.legs[index].wire], []).append((start(index), index))
        for link in {course.links[course.legs[index].wire] for index in due.get(position, ())}:
            held = max(held, _through(course, carried[link], share))
        if position < course.end:
            came[position + 1] = held + course.seconds[position]
    return max(held, _packed(course, came, share))


def _packed(course: Course, came: list[float], share: float) -> float:
    """When compute can be through that packs what it makes, and one link has then carried what the last item made.

    A leg that may not start before a position is packed behind it. If that is not until all else is computed, the link
    carries it then, which takes as long as it adds to all that it might travel with: costs are concave.

    Args:
        came: when compute can be at each position.
        share: of a leg's seconds that count.
    """
    latest, added = 0.0, _added(course)
    for link in set(course.links):
        packing = [0.0] * (course.end + 1)  # of legs that may not start before a position
        closing: dict[object, list[int]] = {}
        for index, leg in enumerate(course.legs):
            if course.links[leg.wire] == link and leg.first == course.end:
                closing.setdefault(leg.key or index, []).append(index)
            elif course.links[leg.wire] == link:
                packing[leg.first] += min(leg.packing, share * added[index])
        left = share * sum(_as_one(course, legs) for legs in closing.values())
        for position in reversed(range(course.end)):
            left += course.seconds[position] + packing[position]
            latest = max(latest, came[position] + left)
    return latest


def _added(course: Course) -> dict[int, float]:
    """By leg, seconds that it adds to a launch of all that it may travel with."""
    found = {}
    for legs in course.classes:
        whole = course.bucket_seconds(legs)
        for index in legs:
            rest = [other for other in legs if other != index]
            found[index] = max(0.0, whole - course.bucket_seconds(rest)) if rest else whole
    return found


def _through(course: Course, carried: list[tuple[float, int]], share: float) -> float:
    """When a link can have carried all of these: the latest of any start, with what may not start before it."""
    together: dict[object, list[int]] = {}
    work: dict[object, float] = {}
    latest = 0.0
    for start, index in sorted(carried, reverse=True):
        key = course.legs[index].key or index
        together.setdefault(key, []).append(index)
        work[key] = share * _as_one(course, together[key])
        latest = max(latest, start + sum(work.values()))
    return latest
