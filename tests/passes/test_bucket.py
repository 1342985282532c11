"""bucket: merges collectives as planned."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from graphshard.errors import PassError
from graphshard.ir.collective_regions import CollectiveRegions, collectives
from graphshard.ir.graph import c10d, emit
from graphshard.ir.mesh import Mesh
from graphshard.ir.plan import Plan
from graphshard.ir.printer import print_phase, print_program
from graphshard.ir.program import Program
from graphshard.passes import Bucketing, MakePlan, Reorder
from graphshard.pipeline.instrumentation import Observer
from graphshard.pipeline.pipeline import run_pass
from graphshard.pipeline.rules import verify
from graphshard.schedule.fsdp2_order import PlanByUnit
from tests.helpers import (
    COALESCED,
    PACKED,
    Affine,
    Blocks,
    assert_gradients,
    calls,
    captured,
    copied,
    padded_shard,
    step,
    target_name,
    through,
)

INPUT = (torch.ones(2),)
PLANNERS = pytest.mark.parametrize("planner", [COALESCED, PACKED], ids=["coalesced", "packed"])


# A third axis adds an all-reduce after the one over replicas.
THIRD = Mesh.of_shape((2, 2)).with_regather(2)


@functools.cache
def _partitioned(world_size: int, depth: int) -> Program:
    """Partition Affine for depth 0, otherwise layers with two parameters each; backward gathers nothing."""
    model, args = (Blocks(depth, bias=True), (torch.ones(3, 4),)) if depth else (Affine(), INPUT)
    return through(captured(model, args, world_size=world_size, reshard_after_forward=False), "partition")


def _planned(planner: PlanByUnit, *, depth: int = 0, world_size: int = 2) -> Program:
    program = copied(_partitioned(world_size, depth))
    program.plan = planner(program)
    return program


def test_coalesced_gathers() -> None:
    """Two gathers become one launch of two tensors, in registration order, without copies."""
    program = _planned(COALESCED)
    assert_expected_inline(
        print_phase(program.phases["forward"]),
        """\
  %0: f32[2] = param:b
  %1: f32[2, 2] = param:a
  %2: f32[2] = input:0
* %4: f32[4, 2] = all_gather_into_tensor(%1, 2, shard)
  %5: f32[4, 2] = wait_tensor(%4)
  %6: f32[4, 2] = mul.Tensor(%5, %2)
* %7: f32[4] = all_gather_into_tensor(%0, 2, shard)
  %8: f32[4] = wait_tensor(%7)
  %9: f32[4, 1] = unsqueeze(%8, 1)
  %10: f32[4, 2] = add.Tensor(%6, %9)
  return %10 as output:0
  return %2 as input:0
  return %5 as shown:a
  return %8 as shown:b
""",
    )
    run_pass(Bucketing(), program)
    assert program.history[-1].rewrites == 2
    assert_expected_inline(
        print_phase(program.phases["forward"]),
        """\
  %0: f32[2] = param:b
  %1: f32[2, 2] = param:a
  %2: f32[2] = input:0
* %18: (f32[4], f32[4, 2]) = all_gather_into_tensor_coalesced([%0, %1], 2, shard)  # [gather (root) in forward]
  %19: f32[4] = getitem(%18, 0)
  %20: f32[4, 2] = getitem(%18, 1)
  %21: f32[4] = wait_tensor(%19)  # [gather (root) in forward]
  %22: f32[4, 2] = wait_tensor(%20)  # [gather (root) in forward]
  %6: f32[4, 2] = mul.Tensor(%22, %2)
  %9: f32[4, 1] = unsqueeze(%21, 1)
  %10: f32[4, 2] = add.Tensor(%6, %9)
  return %10 as output:0
  return %2 as input:0
  return %22 as shown:a
  return %21 as shown:b
""",
    )


def test_coalesced_reductions() -> None:
    program = _planned(COALESCED)
    assert_expected_inline(
        print_phase(program.phases["backward"]),
        """\
  %2: f32[2] = input:0
  %3: f32[4, 2] = tangent:0
  %11: f32[4, 1] = sum.dim_IntList(%3, [1], True)
  %12: f32[4] = squeeze.dim(%11, 1)
