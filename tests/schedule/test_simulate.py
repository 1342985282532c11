"""The simulator against one that counts ticks, and its reports of waits and memory."""

from __future__ import annotations

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
)
from graphshard.schedule.bounds import chain_bound
from graphshard.schedule.simulator import ChainRun, ExplainedRun, simulate
from tests.schedule.oracles import chains, communicating, halves, links, placements, ticks

LINK = Link(Rate(1.0, 1.0), Rate(1.0, 1.0), halves, num_shards=2)


class TimedRun(ChainRun):
    """A run that notes when items begin and end."""

    def __init__(self, chain: Chain, link: Link, placement: Placement) -> None:
        self.items: list[tuple[float, float]] = []
        super().__init__(chain, link, placement)

    def item(self) -> dict[int, float]:
        begin = self.clocks.compute
        found = super().item()
        self.items.append((begin, self.clocks.compute))
        return found


def one(chain: Chain, link: Link, placement: Placement) -> tuple[Problem, Schedule]:
    return Problem((chain,), link), Schedule((placement,))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_matches_a_clock_that_counts_ticks(data: st.DataObject) -> None:
    """Time and peak memory of random schedules, packed and coalesced, on one channel and on two, with two legs."""
    legs = data.draw(st.booleans())
    chain, link = data.draw(st.one_of(chains(), communicating())), data.draw(links(legs=legs))
    placement = data.draw(placements(chain, legs=legs))
    timeline = simulate(*one(chain, link, placement))
    assert (timeline.step_seconds, timeline.peak) == ticks(chain, link, placement)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_contention_slows_compute(data: st.DataObject) -> None:
    """An item advances slower by its contention while a channel is busy, and no bound is above the result."""
    chain, contention = data.draw(chains()), data.draw(st.sampled_from((0.25, 0.5, 0.75)))
    link = replace(data.draw(links()), contention=contention)
    run = TimedRun(chain, link, data.draw(placements(chain)))
    sent = sorted((start, start + run.loads[bucket].seconds) for bucket, start in run.starts.items())
    for seconds, (begin, done) in zip(chain.seconds, run.items, strict=True):
        overlapped, until = 0.0, begin
        for start, end in sent:
            overlapped += max(0.0, min(end, done) - max(start, until))
            until = max(until, min(end, done))
        assert seconds == pytest.approx(done - begin - contention * overlapped)
    assert chain_bound(chain, link) <= run.seconds + 1e-9


def three_layers() -> Chain:
    """Build a chain of two seconds each; gathers of 4, 9 and 1 bytes, and the gradient of the last."""
    gathers = tuple(Transfer(f"w{i}", size, i, i) for i, size in enumerate((4, 9, 1)))
    return Chain("backward", (2.0, 2.0, 2.0), (10, 10, 10), gathers, (Transfer("w0", 3, 3),))


def eager() -> Placement:
    """Start all gathers at the beginning, separately."""
    buckets = tuple(Bucketed("gather", i, i + 1) for i in range(3))
    starts = tuple(Occurrence("start", i, 0) for i in range(3))
    waits = tuple(Occurrence("wait", i, i) for i in range(3))
    reduce = (Occurrence("start", 3, 3), Occurrence("wait", 3, 3))
    return Placement((*buckets, Bucketed("reduce", 0, 1)), (*starts, *waits, *reduce))


def test_compute_waits_for_what_it_needs() -> None:
    """The first gather overlaps nothing, the others queue for the link, the reduction ends the phase.

    link     aaaaa bbbbbbbbbb cc            dddd
    compute        00         11 22
    """
    run = TimedRun(three_layers(), LINK, eager())
    assert run.items == [(5.0, 7.0), (15.0, 17.0), (17.0, 19.0)]
    assert run.seconds == 23.0


def test_live_tensors_at_the_peak() -> None:
    run = ExplainedRun(three_layers(), LINK, eager())
    found = {name: size for name, size in run.at_peak.items() if size}
    assert found == {"": 10, "gathered w0": 4, "gathered w1": 9, "gathered w2": 1}
    assert run.peak == 24


def test_gradients_are_alive_next_to_their_buffer() -> None:
    gradient = Transfer("w", 8, 1, num_tensors=2, num_small=2, small_bytes=6)
    events = (Occurrence("start", 0, 1), Occurrence("wait", 0, 1))
    placement = Placement((Bucketed("reduce", 0, 1, packed=True),), events)
    run = ExplainedRun(Chain("backward", (1.0,), (3,), reductions=(gradient,)), LINK, placement)
    assert run.at_peak == {"": 3, "packing": 6, "gradient w": 8}
    assert run.peak == 17
    exchanged = ExplainedRun(run.chain, replace(LINK, receives=True), placement)
    assert exchanged.at_peak == {**run.at_peak, "exchange 0": 8}
    assert (exchanged.peak, exchanged.alive) == (25, 3)


def test_phases_follow_each_other() -> None:
    optimizer = Chain("optimizer", (5.0,), (30,))
    found = simulate(Problem((three_layers(), optimizer), LINK), Schedule((eager(), Placement())))
    assert (found.step_seconds, found.peak) == (28.0, 30)


def test_kept_parameters_are_not_gathered_again() -> None:
    """They are alive from their start in forward to their last use in backward."""
    gather = Transfer("w", 4, 0, 0)
    forward = Chain("forward", (2.0, 1.0), (1, 1), (gather,))
    backward = Chain("backward", (1.0, 2.0, 3.0), (1, 1, 1), (Transfer("w", 4, 1, 1),))
    problem = Problem((forward, backward), LINK, frozenset({"w"}))
    gathered = Placement((Bucketed("gather", 0, 1),), (Occurrence("start", 0, 0), Occurrence("wait", 0, 0)))
    found = simulate(problem, Schedule((gathered, Placement()), frozenset({"w"})))
    assert (found.step_seconds, found.peak) == (5 + 3 + 6, 5)
    assert problem.keep(frozenset({"w"})).chains[1].base == (5, 5, 1)
