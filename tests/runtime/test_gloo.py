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
from graphshard.runtime.collective_launches import add_up, exchange, exchange_reductions
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
    """Two ranks on the CPU without a memory limit, or wherever the user allows it, if it is cheaper."""
    assert all(exchanged(reordered(PlanByCost(GLOO))))
    assert not any(exchanged(reordered(PlanByCost(GLOO), world_size=4)))
    assert not any(exchanged(reordered(PlanByCost(GLOO, memory_limit=1 << 30))))
    assert all(exchanged(reordered(PlanByCost(GLOO, exact_reductions=False, pack_below=0))))  # several tensors
    assert all(exchanged(reordered(PlanByCost(GLOO, any_order=True), world_size=4)))
    assert all(exchanged(reordered(PlanByCost(GLOO, any_order=True, memory_limit=1 << 30), world_size=4)))
    h100 = Costs(load_profile("h100"))  # no faster than a reduce-scatter of NCCL
    assert not any(exchanged(reordered(PlanByCost(h100, any_order=True), world_size=4)))


def test_costs() -> None:
    """The link of the problem takes the cheaper one; in order it is always the exchange, with a buffer."""
    for size in (2, 4):
        axis = Axis("shard", size, "shard")
        plain, either = make_link(GLOO, axis), make_link(GLOO, axis, exchange=True)
        for count in (1, 2):
            assert either.reduce(1 << 20, count) == pytest.approx(float(GLOO.exchange(1 << 20, axis, count)))
            assert either.reduce(1 << 20, count) < plain.reduce(1 << 20, count)
        assert (plain.receives, either.receives) == (False, size > 2)
    h100, axis = Costs(load_profile("h100")), Axis("shard", 8, "shard")
    plain, either, in_order = (make_link(h100, axis, **how) for how in ({}, {"exchange": True}, {"in_order": True}))
    assert plain.reduce(1 << 30, 1) == either.reduce(1 << 30, 1) < in_order.reduce(1 << 30, 1)
    assert (plain.receives, either.receives, in_order.receives) == (False, False, True)


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
    sums = [node for node in nodes if node.target is add_up]
    assert len(sums) == len(reductions) == sum(node.target is exchange for node in nodes)
    assert all(node.args[0].target is WAIT and node.args[2] == "avg" for node in sums)


def test_gloo_is_detected_by_group(fake_world: FakeWorld) -> None:
    """Not by device: ranks that share a GPU use gloo, which only coalesces gathers in host memory."""
    fake_world(2)
    assert not on_gloo(dist.group.WORLD, "cpu")
    for backend, found in {"gloo": (True, True), "cpu:gloo": (True, False)}.items():
        reset_distributed()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        assert (on_gloo(dist.group.WORLD, "cpu"), on_gloo(dist.group.WORLD, "cuda")) == found
