"""A problem of many equal blocks is reduced to few blocks, which tell whether a full search pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphshard.schedule import Chain, Link, Problem, Rate, Transfer
from graphshard.schedule.coarsening import BLOCKS, reduced
from graphshard.schedule.planner import _may_gain
from graphshard.schedule.solver import Solver, fsdp2_solution
from tests.schedule.oracles import halves

LINK = Link(Rate(5.0, 0.5), Rate(5.0, 0.7), halves, 8)


def stack(layers: int, *, seconds: float = 60.0) -> Problem:
    """Build forward and backward of equal layers between an embedding and a head; saved memory grows layer by layer."""
    size, end = 2 * layers + 1, 2 * layers + 2
    first, last = Transfer("embed", 40, 0, size), Transfer("head", 60, size, size)
    layer = [Transfer(f"w{i}", 100, 2 * i + 1, 2 * i + 2) for i in range(layers)]
    items = (5.0, *(seconds, seconds + 20) * layers, 9.0)
    saved = tuple(1000 + 10 * item for item in range(end))
    made = tuple(Transfer(f"w{i}", 100, 2 * i + 3) for i in range(layers))
    forward = Chain("forward", items, saved, (first, *layer, last))
    backward = Chain("backward", items, saved[::-1], (first, *layer, last), made)
    return Problem((forward, backward, Chain("optimizer", (3.0,), (10,))), LINK)


def test_the_reduced_problem_has_fewer_layers() -> None:
    """Times and transfers are equal; memory comes from the first and last layers."""
    found = reduced(stack(40))
    assert found is not None
    assert found.share == BLOCKS / (BLOCKS + found.gone["forward"])
    expected = stack(40 - found.gone["forward"]).chains[:2]
    for chain, other in zip(found.problem.chains, expected, strict=True):
        assert chain.seconds == other.seconds
        assert [(g.at, g.last) for g in chain.gathers] == [(g.at, g.last) for g in other.gathers]
        assert [r.at for r in chain.reductions] == [r.at for r in other.reductions]
    forward, whole = found.problem.chains[0], stack(40).chains[0]
    assert (forward.base[:5], forward.base[-5:]) == (whole.base[:5], whole.base[-5:])
    assert fsdp2_solution(found.problem).peak == fsdp2_solution(stack(40)).peak


@pytest.mark.parametrize("problem", [stack(2 * BLOCKS - 3), replace(stack(40), keepable=frozenset({"w1"}))])
def test_problems_that_are_not_reduced(problem: Problem) -> None:
    assert reduced(problem) is None


def test_a_different_layer_is_kept() -> None:
    problem = stack(60)
    (forward, *others) = problem.chains
    odd = replace(forward, seconds=(*forward.seconds[:81], 61.0, *forward.seconds[82:]))
    found = reduced(replace(problem, chains=(odd, *others)))
    assert found is not None
    assert 61.0 in found.problem.chains[0].seconds


@pytest.mark.parametrize("layers", [12, 40])
@pytest.mark.parametrize("seconds", [30.0, 60.0, 200.0])
def test_searches_if_it_may_gain(layers: int, seconds: float) -> None:
    """If a search of all layers finds a shorter step, the reduced problem predicts it."""
    problem = stack(layers, seconds=seconds)
    first = fsdp2_solution(problem)
    best = Solver(first.peak)(problem).step_seconds
    for share in (0.5, 0.9):
        gain = share * (first.step_seconds - best)
        if gain > 1e-6 * first.step_seconds:
            below = first.step_seconds - gain
            assert _may_gain(problem, problem, gain, Solver(first.peak, below=below))
            assert Solver(first.peak, below=below)(problem).step_seconds < below


def test_skips_a_search_that_cannot_gain() -> None:
    problem = stack(40, seconds=500.0)
    first = fsdp2_solution(problem)
    assert not _may_gain(problem, problem, 0.2 * first.step_seconds, Solver(first.peak))
