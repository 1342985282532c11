"""Range of a prediction that follows from the ranges of its constants."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import graphshard
from graphshard.cost.profile import sampled, with_numbers
from graphshard.options.options import Options
from graphshard.predict.step_prediction import PERCENTILES
from graphshard.predict.study import Study
from tests.predict.test_explain import BF16, RANKS, TOKENS, meta_net

H100 = graphshard.profiling.load_profile("h100")


@pytest.fixture(scope="module")
def study() -> Study:
    """Capture once for many tests."""
    return Study(meta_net(), (TOKENS,), None, Options(mp_policy=BF16))


def test_known_constants_give_one_number(study):
    """The table then shows no range."""
    found = study.explain((RANKS,), dataclasses.replace(H100, ranges={}), "isolated")
    assert found.step_range_s == (found.step_time_s, found.step_time_s)
    assert " to " not in next(text for name, text in found._facts() if name == "step")


def test_range_is_around_the_step_and_shown(study):
    """With the assumptions about an H100 it is some percent on both sides."""
    found = study.explain((RANKS,), H100, "isolated")
    low, high = found.step_range_s
    assert 0.7 * found.step_time_s < low < found.step_time_s < high < 1.5 * found.step_time_s
    text = str(found)
    assert f"({graphshard.utils.text.format_seconds(low)} to {graphshard.utils.text.format_seconds(high)})" in text
    assert found.to_dict()["step_range_s"] == [low, high]


@pytest.mark.slow
def test_range_equals_separate_samples(study):
    """Evaluating all samples at once equals explaining the same schedule with each sample."""
    profile = dataclasses.replace(H100, ranges={"memory_bandwidth": (2e12, 4e12), "contention": (0.0, 0.5)})
    found = study.explain((RANKS,), profile, "isolated")
    drawn = sampled(profile, 200)
    steps = []
    for memory, contention in zip(drawn.memory_bandwidth, drawn.contention):
        numbers = {"memory_bandwidth": float(memory), "contention": float(contention)}
        other = with_numbers(dataclasses.replace(profile, ranges={}), numbers)
        costs = dataclasses.replace(found._costs, profile=other)
        timeline = graphshard.schedule.timeline.estimate(found._program, costs)
        trained = sum(row.shard_bytes(row.dtype) for row in found._program.params if row.trainable)
        steps.append(timeline.seconds + costs.optimizer(trained, 2))
    low, high = np.percentile(steps, PERCENTILES)
    assert found.step_range_s == pytest.approx((min(low, found.step_time_s), max(high, found.step_time_s)))


def test_wider_ranges_make_a_wider_range(study):
    """The network only counts if ranks leave the node."""
    only = {"outside.isolated.reached": (0.02, 0.5)}
    profile = dataclasses.replace(H100, ranges=only)
    inside = study.explain((RANKS,), profile, "isolated")
    assert inside.step_range_s[1] == pytest.approx(inside.step_time_s)
    beyond = study.explain((16,), profile, "isolated")
    assert beyond.step_range_s[1] > 1.2 * beyond.step_time_s
