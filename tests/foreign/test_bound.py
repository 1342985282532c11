"""Exhaustive search over small problems: no schedule beats the bound, and the best one is found."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.schedule._graph_problem import GraphProblem, GraphSchedule, GraphTransfer, run
from graphshard.schedule._graph_search import Best, graph_bound, search, soon
from graphshard.schedule.problem import Budget

LINKS = ("network", "network", "node")


def _cost(group: int, kind: str, num_bytes: int, num_tensors: int) -> float:
    return 0.5 + 0.25 * num_tensors + num_bytes


def _transfer(number: int, first: int, needed: int, num_bytes: int, **more: object) -> GraphTransfer:
    given = {
        "name": str(number),
        "group": 0,
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
    return GraphTransfer(**{**given, **more})


@st.composite
def _problems(draw: st.DrawFn) -> GraphProblem:
    items = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    transfers: list[GraphTransfer] = []
    for number in range(draw(st.integers(1, 4))):
        before = draw(st.sampled_from([None, *range(number)]))
        least = 0 if before is None else transfers[before].first
        first = draw(st.integers(least, len(items)))
        group, kind = draw(st.integers(0, 2)), draw(st.sampled_from(("gather", "reduce")))
        transfers.append(
            _transfer(
                number,
                first,
                draw(st.integers(first, len(items))),
                draw(st.integers(0, 4)),
                group=group,
                kind=kind,
                key=draw(st.sampled_from((None, (group, kind)))),
                after=() if before is None else (before,),
                packing=draw(st.sampled_from((0.0, 0.5))),
                unpacking=draw(st.sampled_from((0.0, 0.5))),
            )
        )
    return GraphProblem(tuple(map(float, items)), tuple(transfers), LINKS, _cost, draw(st.sampled_from((0.0, 0.3))))


def _partitions(transfers: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    if not transfers:
        yield []
        return
    first, rest = transfers[0], transfers[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = tuple(transfer for transfer in rest if transfer not in others)
            for partition in _partitions(left):
                yield [(first, *others), *partition]


def _schedules(problem: GraphProblem) -> Iterator[GraphSchedule]:
    for buckets in _partitions(tuple(range(len(problem.transfers)))):
        if all(map(problem.may_join, buckets)):
            for order in itertools.permutations(buckets):
                windows = [problem.window(transfers) for transfers in order]
                for places in itertools.product(*(range(first, last + 1) for first, last in windows)):
                    if list(places) == sorted(places):
                        yield tuple(zip(places, order, strict=True))


def _best(problem: GraphProblem) -> float:
    found = (outcome.seconds for one in _schedules(problem) if (outcome := run(problem, one)) is not None)
    return min(found, default=float("inf"))


@settings(max_examples=150, deadline=None)
@given(_problems())
def test_no_schedule_beats_the_bound(problem: GraphProblem) -> None:
    assert graph_bound(problem) <= _best(problem) * (1 + 1e-9)


def test_a_link_busy_before_a_deadline() -> None:
    """Three messages and the following compute are longer than the critical path and than the link's total."""
    transfers = [_transfer(number, 0, 1, 3) for number in range(3)]
    problem = GraphProblem((1.0, 9.0), tuple(transfers), ("network",), _cost, 0.0)
    assert graph_bound(problem) == _best(problem) == pytest.approx(3 * 3.75 + 9)


def test_a_link_busy_after_a_release() -> None:
    transfers = [_transfer(number, 1, 2, 3, kind="reduce") for number in range(3)]
    problem = GraphProblem((5.0, 1.0), tuple(transfers), ("network",), _cost, 0.0)
    assert graph_bound(problem) == _best(problem) == pytest.approx(5 + 3 * 3.75)


def test_messages_of_no_bytes() -> None:
    transfers = [_transfer(number, 1, 1, number, kind="reduce") for number in range(2)]
    problem = GraphProblem((1.0,), tuple(transfers), ("network",), _cost, 0.0)
    assert graph_bound(problem) == pytest.approx(_best(problem))


def test_dependent_messages_start_after_arrival() -> None:
    """Compute waits for the first to start the second: not before the last item, which overlaps the first."""
    transfers = [_transfer(0, 0, 2, 2), _transfer(1, 1, 2, 0, group=2, after=(0,)), _transfer(2, 2, 2, 2)]
    problem = GraphProblem((2.0, 2.0), tuple(transfers), LINKS, _cost, 0.0)
    start = soon(problem, [(0,), (1,), (2,)])
    assert start is not None
    outcome = run(problem, start)
    assert outcome is not None
    best = Best(problem, lambda *_: True, Budget(100_000), start, outcome)
    search(best)
    assert best.outcome.seconds == _best(problem) == 4 + 2.75


def test_packing_takes_compute_before_the_last_message_starts() -> None:
    first, last = _transfer(0, 1, 2, 1, kind="reduce", packing=0.5), _transfer(1, 2, 2, 3, kind="reduce")
    problem = GraphProblem((2.0, 2.0), (first, last), ("network",), _cost, 0.0)
    assert graph_bound(problem) == _best(problem) == pytest.approx(4 + 0.5 + 3.75)
