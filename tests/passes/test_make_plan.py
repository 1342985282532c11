"""plan: the planner's plan becomes the program's plan; the graph does not change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline

from graphshard.errors import PassError
from graphshard.ir.plan import Plan
from graphshard.ir.printer import print_program
from graphshard.ir.program import Program
from graphshard.passes import MakePlan
from graphshard.pipeline.pipeline import run_pass
from graphshard.schedule.fsdp2_order import PlanByUnit
from tests.helpers import COALESCED, PACKED, Blocks, captured, through


@pytest.fixture
def program() -> Program:
    return through(captured(Blocks(2, bias=True), (torch.ones(3, 4),)), "partition")


def shown(plan: Plan) -> str:
    """Print the buckets, and for each phase starts (+) and waits (-) with their compute position."""
    lines = [f"{bucket.name}: {', '.join(bucket.members)}" for bucket in plan.buckets]
    for phase, events in plan.events.items():
        lines += [f"{phase} {event.at:2} {'+' if event.action == 'start' else '-'} {event.bucket}" for event in events]
    return "\n".join(lines)


def test_before_and_after(program: Program) -> None:
    before = print_program(program)
    run_pass(MakePlan(COALESCED), program)
    assert print_program(program) == before
    assert_expected_inline(
        shown(program.plan),
        """\
gather layers.0 in forward: layers.0.weight, layers.0.bias
gather layers.1 in forward: layers.1.weight, layers.1.bias
gather layers.1 in backward: layers.1.weight
reduce layers.1 in backward: layers.1.weight, layers.1.bias
reduce layers.0 in backward: layers.0.weight, layers.0.bias
forward  0 + gather layers.0 in forward
forward  0 - gather layers.0 in forward
forward  0 + gather layers.1 in forward
forward  2 - gather layers.1 in forward
backward  0 + gather layers.1 in backward
backward  2 - gather layers.1 in backward
backward  6 + reduce layers.1 in backward
backward 12 - reduce layers.1 in backward
backward 12 + reduce layers.0 in backward
backward 12 - reduce layers.0 in backward""",
    )


def test_rewrites_count_buckets_and_a_second_run_counts_none(program: Program) -> None:
    for planner, expected in ((COALESCED, True), (COALESCED, False), (PACKED, True)):
        run_pass(MakePlan(planner), program)
        assert program.history[-1].rewrites == (len(program.plan.buckets) if expected else 0)


def test_a_plan_without_buckets_is_a_rewrite() -> None:
    """One rank launches no collectives, but the program still gets a plan."""
    program = through(captured(Blocks(1), (torch.ones(3, 4),), world_size=1), "partition")
    run_pass(MakePlan(PlanByUnit()), program)
    assert program.plan is not None
    assert (program.plan.buckets, program.history[-1].rewrites) == ((), 1)


def test_any_function_is_a_planner(program: Program) -> None:
    mine = replace(COALESCED(program), kept=("mine",))
    assert MakePlan(lambda _: mine).rewrite(program) == len(mine.buckets)
    assert program.plan is mine


def test_without_a_planner_the_pipeline_plans_by_unit(program: Program) -> None:
    run_pass(MakePlan(), program)
    assert program.plan == PlanByUnit()(program)
    with pytest.raises(PassError, match=r"plan: it has no planner; give it one, such as MakePlan\("):
        MakePlan().rewrite(program)


def test_it_comes_after_partition() -> None:
    with pytest.raises(PassError, match="plan: the program is not partitioned yet; run this pass after 'partition'"):
        run_pass(MakePlan(COALESCED), captured(Blocks(1), (torch.ones(3, 4),)))
