"""The solver against exhaustive search: optimal where promised, within memory, above its bound."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphshard.errors import ArgumentError, InfeasibleError
from graphshard.schedule import (
    Bucketed,
    Chain,
    FixedCollective,
    Link,
    Problem,
    Rate,
    Schedule,
    Solution,
    Solver,
    Transfer,
)
from graphshard.schedule._placement import place
from graphshard.schedule.bounds import chain_bound, lower_bound
from graphshard.schedule.simulator import simulate
from tests.schedule.oracles import chains, communicating, exhaustive, halves, links, of_experts

HEURISTIC = Solver(exact_transfers=0)
LIMITS = st.one_of(st.just(math.inf), st.integers(5, 60))


def solved(problem: Problem, solver: Solver) -> Solution | None:
    """Solve and check with the simulator; return None if nothing fits in the limit."""
    try:
        found = solver(problem)
    except InfeasibleError as error:
        if error.smallest <= solver.limit:
            raise
        return None
    timeline = simulate(problem, found.schedule)
    assert (found.step_seconds, found.peak) == (timeline.step_seconds, timeline.peak)
    assert found.peak <= solver.limit
    assert found.lower_bound <= found.step_seconds * (1 + 1e-12)
    return found


@settings(max_examples=150, deadline=None)
@given(chains(reductions=False), links(), LIMITS)
@pytest.mark.slow
def test_forward_equals_exhaustive_search(chain: Chain, link: Link, limit: float) -> None:
    """Up to six layers, packed or not, with tensors that outlive one item."""
    found = solved(Problem((chain,), link), Solver(limit))
    best = exhaustive(chain, link, limit)
    assert (found.step_seconds if found else math.inf) == best


@settings(max_examples=60, deadline=None)
@given(chains(layers=3, reductions=True), links(), LIMITS)
def test_backward_equals_exhaustive_search(chain: Chain, link: Link, limit: float) -> None:
    found = solved(Problem((chain,), link), Solver(limit))
    best = exhaustive(chain, link, limit)
    assert (found.step_seconds if found else math.inf) == best


@settings(max_examples=25, deadline=None)
@given(chains(layers=6, reductions=True, small=False), links(), LIMITS)
@pytest.mark.slow
def test_six_layers_backward_equal_exhaustive_search(chain: Chain, link: Link, limit: float) -> None:
    assume(len(chain.gathers) + len(chain.reductions) <= 9)
    found = solved(Problem((chain,), link), Solver(limit))
    best = exhaustive(chain, link, limit)
    assert (found.step_seconds if found else math.inf) == best


@settings(max_examples=100, deadline=None)
@given(communicating(layers=3, reductions=True), links(), LIMITS)
@pytest.mark.slow
def test_with_collectives_of_the_model(chain: Chain, link: Link, limit: float) -> None:
    """They queue with gathers and reductions, or use a separate channel; the bound is never above."""
    assume(len(chain.gathers) + len(chain.reductions) <= 5)
    found = solved(Problem((chain,), link), Solver(limit))
    best = exhaustive(chain, link, limit)
    assert (found.step_seconds if found else math.inf) == best
    assert chain_bound(chain, link) <= exhaustive(chain, link) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(communicating(layers=3, reductions=True), links(), st.sampled_from([0.125, 0.25]))
def test_with_collectives_of_the_model_and_contention(chain: Chain, link: Link, contention: float) -> None:
    assume(len(chain.gathers) + len(chain.reductions) <= 5)
    link = replace(link, contention=contention)
    found = solved(Problem((chain,), link), Solver())
    assert found is not None
    best = exhaustive(chain, link)
    assert found.step_seconds == pytest.approx(best)
    assert chain_bound(chain, link) <= best * (1 + 1e-9)


def test_a_phase_with_only_collectives_of_the_model() -> None:
    chain = Chain("forward", (1.0, 0.0), (0, 0), fixed=(FixedCollective(0, 1, 1.0, 0, "sent"),))
    rate = Rate(latency=0, per_byte=0)
    link = Link(rate, rate, lambda _: 0.0, 2, contention=0.125)
    assert Solver()(Problem((chain,), link)).step_seconds == exhaustive(chain, link)


@settings(max_examples=100, deadline=None)
@given(communicating(layers=4, reductions=True), links(legs=True), LIMITS)
@pytest.mark.slow
def test_heuristic_with_collectives_of_the_model(chain: Chain, link: Link, limit: float) -> None:
    """Heuristic searches find schedules that the simulator confirms, above the bound."""
    solved(Problem((chain,), link), replace(HEURISTIC, limit=limit))


@settings(max_examples=100, deadline=None)
@given(st.booleans().flatmap(lambda legs: of_experts(layers=3, reductions=True, legs=legs)), LIMITS)
def test_transfers_over_other_axes(both: tuple[Chain, Link], limit: float) -> None:
    """Transfers of experts have separate costs and separate buckets; the bound is never above."""
    chain, link = both
    assume(len(chain.gathers) + len(chain.reductions) <= 5)
    found = solved(Problem((chain,), link), Solver(limit))
    best = exhaustive(chain, link, limit)
    assert (found.step_seconds if found else math.inf) == best
    assert chain_bound(chain, link) <= exhaustive(chain, link) * (1 + 1e-9)
    solved(Problem((chain,), link), replace(HEURISTIC, limit=limit))


def test_a_gather_follows_an_all_reduce_that_it_would_delay() -> None:
    """A gather that is needed late must not be launched just before the model's collective on the same link."""
    gathers = (Transfer("a", 1, at=0, last=0), Transfer("b", 10, at=3, last=3))
    reduced = FixedCollective(1, 1, 3.0, name="reduced over tp")
    chain = Chain("forward", (2.0, 0.0, 12.0, 1.0), (0,) * 4, gathers, fixed=(reduced,))
    link = Link(Rate(0, 1), Rate(0, 1), halves, num_shards=2)
    found = Solver()(Problem((chain,), link))
    # 1 for the first gather, 2 and 3 until the all-reduce ends, then 12 next to the second gather, and 1.
    assert found.step_seconds == found.lower_bound == exhaustive(chain, link) == 19
    ((start,),) = ([e.at for e in p.events if (e.action, e.bucket) == ("start", 1)] for p in found.schedule.placements)
    assert start == 2
    other = replace(chain, fixed=(FixedCollective(1, 1, 3.0, channel=1),))
    early = Schedule((place(other, link, found.schedule.placements[0].buckets),))
    assert simulate(Problem((other,), link), early).step_seconds == 19
    late = simulate(Problem((chain,), link), early)
    assert late.step_seconds > 19


