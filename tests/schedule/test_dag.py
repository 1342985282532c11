"""The timeline's graph against simulation: critical path, slack and gains, checked by simulating changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.schedule.clock import Launch, TimedCall, TimedEvent, TimedWait, TimelineDag, Times, run

EPSILON = 0.25
CONTENTION = 0.5


def call(seconds: float, name: str = "region") -> TimedCall:
    return TimedCall(name, "forward", 0, None, "", seconds, True)


def launch(seconds: float, name: str, link: str = "node") -> Launch:
    return Launch(name, "forward", 0, None, "gather", link, 1, seconds)


def wait(index: int, name: str = "") -> TimedWait:
    return TimedWait(name, "forward", 0, None, index)


@st.composite
def steps(draw: st.DrawFn) -> list[TimedEvent]:
    """Draw calls, launches on two links and waits in any valid order, in whole seconds."""
    events: list[TimedEvent] = []
    pending: list[int] = []
    for _ in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(("call", "launch", "launch", "wait")))
        seconds = float(draw(st.integers(0, 6)))
        if kind == "call":
            events.append(call(seconds))
        elif kind == "launch":
            pending.append(len(events))
            events.append(launch(seconds, f"bucket {len(events)}", draw(st.sampled_from(("node", "network")))))
        elif pending:
            events.append(wait(pending.pop(draw(st.integers(0, len(pending) - 1)))))
    return events + [wait(index) for index in pending]


def of(events: list[TimedEvent], contention: float = 0.0) -> tuple[TimelineDag, Times]:
    times = run(events, contention)
    return TimelineDag(events, times), times


def with_seconds(events: list[TimedEvent], index: int, seconds: float) -> list[TimedEvent]:
    """Replace the length of one event."""
    assert isinstance(events[index], (TimedCall, Launch))
    return [replace(e, seconds=seconds) if i == index else e for i, e in enumerate(events)]  # type: ignore[call-arg]


def timed(events: list[TimedEvent]) -> list[int]:
    """Return the indices of events with a duration."""
    return [i for i, event in enumerate(events) if not isinstance(event, TimedWait)]


def waited(events: list[TimedEvent], index: int) -> float:
    """Return the seconds that compute waits at an event."""
    times = run(events, 0.0)
    return times.ends[index] - times.begins[index]


@settings(max_examples=200, deadline=None)
@given(steps(), st.sampled_from((0.0, 0.5)))
def test_the_critical_path_is_the_step(events: list[TimedEvent], contention: float) -> None:
    """Its events follow each other without a gap, from the start to the end."""
    dag, times = of(events, contention)
    clock, path = 0.0, dag.critical_path
    for index in path:
        if not isinstance(events[index], TimedWait):
            assert times.begins[index] == pytest.approx(clock)
        clock += dag.seconds[index]
    assert clock == pytest.approx(times.step(events)) == dag.step()
    assert all(dag.slack[index] == 0 for index in path)
    assert all(dag.ends()[index] == pytest.approx(end) for index, end in enumerate(times.ends))


@settings(max_examples=200, deadline=None)
@given(steps())
def test_slack_is_the_harmless_delay(events: list[TimedEvent]) -> None:
    """A delay within the slack does not change the step, a longer one by exactly the excess."""
    dag, times = of(events)
    for index in timed(events):
        as_long = events[index].seconds + dag.slack[index]  # type: ignore[attr-defined]
        same, longer = (with_seconds(events, index, s) for s in (as_long, as_long + EPSILON))
        assert run(same, 0.0).step(same) == times.step(events)
        assert run(longer, 0.0).step(longer) == times.step(events) + EPSILON
        assert dag.step({index: as_long + EPSILON}) == times.step(events) + EPSILON


@settings(max_examples=200, deadline=None)
@given(steps())
def test_causes_of_a_wait(events: list[TimedEvent]) -> None:
    """Removing an item shortens a wait by the graph's number, or not at all."""
    dag, _ = of(events)
    for index, event in enumerate(events):
        if isinstance(event, TimedWait):
            delays = dag.delays(index)
            for item in timed(events):
                shorter = waited(events, index) - waited(with_seconds(events, item, 0.0), index)
                assert delays.get(item, 0.0) == max(shorter, 0.0)


@settings(max_examples=200, deadline=None)
@given(steps())
def test_gains_of_a_step(events: list[TimedEvent]) -> None:
    """Removing an item shortens the step by the graph's number."""
    dag, times = of(events)
    gains = dag.gains(dag.end) if dag.end >= 0 else {}
    for item in timed(events):
        without = with_seconds(events, item, 0.0)
        assert gains.get(item, 0.0) == times.step(events) - run(without, 0.0).step(without)


@settings(max_examples=100, deadline=None)
@given(steps())
def test_slack_where_communication_slows_compute_down(events: list[TimedEvent]) -> None:
    """Lengthening a bucket by its slack lengthens the step only by the slowdown of overlapping compute."""
    dag, times = of(events, CONTENTION)
    step = times.step(events)
    for index in (i for i in timed(events) if isinstance(events[i], Launch)):
        as_long = events[index].seconds + dag.slack[index]  # type: ignore[attr-defined]
        assert dag.step({index: as_long}) == pytest.approx(step)
        assert dag.step({index: as_long + EPSILON}) == pytest.approx(step + EPSILON)
        longer = with_seconds(events, index, as_long)
        assert run(longer, CONTENTION).step(longer) <= step + CONTENTION / (1 - CONTENTION) * dag.slack[index] + 1e-9


def test_a_queue() -> None:
    """The wait for the second gather is long because the first gather is before it on the link.

    link     aaaabbbbbccc
    compute      000  11111111112
    """
    events = [launch(4, "a"), launch(5, "b"), wait(0), call(3), wait(1), launch(3, "c"), call(10), wait(5), call(1)]
    dag, times = of(events)
    assert times.step(events) == 4 + 5 + 10 + 1
    assert [i for i in dag.critical_path if dag.seconds[i]] == [0, 1, 6, 8]
    assert dag.slack[5] == 7
    assert dag.slack[3] == 2
    assert dag.delays(2) == {0: 4.0}
    assert dag.delays(4) == {1: 2.0}, "without `a`, compute comes to the wait earlier by as much"
    assert dag.gains(dag.end) == {0: 4.0, 1: 2.0, 6: 7.0, 8: 1.0}


def test_another_queue() -> None:
    """A reduction without a pending wait is before a gather that compute needs."""
    events = [call(1), launch(6, "reduce"), launch(2, "gather"), call(1), wait(2), call(1), wait(1)]
    dag, _ = of(events)
    assert dag.delays(4) == {1: 6.0, 2: 2.0}