* %13: f32[2] = reduce_scatter_tensor(%12, avg, 2, shard)
  %14: f32[2] = wait_tensor(%13)
  %15: f32[4, 2] = mul.Tensor(%3, %2)
* %16: f32[2, 2] = reduce_scatter_tensor(%15, avg, 2, shard)
  %17: f32[2, 2] = wait_tensor(%16)
  return %14 as grad:b
  return %17 as grad:a
""",
    )
    run_pass(Bucketing(), program)
    assert_expected_inline(
        print_phase(program.phases["backward"]),
        """\
  %2: f32[2] = input:0
  %3: f32[4, 2] = tangent:0
  %11: f32[4, 1] = sum.dim_IntList(%3, [1], True)
  %12: f32[4] = squeeze.dim(%11, 1)
  %15: f32[4, 2] = mul.Tensor(%3, %2)
* %23: (f32[2], f32[2, 2]) = reduce_scatter_tensor_coalesced([%12, %15], avg, 2, shard)  # [reduce (root) in backward]
  %24: f32[2] = getitem(%23, 0)
  %25: f32[2, 2] = getitem(%23, 1)
  %26: f32[2] = wait_tensor(%24)  # [reduce (root) in backward]
  %27: f32[2, 2] = wait_tensor(%25)  # [reduce (root) in backward]
  return %26 as grad:b
  return %27 as grad:a
""",
    )


def test_packed_gathers() -> None:
    """Shards are copied to one flat buffer. A column of the result is a parameter; `clone` copies it out."""
    program = _planned(PACKED)
    run_pass(Bucketing(), program)
    assert_expected_inline(
        print_phase(program.phases["forward"]),
        """\
  %0: f32[2] = param:b
  %1: f32[2, 2] = param:a
  %2: f32[2] = input:0
  %18: f32[2] = view(%0, [-1])
  %19: f32[4] = view(%1, [-1])
  %20: f32[6] = cat([%18, %19])
* %21: f32[12] = all_gather_into_tensor(%20, 2, shard)  # [gather (root) in forward]
  %22: f32[12] = wait_tensor(%21)  # [gather (root) in forward]
  %23: f32[2, 6] = view(%22, [2, -1])
  %24: (f32[2, 2], f32[2, 4]) = split_with_sizes(%23, [2, 4], 1)
  %25: f32[2, 2] = getitem(%24, 0)
  %26: f32[2, 4] = getitem(%24, 1)
  %27: f32[2, 2] = clone(%25, memory_format=torch.contiguous_format)
  %28: f32[4] = view(%27, [4])
  %29: f32[2, 4] = clone(%26, memory_format=torch.contiguous_format)
  %30: f32[4, 2] = view(%29, [4, 2])
  %6: f32[4, 2] = mul.Tensor(%30, %2)
  %9: f32[4, 1] = unsqueeze(%28, 1)
  %10: f32[4, 2] = add.Tensor(%6, %9)
  return %10 as output:0
  return %2 as input:0
  return %30 as shown:a
  return %28 as shown:b
""",
    )


def test_packed_reductions() -> None:
    program = _planned(PACKED)
    run_pass(Bucketing(), program)
    assert_expected_inline(
        print_phase(program.phases["backward"]),
        """\
  %2: f32[2] = input:0
  %3: f32[4, 2] = tangent:0
  %11: f32[4, 1] = sum.dim_IntList(%3, [1], True)
  %12: f32[4] = squeeze.dim(%11, 1)
  %15: f32[4, 2] = mul.Tensor(%3, %2)
  %31: f32[2, 2] = view(%12, [2, -1])
  %32: f32[2, 4] = view(%15, [2, -1])
  %33: f32[2, 6] = cat([%31, %32], 1)
  %34: f32[12] = view(%33, [-1])