@settings(max_examples=100, deadline=None)
@given(chains(layers=3, reductions=True), links(legs=True), LIMITS)
@pytest.mark.slow
def test_two_stage_reductions_equal_exhaustive_search(chain: Chain, link: Link, limit: float) -> None:
    """A reduce-scatter and an all-reduce, on one channel with gathers or on another; the bound is never above."""
    assume(len(chain.gathers) + len(chain.reductions) <= 5)
    found = solved(Problem((chain,), link), Solver(limit))
    best = exhaustive(chain, link, limit)
    assert (found.step_seconds if found else math.inf) == best
    assert chain_bound(chain, link) <= best * (1 + 1e-9)


def test_an_urgent_gather_precedes_a_second_stage() -> None:
    """Hand-computed: the second gather fits at 5, when the first is read; the first stage ended at 4. Gather
    first: 16.
    """
    gathers = Transfer("w0", 4, 0, 1), Transfer("w1", 4, 2, 2)
    chain = Chain("backward", (2.0, 2.0, 5.0), (0, 0, 0), gathers, (Transfer("w0", 2, 1),))
    link = Link(Rate(1, 0), Rate(1, 0), halves, num_shards=2, all_reduce=Rate(10, 0))
    found = solved(Problem((chain,), link), Solver(limit=6))
    assert found.step_seconds == exhaustive(chain, link, 6) == 16


@settings(max_examples=60, deadline=None)
@given(chains(layers=12, reductions=True), links(legs=True), LIMITS)
@pytest.mark.slow
def test_deep_chains_with_two_stages_respect_memory_and_bound(chain: Chain, link: Link, limit: float) -> None:
    solved(Problem((chain,), link), replace(HEURISTIC, limit=limit))


@settings(max_examples=100, deadline=None)
@given(chains(reductions=False, small=False), links())
def test_the_dynamic_program_is_exact_for_gathers(chain: Chain, link: Link) -> None:
    """Without copies and a limit the search cannot improve it."""
    assert HEURISTIC(Problem((chain,), link)).step_seconds == Solver()(Problem((chain,), link)).step_seconds


@settings(max_examples=60, deadline=None)
@given(chains(layers=4, reductions=True, small=False), links(separate=False))
def test_the_dynamic_program_is_exact_on_a_shared_link(chain: Chain, link: Link) -> None:
    assert HEURISTIC(Problem((chain,), link)).step_seconds == Solver()(Problem((chain,), link)).step_seconds


@settings(max_examples=100, deadline=None)
@given(chains(layers=12, reductions=True), links(), LIMITS)
def test_deep_chains_respect_memory_and_bound(chain: Chain, link: Link, limit: float) -> None:
    """Heuristic searches are feasible whenever a feasible schedule exists."""
    solved(Problem((chain,), link), replace(HEURISTIC, limit=limit))


