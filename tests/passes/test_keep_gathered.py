"""keep-gathered: passes gathered parameters from forward to backward, as planned, instead of gathering again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.errors import PassError
from graphshard.ir.collective_regions import collectives
from graphshard.ir.plan import Plan
from graphshard.ir.printer import print_phase
from graphshard.ir.program import Program
from graphshard.passes import Bucketing, KeepGathered, MakePlan, Reorder
from graphshard.pipeline.pipeline import run_pass
from graphshard.schedule.build_problem import Constraints
from graphshard.schedule.planner import PlanByCost
from tests.helpers import COALESCED, Blocks, Scales, assert_gradients, captured, through

# Kernels only cost their bytes, so communication is never hidden.
COSTS = Costs(replace(load_profile("h100"), kernel_seconds=0.0))


class UnevenLayers(nn.Module):
    """Units with padded shards whose outermost dim in memory is not the sharded dim."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        with torch.no_grad():
            self.layers[1].weight.data = self.layers[1].weight.data.t().contiguous().t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x.sum()


def planned(model: nn.Module, batch: torch.Tensor, memory: float = 1.0) -> Program:
    """Plan with a fraction of the memory that keeping everything takes."""
    program = through(captured(model, (batch,), reshard_after_forward=True), "partition")
    planner = PlanByCost(COSTS, memory_limit=1 << 40, constraints=Constraints(keep=True), exact_reductions=False)
    if memory < 1:
        most = planner(program).prediction.peak_bytes
        planner = replace(planner, memory_limit=int(memory * most))
    run_pass(MakePlan(planner), program)
    return program


def gathers(program: Program, phase: str) -> set[str]:
    """Return the parameters that a phase gathers."""
    return {p for c in collectives(program.phases[phase]) if c.kind == "gather" for p in c.params}


def scheduled(program: Program) -> Program:
    """Run the rest of the pipeline; programs are verified after every pass."""
    for step in (KeepGathered(), Bucketing(), Reorder()):
        run_pass(step, program)
    return program


def test_before_and_after() -> None:
    program = planned(Scales(2), torch.ones(4))
    run_pass(KeepGathered(), program)
    assert program.history[-1].rewrites == 2
    assert_expected_inline(
        print_phase(program.phases["forward"]),
        """\
  %0: f32[2] = param:layers.0.w
  %1: f32[2] = param:layers.1.w
  %2: f32[4] = input:0
* %4: f32[4] = all_gather_into_tensor(%0, 2, shard)  # layers.0
  %5: f32[4] = wait_tensor(%4)  # layers.0
  %6: f32[4] = mul.Tensor(%2, %5)  # layers.0
* %7: f32[4] = all_gather_into_tensor(%1, 2, shard)  # layers.1
  %8: f32[4] = wait_tensor(%7)  # layers.1
  %9: f32[4] = mul.Tensor(%6, %8)  # layers.1
  return %9 as output:0
  return %0 as param:layers.0.w
  return %1 as param:layers.1.w
  return %2 as input:0
  return %5 as saved  # layers.0
  return %8 as saved  # layers.1
""",
    )
    assert_expected_inline(
        print_phase(program.phases["backward"]),
        """\
  %0: f32[2] = param:layers.0.w
  %1: f32[2] = param:layers.1.w
  %2: f32[4] = input:0
  %3: f32[4] = tangent:0
  %17: f32[4] = saved  # layers.0
  %18: f32[4] = saved  # layers.1
  %6: f32[4] = mul.Tensor(%2, %17)  # layers.0
  %10: f32[4] = mul.Tensor(%3, %6)  # layers.1
* %11: f32[2] = reduce_scatter_tensor(%10, avg, 2, shard)
  %12: f32[2] = wait_tensor(%11)
  %13: f32[4] = mul.Tensor(%3, %18)  # layers.1
  %14: f32[4] = mul.Tensor(%13, %2)  # layers.0
* %15: f32[2] = reduce_scatter_tensor(%14, avg, 2, shard)
  %16: f32[2] = wait_tensor(%15)
  return %16 as grad:layers.0.w
  return %12 as grad:layers.1.w
""",
    )


@pytest.mark.parametrize("model", [Blocks(4, 5, bias=True), UnevenLayers()])
@pytest.mark.quick_cases("model1")
def test_everything_that_pays_is_kept(model: nn.Module) -> None:
    program = planned(model, torch.randn(3, 5))
    regathered = gathers(program, "backward")
    assert set(program.plan.kept) == regathered != set()
    scheduled(program)
    assert gathers(program, "backward") == set()
    assert gathers(program, "forward") == {row.name for row in program.params}
    assert_gradients(program, model, [(torch.randn(3, 5),), (torch.randn(3, 5),)])


def test_the_memory_limit_selects_what_is_kept() -> None:
    """With less memory some layers are gathered again; each layer is either kept or gathered."""
    model = Blocks(4, 256)
    # The plan that keeps everything gathers ahead; with less memory it first reduces that, then what it keeps.
    whole, part = (planned(model, torch.randn(3, 256), memory) for memory in (1.0, 0.9))
    kept = set(part.plan.kept)
    assert set() < kept < set(whole.plan.kept)
    assert part.plan.prediction.step_seconds > whole.plan.prediction.step_seconds
    scheduled(part)
    assert gathers(part, "backward") == set(whole.plan.kept) - kept
    assert_gradients(part, model, [(torch.randn(3, 256),), (torch.randn(3, 256),)])


def test_idempotent_and_no_change_without_a_plan() -> None:
    program = planned(Blocks(2), torch.randn(3, 4))
    step = KeepGathered()
    assert step.rewrite(program) > 0
    assert step.rewrite(program) == 0
    plain = through(captured(Blocks(2), (torch.ones(3, 4),)), "partition")
    plain.plan = COALESCED(plain)
    assert step.rewrite(plain) == 0


@pytest.mark.slow
def test_bucketing_requires_the_pass() -> None:
    program = planned(Blocks(2), torch.randn(3, 4))
    with pytest.raises(PassError, match="bucket: plan and backward graph disagree"):
        run_pass(Bucketing(), program)


def test_preconditions() -> None:
    program = through(captured(Blocks(2), (torch.ones(3, 4),), grad=False), "partition")
    with pytest.raises(PassError, match="keep-gathered: the program has no plan; run a planner first"):
        run_pass(KeepGathered(), program)
    program.plan = Plan(kept=("layers.0.weight",))
    with pytest.raises(PassError, match="keeps parameters for a backward that the program does not have"):
        run_pass(KeepGathered(), program)
