"""Searches end: any budget gives a plan, deterministic, no longer than the start, with a bound."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.errors import InfeasibleError
from graphshard.ir.mesh import Axis
from graphshard.schedule import Chain, Link, Placement, Problem, Rate, Schedule, Solution, Solver, Transfer
from graphshard.schedule._dynamic_program import shortest_order
from graphshard.schedule._exact_search import search_exactly
from graphshard.schedule._placement import one_ahead
from graphshard.schedule._solver import STEPS, PhaseSearch
from graphshard.schedule.axis_links import make_link
from graphshard.schedule.bounds import chain_bound, jobs, lower_bound
from graphshard.schedule.problem import KINDS, Budget, modes, startable
from graphshard.schedule.simulator import simulate
from tests.schedule.oracles import chains, exhaustive, halves, links

LIMITS = st.one_of(st.just(math.inf), st.integers(5, 60))


def least_of(*rates: Rate) -> Callable[[int, int], float]:
    """Return the cost of the fastest of several protocols: concave in the bytes, like the costs of profiles."""
    return lambda num_bytes, num_tensors: min(rate(num_bytes, num_tensors) for rate in rates)


@st.composite
def protocols(draw: st.DrawFn) -> Link:
    """Draw a link with different protocols for short and long messages."""
    gather, reduce = (
        least_of(
            Rate(draw(st.integers(1, 2)), draw(st.integers(2, 4)), 1),
            Rate(draw(st.integers(3, 9)), draw(st.integers(0, 1)), 1),
        )
        for _ in KINDS
    )
    return Link(gather, reduce, halves, num_shards=2)


def twelve() -> Problem:
    """Build a forward of twelve matrices, four attention and feed-forward layers of MPT-7B's width, on 128 ranks."""
    width = 4096
    many = [8 * width, width**2, width**2, width, width**2, 4 * width**2]
    many += [width, width**2, width, 3 * width**2, width**2, width**2]
    gathers = tuple(
        Transfer(f"w{i}", 2 * n, i, i, num_tensors=2, num_small=1, small_bytes=2 * width) for i, n in enumerate(many)
    )
    seconds = tuple(4 * n * 2048 / (0.65 * 989e12) + 1e-5 for n in many)
    link = make_link(Costs(replace(load_profile("h100"), contention=0.0)), Axis("shard", 128, "shard"))
    return Problem((Chain("forward", seconds, (0,) * 12, gathers),), link)


@functools.cache
def planned() -> Solution:
    """Plan twelve transfers with the whole budget."""
    return Solver()(twelve())


def check(problem: Problem, placements: tuple[Placement, ...]) -> None:
    """Check that every transfer is sent once, in order, in its group, packed if required, and not too early."""
    for chain, placement in zip(problem.chains, placements, strict=True):
        for kind in KINDS:
            buckets = [(i, b) for i, b in enumerate(placement.buckets) if b.kind == kind]
            assert [i for _, b in buckets for i in range(b.first, b.end)] == [*range(len(chain.transfers(kind)))]
            for index, bucket in buckets:
                members = chain.transfers(kind)[bucket.first : bucket.end]
                assert len({m.group for m in members}) == 1
                assert bucket.packed in modes(members)
                at = {event.action: event.at for event in placement.events if event.bucket == index}
                assert startable(members, kind, at["start"])
                assert at["wait"] <= members[0].at if kind == "gather" else at["wait"] >= at["start"]


@pytest.mark.slow
def test_a_large_search_ends_within_its_budget() -> None:
    problem = twelve()
    (chain,) = problem.chains
    budget = Budget(STEPS)
    found = PhaseSearch(chain, problem.link, Solver())
    found.run(budget)
    assert budget.left > -0.05 * STEPS
    assert found.seconds <= found.bound * 1.01
    assert Solver()(problem) == planned()


@pytest.mark.parametrize("steps", [0, 1000, 30_000])
def test_a_stopped_search_is_reported_with_a_bound(steps: int) -> None:
    (chain,), link = twelve().chains, twelve().link
    budget = Budget(steps)
    found = search_exactly(chain, link, budget, math.inf, math.inf)
    assert budget.ended
    stopped = Solver(steps=steps)(twelve())
    assert stopped.stopped
    assert max(found.bound, stopped.lower_bound) <= planned().step_seconds <= stopped.step_seconds
    few = replace(chain, gathers=chain.gathers[:4])
    assert not Solver()(Problem((few,), link)).stopped


@settings(max_examples=60, deadline=None)
@given(chains(layers=6, reductions=True), st.one_of(links(), protocols()), LIMITS, st.integers(0, 4000))
def test_any_budget_has_a_plan(chain: Chain, link: Link, limit: float, steps: int) -> None:
    """It is valid, within memory, at most as long as FSDP2's order if that fits, and deterministic."""
    problem = Problem((chain,), link)
    try:
        found = Solver(limit, steps=steps)(problem)
    except InfeasibleError:
        return
    check(problem, found.schedule.placements)
    start = simulate(problem, Schedule((one_ahead(chain, link),)))
    assert found.peak <= limit
    assert found.lower_bound <= found.step_seconds * (1 + 1e-9)
    assert start.peak > limit or found.step_seconds <= start.step_seconds
    again = Solver(limit, steps=steps)(replace(problem, chains=(replace(chain),)))
    assert again == found


