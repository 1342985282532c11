"""Reductions as all-to-all on gloo: when they are used, their cost, and their code."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.ir.graph import REDUCES, WAIT
from graphshard.ir.mesh import Axis
from graphshard.ir.printer import print_communication
from graphshard.ir.program import Program
from graphshard.passes import MakePlan
from graphshard.pipeline.pipeline import Pipeline, run_pass
from graphshard.runtime.collective_launches import add_own_half, exchange_reductions, swap_halves
from graphshard.runtime.process_groups import on_gloo
from graphshard.schedule.axis_links import make_link
from graphshard.schedule.planner import PlanByCost
from tests.helpers import Blocks, captured
from tests.ranks import FakeWorld, reset_distributed

GLOO = Costs(load_profile("cpu-gloo"))
BATCH = (torch.randn(3, 16),)


def reordered(planner: PlanByCost, world_size: int = 2) -> Program:
    """Plan and bucket two units with two parameters each."""
    program = captured(Blocks(2, 16, bias=True), BATCH, world_size=world_size)
    for step in Pipeline().replace("plan", MakePlan(planner)):
        run_pass(step, program)
    return program


def exchanged(program: Program) -> list[bool]:
    return [bucket.exchanged for bucket in program.plan.buckets if bucket.kind == "reduce"]


@pytest.mark.slow
def test_where_they_are_used() -> None:
    """Two ranks on the CPU, if it is cheaper and without a memory limit."""
    assert all(exchanged(reordered(PlanByCost(GLOO))))
    assert not any(exchanged(reordered(PlanByCost(GLOO), world_size=4)))
    assert not any(exchanged(reordered(PlanByCost(GLOO, memory_limit=1 << 30))))
    assert not any(exchanged(reordered(PlanByCost(GLOO, exact_reductions=False, pack_below=0))))  # several tensors


def test_costs() -> None:
    """The link of the problem takes the cheaper one; all-to-all is for one tensor."""
    axis = Axis("shard", 2, "shard")
    plain, either = make_link(GLOO, axis), make_link(GLOO, axis, exchange=True)
    assert either.reduce(1 << 20, 1) == pytest.approx(float(GLOO.exchange(1 << 20, axis)))
    assert either.reduce(1 << 20, 1) < plain.reduce(1 << 20, 1)
    assert either.reduce(1 << 20, 2) == plain.reduce(1 << 20, 2)


def test_operators() -> None:
    """Every marked reduction becomes an all-to-all, a wait and a sum; ranks compare it."""
    program = reordered(PlanByCost(GLOO))
    reduced = [line for line in print_communication(program) if line.startswith("backward: reduce")]
    assert reduced
    assert all(line.endswith(", by all-to-all") for line in reduced)
    phase = program.phases["backward"]
    reductions = [node for node in phase.module.graph.nodes if node.target in REDUCES]
    exchange_reductions(phase)
    phase.module.graph.lint()
    nodes = list(phase.module.graph.nodes)
    assert not any(node.target in REDUCES for node in nodes)
    sums = [node for node in nodes if node.target is add_own_half]
    assert len(sums) == len(reductions) == sum(node.target is swap_halves for node in nodes)
    assert all(node.args[0].target is WAIT and node.args[2] == "avg" for node in sums)


def test_gloo_is_detected_by_group(fake_world: FakeWorld) -> None:
    """Not by device: ranks that share a GPU use gloo, which only coalesces gathers in host memory."""
    fake_world(2)
    assert not on_gloo(dist.group.WORLD, "cpu")
    for backend, found in {"gloo": (True, True), "cpu:gloo": (True, False)}.items():
        reset_distributed()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        assert (on_gloo(dist.group.WORLD, "cpu"), on_gloo(dist.group.WORLD, "cuda")) == found