def test_the_buffers_of_the_last_reductions_fit_too() -> None:
    """A packed bucket after the last item waits for memory for its buffer, and is dropped if there is none."""
    gradients = tuple(Transfer(f"g{i}", 4, 1, group=f"{i}", num_tensors=2, num_small=2, small_bytes=2) for i in (0, 1))
    chain, link = Chain("backward", (1.0,), (0,), (), gradients), Link(Rate(1, 1), Rate(1, 1), halves, 2)
    first, second = Bucketed("reduce", 0, 1), Bucketed("reduce", 1, 2, packed=True)
    placement = place(chain, link, [first, second], limit=8)
    assert simulate(Problem((chain,), link), Schedule((placement,))).peak == 8
    assert place(chain, link, [replace(first, packed=True), second], limit=8) is None


@st.composite
def steps(draw: st.DrawFn) -> Problem:
    """Draw forward and backward of up to three layers, all of which may stay gathered."""
    num = draw(st.integers(1, 3))
    sizes = [draw(st.integers(1, 9)) for _ in range(num)]

    def chain(name: str, order: list[int]) -> Chain:
        gathers = tuple(Transfer(f"w{i}", sizes[i], at, at) for at, i in enumerate(order))
        reductions = tuple(Transfer(f"w{i}", sizes[i], at + 1) for at, i in enumerate(order))
        seconds = tuple(float(draw(st.integers(0, 9))) for _ in order)
        base = tuple(draw(st.integers(0, 5)) for _ in order)
        return Chain(name, seconds, base, gathers, reductions if name == "backward" else ())

    chains = chain("forward", list(range(num))), chain("backward", list(reversed(range(num))))
    return Problem(chains, draw(links()), frozenset(f"w{i}" for i in range(num)))


@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(8, 60))
def test_kept_parameters_are_optimal(problem: Problem, limit: int) -> None:
    names = sorted(problem.keepable)
    subsets = [frozenset(n for i, n in enumerate(names) if bits >> i & 1) for bits in range(1 << len(names))]
    best = min(sum(exhaustive(chain, problem.link, limit) for chain in problem.keep(kept).chains) for kept in subsets)
    found = solved(problem, Solver(limit))
    assert (found.step_seconds if found else math.inf) == best
    assert lower_bound(problem, limit=limit) <= best


def test_keeps_parameters_that_backward_needs_first() -> None:
    """Both phases gather the root first. The last block's saved values would not fit next to it."""

    def gathers(last: int) -> tuple[Transfer, ...]:
        return Transfer("root", 4, at=0, last=last), Transfer("block", 4, at=1, last=1)

    chains = Chain("forward", (1.0,) * 3, (0,) * 3, gathers(2)), Chain("backward", (1.0,) * 3, (4, 0, 0), gathers(0))
    rate = Rate(latency=1.0, per_byte=0.1)
    problem = Problem(chains, Link(rate, rate, lambda _: 0.0, 2), frozenset({"root", "block"}))
    assert Solver(8, exact_kept=0)(problem).schedule.kept == {"root"}


@settings(max_examples=100, deadline=None)
@given(steps(), st.booleans())
@pytest.mark.slow
def test_the_bound_holds_for_a_given_choice(problem: Problem, keep: bool) -> None:
    kept = problem.keepable if keep else frozenset()
    best = sum(exhaustive(chain, problem.link) for chain in problem.keep(kept).chains)
    assert lower_bound(problem, kept=kept) <= best


@pytest.mark.parametrize(("room", "spared"), [(9, 0), (15, 15), (30, 30), (40, 40)])
def test_the_bound_subtracts_the_base(room: int, spared: int) -> None:
    """Only the limit minus backward's base can hold parameters that stay gathered."""
    link = Link(Rate(1.0, 1.0), Rate(1.0, 1.0), halves, num_shards=2)
    sizes = (10, 10, 20)
    forward = Chain("forward", (1.0,) * 3, (100,) * 3, tuple(Transfer(f"w{i}", n, i, i) for i, n in enumerate(sizes)))
    backward = replace(forward, name="backward")
    problem = Problem((forward, backward), link, frozenset(f"w{i}" for i in range(3)))
    expected = 3.0 if spared == 40 else chain_bound(backward, link, spared=spared)
    assert lower_bound(problem, limit=100 + room) == chain_bound(forward, link) + expected
    assert lower_bound(problem, limit=100 + room) > lower_bound(problem) or spared == 40