@settings(max_examples=60, deadline=None)
@given(chains(layers=3, reductions=True), protocols(), LIMITS, st.integers(0, 3000))
def test_no_schedule_beats_the_bound_of_a_stopped_search(chain: Chain, link: Link, limit: float, steps: int) -> None:
    best = exhaustive(chain, link, limit)
    assume(best < math.inf)
    found = search_exactly(chain, link, Budget(steps), limit, math.inf)
    assert found.bound <= best * (1 + 1e-9)
    assert chain_bound(chain, link) <= best * (1 + 1e-9)
    assert Solver(limit, steps=steps)(Problem((chain,), link)).lower_bound <= best * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(chains(layers=6, reductions=False, small=False), protocols())
def test_the_bound_of_gathers_equals_the_best_schedule(chain: Chain, link: Link) -> None:
    """With one rate for all messages, and transfers of one group, it equals exhaustive search."""
    chain = replace(chain, gathers=tuple(replace(g, group="") for g in chain.gathers))
    assert chain_bound(chain, link) == pytest.approx(exhaustive(chain, link), rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(chains(layers=4, reductions=True, small=False), protocols())
def test_the_proof_is_exact_on_a_shared_link(chain: Chain, link: Link) -> None:
    best = exhaustive(chain, link)
    found = shortest_order(chain, link, Budget(math.inf), best * (1 + 1e-6) + 1e-6)
    assert found is not None
    assert found[0] == pytest.approx(best)
    assert shortest_order(chain, link, Budget(math.inf), best * (1 - 1e-6)) is None


@settings(max_examples=80, deadline=None)
@given(chains(layers=3, reductions=True), st.one_of(links(), protocols()), st.sampled_from((0.1, 0.25, 0.5)), LIMITS)
def test_optimal_under_contention_with_a_valid_bound(chain: Chain, link: Link, contention: float, limit: float) -> None:
    """Small phases are searched with the slowdown of compute."""
    link = replace(link, contention=contention)
    best = exhaustive(chain, link, limit)
    assume(best < math.inf)
    assert chain_bound(chain, link) <= best * (1 + 1e-9)
    found = Solver(limit)(Problem((chain,), link))
    assert found.step_seconds == pytest.approx(best, rel=2e-4)
    assert found.lower_bound <= best * (1 + 1e-9)
    assert Solver(limit, exact_transfers=0)(Problem((chain,), link)).lower_bound <= best * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(chains(layers=4, reductions=True, small=False), protocols(), st.sampled_from((0.1, 0.25, 0.5)))
def test_the_proof_holds_under_contention(chain: Chain, link: Link, contention: float) -> None:
    link = replace(link, contention=contention)
    best = exhaustive(chain, link)
    found = shortest_order(chain, link, Budget(math.inf), best * (1 + 1e-6) + 1e-6)
    assert found is not None
    assert chain_bound(chain, link) * (1 - 1e-9) <= found[0] <= best * (1 + 1e-9)


def test_the_bound_combines_waits_and_contention() -> None:
    """36 s of compute wait 4 s for the first gather and 4 s for the reduction, and overlap 32 s of gathers."""
    gathers = tuple(Transfer(f"w{i}", 4, i, i) for i in range(9))
    chain = Chain("backward", (4.0,) * 9, (0,) * 9, gathers, (Transfer("w0", 4, 9),))
    link = Link(Rate(0, 1), Rate(0, 1), halves, 2, contention=0.1)
    found = Solver()(Problem((chain,), link))
    assert found.step_seconds == pytest.approx(4 + 36 + 0.1 * 32 + 4)
    assert found.lower_bound == pytest.approx(found.step_seconds)


def test_the_least_work_that_meets_deadlines() -> None:
    """Two seconds for a bucket and one for a byte; the longer a step may take, the fewer buckets it needs."""
    gathers = tuple(Transfer(f"w{i}", 2, i, i) for i in range(3))
    link = Link(Rate(2, 1), Rate(2, 1), halves, 2)
    gathering, _ = jobs(Chain("forward", (3.0, 3.0, 3.0), (0,) * 3, gathers), link)
    assert [gathering.work(seconds)[-1] for seconds in (12, 15, 17)] == [math.inf, 10, 8]


@pytest.mark.parametrize("calls", [1, 20, 300])
@pytest.mark.quick_cases("1")
def test_interrupted_planning_has_no_lasting_effect(calls: int) -> None:
    """Ctrl-C during a cost query ends the search at once, and the next call plans as usual."""
    problem = twelve()
    left = calls

    def gather(num_bytes: int, num_tensors: int) -> float:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return problem.link.gather(num_bytes, num_tensors)

    link = replace(problem.link, gather=gather)
    with pytest.raises(KeyboardInterrupt):
        Solver()(replace(problem, link=link))
    assert left == 0
    assert Solver()(replace(problem, link=link)) == planned()
    assert lower_bound(replace(problem, link=link)) == lower_bound(problem)
