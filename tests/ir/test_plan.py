"""Plans are plain data."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.ir.plan import Bucket, Event, Plan

names = st.text(max_size=8)
params = st.lists(names, max_size=3).map(tuple)
phases = st.sampled_from(["forward", "backward"])
buckets = st.builds(
    Bucket,
    name=names,
    kind=st.sampled_from(["gather", "reduce"]),
    phase=phases,
    params=params,
    packed=params,
    axis=names,
    num_bytes=st.integers(0, 2**50),
)
events = st.builds(Event, action=st.sampled_from(["start", "wait"]), bucket=names, at=st.integers(0, 10**6))
plans = st.builds(
    Plan,
    buckets=st.lists(buckets, max_size=3).map(tuple),
    events=st.dictionaries(phases, st.lists(events, max_size=4).map(tuple)),
)

BUCKET = Bucket("gather root", "gather", "forward", ("a", "b"), ("c",), "shard", 12)
PLAN = Plan((BUCKET,), {"forward": (Event("start", "gather root", 0), Event("wait", "gather root", 3))})


@given(plans)
@settings(max_examples=50, deadline=None)
@pytest.mark.slow
def test_json_round_trip(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash


@given(plans, plans)
@settings(max_examples=50, deadline=None)
def test_different_plans_have_different_hashes(one: Plan, other: Plan) -> None:
    assert (one.hash == other.hash) == (one == other)


@pytest.mark.parametrize(
    "other",
    [
        Plan(),
        replace(PLAN, buckets=(replace(BUCKET, params=("b", "a")),)),
        replace(PLAN, buckets=(replace(BUCKET, params=("a",), packed=("b", "c")),)),
        replace(PLAN, buckets=(replace(BUCKET, num_bytes=13),)),
        replace(PLAN, events={"forward": PLAN.events["forward"][::-1]}),
        replace(PLAN, events={"backward": PLAN.events["forward"]}),
    ],
)
def test_every_detail_counts(other: Plan) -> None:
    assert other.hash != PLAN.hash


def test_the_order_of_phases_does_not_count() -> None:
    one, other = {"forward": (), "backward": ()}, {"backward": (), "forward": ()}
    assert Plan(events=one).hash == Plan(events=other).hash


def test_buckets_by_name() -> None:
    assert PLAN.bucket("gather root") is BUCKET
    assert BUCKET.members == ("c", "a", "b")


def test_json_is_readable() -> None:
    data = json.loads(PLAN.to_json())
    assert data["events"]["forward"][1] == {"action": "wait", "bucket": "gather root", "at": 3}
    assert data["buckets"][0]["params"] == ["a", "b"]
