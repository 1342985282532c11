"""Random graphs give the same bits after scheduling, under an emulator that detects races."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard import schedule_graph
from graphshard.cost.profile import load_profile
from graphshard.errors import InfeasibleError
from graphshard.schedule._graph_search import graph_bound
from graphshard.schedule.graph_collectives import Group, check_groups
from graphshard.schedule.schedule_graph import _Task
from tests.foreign import random_graphs
from tests.foreign.emulation import results, same
from tests.foreign.random_graphs import Step

GROUPS = {"dp": Group(2, apart=8), "tp": Group(2)}
SHARED = {"dp": Group(2, link="one"), "tp": Group(2, link="one")}


@settings(max_examples=60, deadline=None)
@given(random_graphs.steps(), st.booleans(), st.sampled_from(("h100", "cpu-gloo")))
def test_the_same_bits(chosen: list[Step], shared: bool, hardware: str) -> None:
    gm = random_graphs.graph(chosen)
    before = gm.code
    groups = SHARED if shared else GROUPS
    found = schedule_graph(gm, groups, hardware=hardware, steps=50_000)
    assert gm.code == before
    assert same(results(gm, random_graphs.inputs()), results(found.module, random_graphs.inputs()))
    assert found.lower_bound <= found.seconds_after <= found.seconds_before
    again = schedule_graph(found.module, groups, hardware=hardware, steps=50_000)
    assert again.seconds_before == found.seconds_after
    assert again.seconds_after <= found.seconds_after
    assert same(results(gm, random_graphs.inputs()), results(again.module, random_graphs.inputs()))


@settings(max_examples=30, deadline=None)
@given(random_graphs.steps(), st.floats(0.0, 1.2))
@pytest.mark.slow
def test_a_limit_is_kept(chosen: list[Step], share: float) -> None:
    gm = random_graphs.graph(chosen)
    limit = max(1, int(schedule_graph(gm, GROUPS, steps=0).peak_before * share))
    try:
        found = schedule_graph(gm, GROUPS, memory_limit=limit, steps=50_000)
    except InfeasibleError as error:
        limit = error.smallest
        with pytest.raises(InfeasibleError):
            schedule_graph(gm, GROUPS, memory_limit=limit - 1, steps=50_000)
        found = schedule_graph(gm, GROUPS, memory_limit=limit, steps=50_000)
    assert found.peak_after <= limit
    assert same(results(gm, random_graphs.inputs()), results(found.module, random_graphs.inputs()))


@settings(max_examples=60, deadline=None)
@given(random_graphs.steps(), st.floats(0.4, 1.2), st.booleans())
@pytest.mark.slow
def test_no_feasible_schedule_beats_the_bound(chosen: list[Step], share: float, shared: bool) -> None:
    """The raw bound, before it is combined with found schedules."""
    gm, groups = random_graphs.graph(chosen), SHARED if shared else GROUPS
    limit = max(1, int(schedule_graph(gm, groups, steps=0).peak_before * share))
    try:
        found = schedule_graph(gm, groups, memory_limit=limit, steps=50_000)
    except InfeasibleError as error:
        limit = error.smallest
        found = schedule_graph(gm, groups, memory_limit=limit, steps=50_000)
    task = _Task.of(gm, check_groups(groups), load_profile("h100"), "isolated", limit)
    assert graph_bound(task._within_limit) <= found.seconds_after * (1 + 1e-9)
