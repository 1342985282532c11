"""The simulator against one that counts seconds, and what it says about waits and memory."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.schedule import (
    Bucketed,
    Chain,
    Link,
    Occurrence,
    Placement,
    Problem,
    Rate,
    Schedule,
    Transfer,
    simulate,
)
from graphshard.schedule.bounds import chain_bound
from tests.schedule.oracles import chains, communicating, halves, links, placements, ticks

LINK = Link(Rate(1.0, 1.0), Rate(1.0, 1.0), halves, num_shards=2)


def one(chain: Chain, link: Link, placement: Placement) -> tuple[Problem, Schedule]:
    return Problem((chain,), link), Schedule((placement,))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_equal_to_a_clock_that_ticks(data: st.DataObject) -> None:
    """Time and peak memory of random schedules, packed and coalesced, on one channel and on two, with two legs."""
    legs = data.draw(st.booleans())
    chain, link = data.draw(st.one_of(chains(), communicating())), data.draw(links(legs=legs))
    placement = data.draw(placements(chain, legs=legs))
    timeline = simulate(*one(chain, link, placement))
    assert (timeline.step_seconds, timeline.peak) == ticks(chain, link, placement)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_is_exposed_is_what_compute_does_not_fill(data: st.DataObject) -> None:
    legs = data.draw(st.booleans())
    chain, link = data.draw(st.one_of(chains(), communicating())), data.draw(links(legs=legs))
    timeline = simulate(*one(chain, link, data.draw(placements(chain, legs=legs))))
    busy = sum(s.seconds for s in timeline.spans if s.kind in ("compute", "copy"))
    assert timeline.step_seconds == busy + timeline.exposed_seconds
    for channel in (0, 1):
        kinds = [kind for kind in ("gather", "reduce", "all_reduce") if link.channel(kind) == channel]
        spans = sorted((s.start, s.end) for s in timeline.spans if s.kind in kinds)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "two buckets on one channel at once"
    assert sum(timeline.alive.values()) == timeline.peak == max((m for _, m in timeline.memory), default=0)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_communication_slows_compute_while_it_is_under_way(data: st.DataObject) -> None:
    """An item advances by its contention slower as long as a channel is busy, and no bound is above the result."""
    chain, contention = data.draw(chains()), data.draw(st.sampled_from((0.25, 0.5, 0.75)))
    link = replace(data.draw(links()), contention=contention)
    timeline = simulate(*one(chain, link, data.draw(placements(chain))))
    sent = sorted((s.start, s.end) for s in timeline.spans if s.kind in ("gather", "reduce"))
    for span in (s for s in timeline.spans if s.kind == "compute"):
        beside, until = 0.0, span.start
        for start, end in sent:
            beside += max(0.0, min(end, span.end) - max(start, until))
            until = max(until, min(end, span.end))
        assert chain.seconds[span.index] == pytest.approx(span.seconds - contention * beside)
    assert chain_bound(chain, link) <= timeline.step_seconds + 1e-9


def three_layers() -> Chain:
    """Two seconds each; gathers of 4, 9 and 1 bytes, the gradient of the last."""
    gathers = tuple(Transfer(f"w{i}", size, i, i) for i, size in enumerate((4, 9, 1)))
    return Chain("backward", (2.0, 2.0, 2.0), (10, 10, 10), gathers, (Transfer("w0", 3, 3),))


def eager() -> Placement:
    """All gathers at the start, each by itself."""
    buckets = tuple(Bucketed("gather", i, i + 1) for i in range(3))
    starts = tuple(Occurrence("start", i, 0) for i in range(3))
    waits = tuple(Occurrence("wait", i, i) for i in range(3))
    reduce = (Occurrence("start", 3, 3), Occurrence("wait", 3, 3))
    return Placement((*buckets, Bucketed("reduce", 0, 1)), (*starts, *waits, *reduce))


def test_why_compute_waits() -> None:
    """The first gather has nothing to hide behind, the others queue for the link, the reduction is the tail.

    link     aaaaa bbbbbbbbbb cc            dddd
    compute        00         11 22
    """
    timeline = simulate(*one(three_layers(), LINK, eager()))
    assert [(e.bucket, e.at, e.start, e.seconds, e.why, e.behind) for e in timeline.exposed] == [
        ("gather w0", 0, 0.0, 5.0, "head", ""),
        ("gather w1", 1, 7.0, 8.0, "link", "gather w0"),
        ("reduce w0", 3, 19.0, 4.0, "tail", ""),
    ]
    assert timeline.step_seconds == 23.0
    assert timeline.busy("gather", "reduce") == 21 / 23


def test_a_late_start() -> None:
    """The second gather is started where it is needed; the third hides behind the second item."""
    start, wait = (Occurrence("start", 1, 1), Occurrence("start", 2, 1)), eager().events[3:]
    events = (Occurrence("start", 0, 0), wait[0], *start, *wait[1:])
    timeline = simulate(*one(three_layers(), LINK, Placement(eager().buckets, events)))
    assert [(e.bucket, e.seconds, e.why) for e in timeline.exposed][1:] == [
        ("gather w1", 10.0, "late"),
        ("reduce w0", 4.0, "tail"),
    ]


def test_what_is_alive_at_the_peak() -> None:
    timeline = simulate(*one(three_layers(), LINK, eager()))
    assert timeline.alive == {"": 10, "gathered w0": 4, "gathered w1": 9, "gathered w2": 1}
    assert timeline.peak == 24


def test_steps_repeat() -> None:
    """A step waits for everything it starts, so the second takes as long as the first, the optimizer included."""
    optimizer = Chain("optimizer", (5.0,), (30,))
    problem = Problem((three_layers(), optimizer), LINK)
    once, twice = (simulate(problem, Schedule((eager(), Placement())), steps=n) for n in (1, 2))
    assert once.step_seconds == twice.step_seconds == 28.0
    assert [(name, end - start) for name, start, end in twice.phases] == [("backward", 23), ("optimizer", 5)] * 2
    assert twice.peak == 30
    assert len(twice.exposed) == 2 * len(once.exposed)


def test_kept_parameters_are_not_gathered_again() -> None:
    """They are alive from their start in forward to their last use in backward."""
    gather = Transfer("w", 4, 0, 0)
    forward = Chain("forward", (2.0, 1.0), (1, 1), (gather,))
    backward = Chain("backward", (1.0, 2.0, 3.0), (1, 1, 1), (Transfer("w", 4, 1, 1),))
    problem = Problem((forward, backward), LINK, frozenset({"w"}))
    gathered = Placement((Bucketed("gather", 0, 1),), (Occurrence("start", 0, 0), Occurrence("wait", 0, 0)))
    timeline = simulate(problem, Schedule((gathered, Placement()), frozenset({"w"})))
    assert timeline.step_seconds == 5 + 3 + 6
    assert [size for _, size in timeline.memory][-3:] == [5, 5, 1]
