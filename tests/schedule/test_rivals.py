"""Plans are at most as long as other systems' for the same model and machine: random shapes and machines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import rivals
from benchmarks.schedule import planned
from benchmarks.shapes import GEMMA, GPT, LLAMA_1B, QWEN, VIT, Shape, link_of, problem
from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.schedule import Problem, Schedule
from graphshard.schedule.simulator import simulate

RIVALS = {
    "FSDP2, packed": {},
    "one bucket for each block": {"packed": False},
    "one for each parameter": {"packed": False, "whole": False},
}


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Draw up to four layers of any width."""
    heads = draw(st.sampled_from((4, 12, 32)))
    dim = heads * draw(st.sampled_from((32, 64, 128)))
    return Shape(
        "random",
        draw(st.integers(1, 4)),
        dim,
        draw(st.integers(1, 5)) * dim,
        heads,
        draw(st.sampled_from((1, heads // 4, heads))),
        draw(st.sampled_from((1000, 50257, 256000))),
        draw(st.sampled_from((0, 0, 8, 128))),
        expert_every=draw(st.integers(1, 2)),
        gated=draw(st.booleans()),
        tied=draw(st.booleans()),
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw a step of a random shape on a random machine: profile, network, ranks, contention, one link or two."""
    profile = load_profile(draw(st.sampled_from(("a100", "h100", "b200"))))
    profile = replace(profile, contention=draw(st.sampled_from((0.0, 0.0, 0.1))))
    costs = Costs(profile, draw(st.sampled_from(("isolated", "in-training"))))
    ranks, tokens = draw(st.sampled_from((2, 8, 64, 1024))), draw(st.sampled_from((256, 2048, 16384)))
    link = replace(link_of(costs, ranks), separate=draw(st.integers(0, 3)) == 0)
    return problem(draw(shapes()), costs, ranks, tokens, min(tokens, 8192), link)


def seconds_of(fine: Problem, **how: bool) -> float:
    """Return the step time of another system's schedule."""
    chains = [rivals.fsdp2(chain, **how) for chain in fine.chains]
    return sum(simulate(Problem((chain,), fine.link), Schedule((p,))).step_seconds for chain, p in chains)


@settings(max_examples=15, deadline=None)
@given(problems())
@pytest.mark.slow
def test_no_rival_is_shorter(fine: Problem) -> None:
    found = planned(fine)
    for name, how in RIVALS.items():
        assert found.step_seconds <= seconds_of(fine, **how) * (1 + 1e-12), name


@pytest.mark.parametrize("ranks", [64, 1024])
@pytest.mark.parametrize("shape", [LLAMA_1B, GPT, GEMMA, QWEN, VIT], ids=lambda shape: shape.name)
def test_the_gap_of_well_known_shapes(shape: Shape, ranks: int) -> None:
    """Three layers of each, 2,048 tokens per rank."""
    costs = Costs(load_profile("h100"))
    fine = problem(replace(shape, layers=3), costs, ranks, 2048, 2048, link_of(costs, ranks))
    found = planned(fine)
    assert found.gap <= 0.02
    assert all(found.step_seconds <= seconds_of(fine, **how) for how in RIVALS.values())