* %35: f32[6] = reduce_scatter_tensor(%34, avg, 2, shard)  # [reduce (root) in backward]
  %36: f32[6] = wait_tensor(%35)  # [reduce (root) in backward]
  %37: (f32[2], f32[4]) = split_with_sizes(%36, [2, 4])
  %38: f32[2] = getitem(%37, 0)
  %39: f32[4] = getitem(%37, 1)
  %40: f32[2] = view(%38, [2])
  %41: f32[2, 2] = view(%39, [2, 2])
  return %40 as grad:b
  return %41 as grad:a
""",
    )


class _Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.ones(4))
        self.large = nn.Parameter(torch.ones(64))
        self.tiny = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small * x[:4] + self.large[:4] + self.tiny.repeat(2)


@pytest.mark.parametrize("limit", [0, 20, 10**6])
@pytest.mark.quick_cases("20", "1000000")
def test_small_tensors_are_packed_and_sent_with_the_others(limit: float) -> None:
    """One launch in each case: of three tensors, of a buffer and a tensor, of a buffer."""
    program = through(captured(_Three(), (torch.ones(4),)), "bucket", planner=PlanByUnit(limit, limit))
    for phase in program.phases.values():
        (collective,) = collectives(phase)
        assert len(collective.waits) == {0: 3, 20: 2, 10**6: 1}[limit]
        assert sorted(collective.params) == ["large", "small", "tiny"]
    assert_gradients(program, _Three(), [(torch.randn(4),), (torch.randn(4),)])


def test_a_single_tensor_is_left_alone() -> None:
    program = through(captured(Blocks(2), (torch.ones(3, 4),)), "partition")
    program.plan = PACKED(program)
    before = print_program(program)
    run_pass(Bucketing(), program)
    assert re.sub(r"(  #)? \[.*\]$", "", print_program(program), flags=re.M) == re.sub(
        r"(  #)? \[.*\]$", "", before, flags=re.M
    )
    assert program.history[-1].rewrites == 5


@PLANNERS
def test_a_second_run_changes_nothing(planner: PlanByUnit) -> None:
    program = _planned(planner)
    run_pass(Bucketing(), program)
    before = print_program(program)
    run_pass(Bucketing(), program)
    assert (program.history[-1].rewrites, print_program(program)) == (0, before)


def test_a_plan_is_needed() -> None:
    program = through(captured(Affine(), INPUT), "partition")
    with pytest.raises(PassError, match="bucket: the program has no plan; run a planner first"):
        run_pass(Bucketing(), program)


def test_rejects_a_plan_for_another_model() -> None:
    program = _planned(COALESCED)
    assert program.plan is not None
    gather, reduction = program.plan.buckets
    program.plan = Plan((replace(gather, params=("a",)), reduction), program.plan.events)
    with pytest.raises(
        PassError, match=r"bucket: plan and forward graph disagree about \[\('gather', 'shard', 'b'\)\]"
    ):
        run_pass(Bucketing(), program)


def test_a_bucket_that_was_not_merged_is_reported() -> None:
    program = _planned(COALESCED)
    program.established |= Bucketing.establishes
    with pytest.raises(PassError, match=r"planned_buckets in forward: the gather of .* is no bucket of the plan"):
        verify(program, "bucket")


@PLANNERS
def test_the_compute_keeps_its_order(planner: PlanByUnit) -> None:
    """Positions in a plan keep their meaning, because bucketing adds no compute."""
    program = _planned(planner, depth=2, world_size=3)
    before = {name: CollectiveRegions.of(phase).compute for name, phase in program.phases.items()}
    run_pass(Bucketing(), program)
    assert program.history[-1].rewrites == 4
    assert {name: CollectiveRegions.of(phase).compute for name, phase in program.phases.items()} == before


@pytest.mark.parametrize("world_size", [2, 3])
@PLANNERS
def test_values_do_not_depend_on_buckets(planner: PlanByUnit, world_size: int) -> None:
    torch.manual_seed(0)
    model, batches = Blocks(2, bias=True), [(torch.randn(3, 4),) for _ in range(world_size)]
    program = _planned(planner, depth=2, world_size=world_size)
    expected = step(program, model, batches)
    run_pass(Bucketing(), program)
    for found, wanted in zip(step(program, model, batches), expected):
        assert {n: v.tolist() for n, v in found.items() if n in wanted and not n.startswith("saved")} == {
            n: v.tolist() for n, v in wanted.items() if n in found and not n.startswith("saved")
        }
    assert_gradients(program, model, batches)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_packed_reduction_has_fsdp2s_layout(world_size: int) -> None:
    """One row per rank, with the padded chunks of all gradients in registration order."""
    torch.manual_seed(0)
    model, batches = Blocks(1, bias=True), [(torch.randn(3, 4),) for _ in range(world_size)]
    program = through(captured(model, batches[0], world_size=world_size), "bucket", planner=PACKED)
    sent: list[list[torch.Tensor]] = []
    step(program, model, batches, sent=sent)
    (buffers,) = sent
    for buffer, batch in zip(buffers, batches):
        grads = torch.autograd.grad(model(*batch), list(model.parameters()))
        torch.testing.assert_close(buffer, torch._chunk_cat(grads, dim=0, num_chunks=world_size).flatten())


def test_a_packed_gather_holds_the_shards_in_order() -> None:
    model = Affine()
    program = through(captured(model, INPUT), "bucket", planner=PACKED)
    (gather,) = calls(program.phases["forward"], "all_gather_into_tensor")
    cat = gather.args[0]
    assert target_name(cat) == "cat"
    names = {node: slot.name for node, slot in program.phases["forward"].slot_of().items()}
    assert [names[view.args[0]] for view in cat.args[0]] == ["b", "a"]
    assert [padded_shard(model.get_parameter(n), program.params[n], 0).numel() for n in "ba"] == [2, 4]


class _Transposed(nn.Module):
    """Gradients of `w` and `v` are transposed results of a batched matmul, the gradient of `s` is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 2, 3))
        self.v = nn.Parameter(torch.randn(4, 2, 3))
        self.s = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, (self.w * self.v).transpose(1, 2)).sum() + torch.bmm(x, self.w.mT).sum() + self.s.sum()