def test_the_bound_contains_the_closed_forms() -> None:
    """Head, compute and tail; the link's work; on a chain limited by each of them."""
    link = Link(Rate(1.0, 1.0), Rate(1.0, 1.0), halves, 2)
    for seconds, expected in ((100.0, 300 + 5 + 5), (0.0, 2 * 1 + 6 * 4)):
        gathers = tuple(Transfer(f"w{i}", 4, i, i) for i in range(3))
        reductions = tuple(Transfer(f"w{2 - i}", 4, i + 1) for i in range(3))
        chain = Chain("backward", (seconds,) * 3, (0,) * 3, gathers, reductions)
        assert lower_bound(Problem((chain,), link)) == expected


LAYERS = 126


def deep(layers: int) -> Problem:
    """Build a backward pass of equal layers, partly limited by the link."""
    gathers = tuple(Transfer(f"w{i}", 100 + i % 2, 2 * i, 2 * i + 1) for i in range(layers))
    reductions = tuple(Transfer(f"w{i}", 100 + i % 2, 2 * i + 2) for i in range(layers))
    chain = Chain("backward", (70.0, 90.0) * layers, (1000,) * 2 * layers, gathers, reductions)
    return Problem((chain,), Link(Rate(5.0, 0.5), Rate(5.0, 0.7), halves, 8))


def test_a_deep_stack_is_close_to_its_bound() -> None:
    assert solved(deep(LAYERS), Solver()).gap < 0.01


def test_two_layers_of_memory_are_enough_for_equal_layers() -> None:
    """Buffer depth two is already optimal."""
    problem = deep(LAYERS)
    (free,) = (solved(problem, Solver()),)
    tight = solved(problem, Solver(limit=1000 + 2 * 101 + 2 * 101))
    assert tight.step_seconds <= free.step_seconds * 1.01


def test_gathers_start_late_if_compute_is_the_limit() -> None:
    """If compute is the limit, a gather starts shortly before its use although memory is free."""
    link = Link(Rate(5.0, 0.1), Rate(5.0, 0.1), halves, 8)
    problem = replace(deep(LAYERS), link=link)
    found = solved(problem, Solver())
    (placement,) = found.schedule.placements
    starts = [e for e in placement.events if e.action == "start" and placement.buckets[e.bucket].kind == "gather"]
    others = [event for event in placement.events if event not in starts]
    early = (*(event._replace(at=0) for event in starts), *others)
    eager = simulate(problem, Schedule((replace(placement, events=early),)))
    assert found.step_seconds == pytest.approx(found.lower_bound)
    assert found.step_seconds <= eager.step_seconds
    assert found.peak <= 1000 + 4 * 101 < eager.peak


def test_infeasible_names_the_least_memory_and_its_use() -> None:
    problem = deep(4)
    with pytest.raises(
        ArgumentError, match=r"memory_limit of 1,100 bytes\. The least possible is 1,202 bytes"
    ) as error:
        Solver(limit=1100)(problem)
    assert "needed in backward: 1,000 activations" in str(error.value)
    assert solved(problem, Solver(limit=error.value.smallest)).peak == error.value.smallest == 1202


def test_the_same_problem_has_the_same_schedule() -> None:
    assert Solver(limit=1500)(deep(20)) == Solver(limit=1500)(deep(20))


def test_a_pinned_start_is_respected() -> None:
    """The user's prefetch: the gather of the third layer starts with the use of the first."""
    problem = deep(4)
    (chain,) = problem.chains
    pinned = tuple(replace(g, start=0) if g.name == "w2" else g for g in chain.gathers)
    problem = replace(problem, chains=(replace(chain, gathers=pinned),))
    for solver in (Solver(), HEURISTIC):
        (placement,) = solved(problem, solver).schedule.placements
        starts = {e.bucket: e.at for e in placement.events if e.action == "start"}
        (index,) = [i for i, b in enumerate(placement.buckets) if b.kind == "gather" and b.first <= 2 < b.end]
        assert starts[index] == 0


def test_an_empty_problem() -> None:
    problem = Problem((Chain("forward", (1.0,), (7,)),), Link(Rate(1, 1), Rate(1, 1), halves, 2))
    assert Solver()(problem) == Solution(Schedule((Solver()(problem).schedule.placements[0],)), 1.0, 1.0, 7)


@settings(max_examples=40, deadline=None)
@given(chains(layers=3, reductions=True), links(), LIMITS, st.floats(0.5, 1.5))
def test_finds_a_step_below_the_target_if_possible(chain: Chain, link: Link, limit: float, share: float) -> None:
    """The bound holds for all schedules of that length; any other result is also a valid schedule."""
    best = exhaustive(chain, link, limit)
    assume(best < math.inf)
    below = best * share
    found = solved(Problem((chain,), link), Solver(limit, below=below))
    assert found is not None
    assert (found.step_seconds < below) == (best < below)
    assert found.lower_bound <= best * (1 + 1e-9)
