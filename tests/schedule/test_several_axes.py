"""Cost-based plans for collectives over several axes: replicas, regather among neighbors, a tensor axis."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.errors import InfeasibleError
from graphshard.ir.mesh import Mesh
from graphshard.ir.plan import Plan
from graphshard.ir.program import Program
from graphshard.passes import RegatherInSubgroup
from graphshard.pipeline.pipeline import run_pass
from graphshard.schedule.build_problem import Settings, build
from graphshard.schedule.fsdp2_order import PlanByUnit
from graphshard.schedule.planner import PlanByCost
from tests.helpers import Blocks, captured, copied, through

H100 = load_profile("h100")
BATCH = (torch.ones(3, 16),)


def _replicated(shape: tuple[int, int]) -> Program:
    return through(captured(Blocks(4, 16, bias=True), BATCH, world_size=shape), "partition")


def _regathered() -> Program:
    """Partition for 32 ranks, of which eight on a node gather again."""
    program = captured(Blocks(4, 16, bias=True), BATCH, world_size=32, reshard_after_forward=True)
    program = through(replace(program, mesh=Mesh.of_shape(32).with_regather(8)), "partition")
    run_pass(RegatherInSubgroup(), program)
    return program


PROGRAMS = {
    "replicas on other nodes": _replicated((4, 8)),
    "all in a node": _replicated((2, 4)),
    "all between nodes": _replicated((2, 64)),
    "replicas only": _replicated((8, 1)),
    "neighbors gather again": _regathered(),
}


def _planner(program: Program, **options: object) -> PlanByCost:
    return PlanByCost(Costs(H100, mesh=program.mesh), **{"exact_reductions": False, **options})


def _check(plan: Plan) -> None:
    """Check that each bucket has one start and one wait, and that second stages start when the first end."""
    for phase, events in plan.events.items():
        names = [bucket.name for bucket in plan.buckets if bucket.phase == phase]
        assert sorted((e.bucket, e.action) for e in events) == sorted(itertools.product(names, ("start", "wait")))
        at = {(e.bucket, e.action): index for index, e in enumerate(events)}
        legs = {b.members: b.name for b in plan.buckets if b.phase == phase and b.kind == "reduce"}
        for bucket in plan.buckets:
            if bucket.phase == phase and bucket.kind == "all_reduce" and legs:
                assert at[bucket.name, "start"] == at[legs[bucket.members], "wait"] + 1


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.quick_cases("all in a node", "all between nodes", "replicas only", "neighbors gather again")
def test_passes_and_rules_accept_the_plan(name: str) -> None:
    program = PROGRAMS[name]
    plan = through(copied(program), "reorder", planner=_planner(program)).plan
    _check(plan)
    assert plan.prediction.lower_bound <= plan.prediction.step_seconds
    kinds = {bucket.kind for bucket in plan.buckets}
    assert kinds == ({"gather"} if name != "replicas only" else set()) | (
        {"all_reduce"} if name == "replicas only" else {"reduce"} if "again" in name else {"reduce", "all_reduce"}
    )


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.quick_cases("replicas only", "neighbors gather again")
def test_a_memory_limit_holds_or_is_infeasible(name: str) -> None:
    program = PROGRAMS[name]
    free = _planner(program)(program).prediction.peak_bytes
    with pytest.raises(InfeasibleError, match=r"no schedule fits in a memory_limit of 1,000 bytes\. The l") as error:
        _planner(program, memory_limit=1000)(program)
    least = error.value.smallest
    for limit in {least, (least + free) // 2}:
        plan = through(copied(program), "reorder", planner=_planner(program, memory_limit=limit)).plan
        _check(plan)
        assert plan.prediction.peak_bytes <= limit
    with pytest.raises(InfeasibleError):
        _planner(program, memory_limit=least - 1)(program)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "replicas only"])
@pytest.mark.parametrize("exact", [False, True])
def test_fsdp2s_order_equals_the_plan_by_unit(name: str, *, exact: bool) -> None:
    """If no deviation pays, buckets and events equal the plan of the planner without costs.

    With replicas only, the wait for an all-reduce is at the start of the next one.
    """
    program = PROGRAMS[name]
    ours = _planner(program, worth=math.inf, exact_reductions=exact)(program)
    theirs = PlanByUnit(pack_reductions_below=None if exact else 64 * 1024)(program)

    def outline(plan: Plan) -> set[tuple[object, ...]]:
        buckets = {b.name: (b.kind, b.phase, b.params, b.packed, b.axis, b.num_bytes) for b in plan.buckets}
        events = {p: [(e.action, e.bucket, e.at) for e in each] for p, each in plan.events.items()}
        found = {(*buckets[name], action, at) for each in events.values() for action, name, at in each}
        assert len(found) == sum(map(len, plan.events.values()))
        return found

    assert outline(ours) == outline(theirs)


def test_each_phase_has_the_link_of_its_axes() -> None:
    """Regathers run within a node, next to reductions between nodes; second stages use the link of the replicas."""
    program = PROGRAMS["neighbors gather again"]
    problem = build(program, Costs(H100, mesh=program.mesh), Settings()).problem
    forward, backward, _ = problem.chains
    first, again = (problem.link_of(chain) for chain in (forward, backward))
    assert again.gather(10**8, 1) < first.gather(10**8, 1) / 2
    assert (first.separate, again.separate, again.num_pieces) == (False, True, 8)
    on = {}
    for name in ("replicas on other nodes", "all in a node", "all between nodes"):
        program = PROGRAMS[name]
        link = build(program, Costs(H100, mesh=program.mesh), Settings()).problem.links["backward"]
        on[name] = link.all_reduce_on, link.all_reduce_on in (link.channel("gather"), link.channel("reduce"))
        assert link.all_reduce(8000 * program.mesh.shard.size, 1) == Costs(H100, mesh=program.mesh).collective(
            "all_reduce", 8000, 1, program.mesh.replicate
        )
    assert on == {
        "replicas on other nodes": (1, False),
        "all in a node": (0, True),
        "all between nodes": (0, True),
    }


@pytest.mark.slow
def test_kept_parts_for_the_regather() -> None:
    """Hand-computed: forward keeps an eighth of each gathered parameter that backward gathers."""
    plain = captured(Blocks(4, 16, bias=True), BATCH, world_size=32, reshard_after_forward=True)
    programs = PROGRAMS["neighbors gather again"], through(plain, "partition")
    with_pieces, without = (build(program, Costs(H100), Settings()).problem.chains for program in programs)
    again = [g.num_bytes for g in with_pieces[1].gathers]
    assert again == [g.num_bytes for g in without[1].gathers]
    assert with_pieces[0].base[-1] - without[0].base[-1] == sum(again) // 8
    assert with_pieces[0].base[0] == without[0].base[0] < with_pieces[0].base[-1]