@PLANNERS
def test_gradients_that_are_not_contiguous(planner: PlanByUnit) -> None:
    model, batches = _Transposed(), [(torch.randn(4, 5, 3),) for _ in range(2)]
    program = through(captured(model, batches[0]), "bucket", planner=planner)
    assert_gradients(program, model, batches)


@PLANNERS
def test_all_reduces_over_two_axes_are_two_buckets(planner: PlanByUnit) -> None:
    """Collectives of a plan are identified by axis, too, because a gradient may be all-reduced over several."""
    program = replace(captured(Blocks(2, bias=True), (torch.ones(3, 4),)), mesh=THIRD)
    program = through(program, "partition")
    graph = program.phases["backward"].module.graph
    for collective in collectives(program.phases["backward"]):
        if collective.kind == "all_reduce":
            (wait,) = collective.waits
            with graph.inserting_after(wait):
                launch = emit(graph, c10d.all_reduce.default, wait, "avg", "shard/2", like=wait)
            with graph.inserting_after(launch):
                again = emit(graph, c10d.wait_tensor.default, launch, like=wait)
            wait.replace_all_uses_with(again)
            launch.replace_input_with(again, wait)
    for one in (MakePlan(planner), Bucketing(), Reorder()):
        run_pass(one, program, Observer("off"))
    assert program.plan is not None
    reduced = [bucket for bucket in program.plan.buckets if bucket.kind == "all_reduce"]
    assert [bucket.axis for bucket in reduced] == ["replicate", "shard/2"] * 2
    found = {c.node.meta["bucket"]: (c.axis, c.params) for c in collectives(program.phases["backward"])}
    for bucket in reduced:
        axis, params = found[bucket.name]
        assert (axis, sorted(params)) == (bucket.axis, sorted(bucket.members))
    waited = [event.bucket for event in program.plan.events["backward"] if event.action == "wait"]
    assert waited[-4:] == [*(b.name for b in reduced if b.axis == "replicate"), *(b.name for b in reduced[1::2])]
