"""Exhaustive search over small problems: no schedule beats the bound, and the best one is found."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.schedule.foreign_graph import Course, Itinerary, Leg, run
from graphshard.schedule.foreign_search import course_bound, search, soon
from graphshard.schedule.problem import Budget

LINKS = ("network", "network", "node")


def _cost(wire: int, kind: str, num_bytes: int, num_tensors: int) -> float:
    return 0.5 + 0.25 * num_tensors + num_bytes


def _leg(number: int, first: int, needed: int, num_bytes: int, **more: object) -> Leg:
    given = {
        "name": str(number),
        "wire": 0,
        "kind": "gather",
        "key": None,
        "num_bytes": num_bytes,
        "num_tensors": 1,
        "first": first,
        "last": needed,
        "needed": needed,
        "not_before": first,
        "after": (),
        "packing": 0.0,
        "unpacking": 0.0,
        "start": first,
        "waited": needed,
    }
    return Leg(**{**given, **more})


@st.composite
def _courses(draw: st.DrawFn) -> Course:
    items = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    legs: list[Leg] = []
    for number in range(draw(st.integers(1, 4))):
        before = draw(st.sampled_from([None, *range(number)]))
        least = 0 if before is None else legs[before].first
        first = draw(st.integers(least, len(items)))
        wire, kind = draw(st.integers(0, 2)), draw(st.sampled_from(("gather", "reduce")))
        legs.append(
            _leg(
                number,
                first,
                draw(st.integers(first, len(items))),
                draw(st.integers(0, 4)),
                wire=wire,
                kind=kind,
                key=draw(st.sampled_from((None, (wire, kind)))),
                after=() if before is None else (before,),
                packing=draw(st.sampled_from((0.0, 0.5))),
                unpacking=draw(st.sampled_from((0.0, 0.5))),
            )
        )
    return Course(tuple(map(float, items)), tuple(legs), LINKS, _cost, draw(st.sampled_from((0.0, 0.3))))


def _partitions(legs: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    if not legs:
        yield []
        return
    first, rest = legs[0], legs[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = tuple(leg for leg in rest if leg not in others)
            for partition in _partitions(left):
                yield [(first, *others), *partition]


def _itineraries(course: Course) -> Iterator[Itinerary]:
    for buckets in _partitions(tuple(range(len(course.legs)))):
        if all(map(course.may_join, buckets)):
            for order in itertools.permutations(buckets):
                windows = [course.window(legs) for legs in order]
                for places in itertools.product(*(range(first, last + 1) for first, last in windows)):
                    if list(places) == sorted(places):
                        yield tuple(zip(places, order, strict=True))


def _best(course: Course) -> float:
    found = (outcome.seconds for one in _itineraries(course) if (outcome := run(course, one)) is not None)
    return min(found, default=float("inf"))


@settings(max_examples=150, deadline=None)
@given(_courses())
def test_no_schedule_beats_the_bound(course: Course) -> None:
    assert course_bound(course) <= _best(course) * (1 + 1e-9)


def test_a_link_busy_before_a_deadline() -> None:
    """Three messages and the following compute are longer than the critical path and than the link's total."""
    legs = [_leg(number, 0, 1, 3) for number in range(3)]
    course = Course((1.0, 9.0), tuple(legs), ("network",), _cost, 0.0)
    assert course_bound(course) == _best(course) == pytest.approx(3 * 3.75 + 9)


def test_a_link_busy_after_a_release() -> None:
    legs = [_leg(number, 1, 2, 3, kind="reduce") for number in range(3)]
    course = Course((5.0, 1.0), tuple(legs), ("network",), _cost, 0.0)
    assert course_bound(course) == _best(course) == pytest.approx(5 + 3 * 3.75)


def test_messages_of_no_bytes() -> None:
    legs = [_leg(number, 1, 1, number, kind="reduce") for number in range(2)]
    course = Course((1.0,), tuple(legs), ("network",), _cost, 0.0)
    assert course_bound(course) == pytest.approx(_best(course))


def test_dependent_messages_start_after_arrival() -> None:
    """Compute waits for the first to start the second: not before the last item, which overlaps the first."""
    legs = [_leg(0, 0, 2, 2), _leg(1, 1, 2, 0, wire=2, after=(0,)), _leg(2, 2, 2, 2)]
    course = Course((2.0, 2.0), tuple(legs), LINKS, _cost, 0.0)
    start = soon(course, [(0,), (1,), (2,)])
    assert start is not None
    assert search(course, start, lambda _: True, Budget(100_000)).outcome.seconds == _best(course) == 4 + 2.75


def test_packing_takes_compute_before_the_last_message_starts() -> None:
    first, last = _leg(0, 1, 2, 1, kind="reduce", packing=0.5), _leg(1, 2, 2, 3, kind="reduce")
    course = Course((2.0, 2.0), (first, last), ("network",), _cost, 0.0)
    assert course_bound(course) == _best(course) == pytest.approx(4 + 0.5 + 3.75)
