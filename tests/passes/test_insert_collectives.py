"""insert-collectives: replaces parameters by shards, with gathers and reductions."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard.errors import PassError
from graphshard.ir.mesh import Axis
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.printer import print_program
from graphshard.ir.transport import Division, division
from graphshard.passes import InsertCollectives
from graphshard.pipeline.pipeline import run_pass
from graphshard.pipeline.rules import verify
from tests.helpers import (
    Scale,
    Tied,
    assert_gradients,
    calls,
    captured,
    result,
    step,
    target_name,
    through,
)
from tests.ranks import FakeWorld

FP16 = MixedPrecisionPolicy(reduce_dtype=torch.float16)


def test_before_and_after() -> None:
    """A gather before the first use of the parameter, a reduction after its gradient."""
    program = captured(Scale(4), (torch.ones(4),))
    assert_expected_inline(
        print_program(program),
        """\
joint:
  %0: f32[4] = param:w
  %1: f32[4] = input:0
  %2: f32[4] = tangent:0  # (backward)
  %3: f32[4] = mul.Tensor(%1, %0)
  %4: f32[4] = mul.Tensor(%2, %1)  # (backward)
  return %3 as output:0
  return %4 as grad:w
""",
    )
    run_pass(InsertCollectives(), program)
    assert program.history[-1].rewrites == 2
    assert_expected_inline(
        print_program(program),
        """\
joint:
  %0: f32[2] = param:w
  %1: f32[4] = input:0
  %2: f32[4] = tangent:0  # (backward)
* %5: f32[4] = all_gather_into_tensor(%0, 2, shard)
  %6: f32[4] = wait_tensor(%5)
  %3: f32[4] = mul.Tensor(%1, %6)
  %4: f32[4] = mul.Tensor(%2, %1)  # (backward)
* %7: f32[2] = reduce_scatter_tensor(%4, avg, 2, shard)  # (backward)
  %8: f32[2] = wait_tensor(%7)  # (backward)
  return %3 as output:0
  return %8 as grad:w
""",
    )


def test_uneven_shards() -> None:
    """4 rows over 3 ranks are shards of 2: two rows are cut after the gather and padded before the reduction."""
    program = captured(Scale(4), (torch.ones(4),), world_size=3)
    run_pass(InsertCollectives(), program)
    assert_expected_inline(
        print_program(program),
        """\
joint:
  %0: f32[2] = param:w
  %1: f32[4] = input:0
  %2: f32[4] = tangent:0  # (backward)
* %3: f32[6] = all_gather_into_tensor(%0, 3, shard)
  %4: f32[6] = wait_tensor(%3)
  %5: f32[4] = slice.Tensor(%4, 0, 0, 4)
  %6: f32[4] = mul.Tensor(%1, %5)
  %7: f32[4] = mul.Tensor(%2, %1)  # (backward)
  %8: f32[6] = constant_pad_nd(%7, [0, 2])  # (backward)
* %9: f32[2] = reduce_scatter_tensor(%8, avg, 3, shard)  # (backward)
  %10: f32[2] = wait_tensor(%9)  # (backward)
  return %6 as output:0
  return %10 as grad:w
""",
    )


def test_reduction_in_half_precision() -> None:
    """float16 is summed, with a part of the mean's division before and after."""
    program = captured(Scale(8), (torch.ones(8),), world_size=8, mp_policy=FP16)
    run_pass(InsertCollectives(), program)
    chain = []
    node = result(program.phases["joint"], "grad:w")
    while node.op == "call_function":
        chain.insert(0, (target_name(node), *node.args[1:], *node.kwargs.values()))
        node = node.all_input_nodes[0]
    assert chain == [
        ("mul", chain[0][1]),
        ("_to_copy", torch.float16),
        ("div", 4),
        ("reduce_scatter_tensor", "sum", 8, "shard"),
        ("wait_tensor",),
        ("div", 2),
    ]


@pytest.mark.parametrize("force_sum", [False, True])
@pytest.mark.parametrize("factor", [None, 4.0, 3.0])
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_divide_factors_match_fsdp2(
    fake_world: FakeWorld, reduce_dtype: torch.dtype, factor: float | None, force_sum: bool
) -> None:
    """On one axis, and on two of which the first replicates."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    for size, replicas in itertools.product((2, 3, 4, 8, 64), (1, 2, 4)):
        fake_world(size * replicas)
        mesh = init_device_mesh("cpu", (replicas, size), mesh_dim_names=("replicate", "shard"))
        groups = mesh.get_group("shard"), mesh.get_group("replicate") if replicas > 1 else None
        before, after, *ops = _get_gradient_divide_factors(*groups, reduce_dtype, "cpu", factor, force_sum)
        axes = (Axis("shard", size, "shard"), Axis("replicate", replicas, "replicate"))[: 1 + (replicas > 1)]
        row = ParamSpec(
            ("w",), (4,), *[reduce_dtype] * 3, True, size, "", False, divide_factor=factor, force_sum=force_sum
        )
        ours = division(row, axes)
        assert (ours.before, ours.after) == (before or 1, after or 1)
        names = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg"}
        scaled = ours.scale is not None
        assert (scaled or ours.over_shards, ours.over_replicas) == (names.get(ops[0], True), names[ops[1]])
        assert not scaled or ours.scale == 1 / factor


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
def test_a_cast_takes_the_division_of_a_power_of_two(size: int, replicas: int) -> None:
    """With the bits of the mean, except for denormal numbers; other counts of ranks average."""
    axes = (Axis("shard", size, "shard"), Axis("replicate", replicas, "replicate"))[:replicas]
    ranks, f32, bf16 = size * replicas, torch.float32, torch.bfloat16

    def how(dtype: torch.dtype, compute: torch.dtype, reduce: torch.dtype) -> Division:
        return division(ParamSpec(("w",), (4,), dtype, compute, reduce, True, size, "", False), axes)

    averaged = Division(over_shards="avg", over_replicas="avg")
    exact = ranks & (ranks - 1) == 0
    assert how(f32, f32, f32) == how(bf16, bf16, bf16) == averaged, "no cast"
    assert how(f32, bf16, f32) == (Division(scale=1 / ranks) if exact else averaged)
    assert how(f32, bf16, bf16) == (Division(after=ranks) if exact else averaged)
    if exact:
        gradients = torch.randn(ranks, 1000).to(bf16).to(f32)
        scaled = functools.reduce(torch.add, gradients / ranks)
        assert torch.equal(scaled, functools.reduce(torch.add, gradients) / ranks)
        least = torch.full((ranks, 1), torch.finfo(f32).smallest_normal * 2**-23)
        assert functools.reduce(torch.add, least / ranks) == 0 < functools.reduce(torch.add, least) / ranks


def test_one_rank_has_no_collectives() -> None:
    program = captured(Scale(4), (torch.ones(4),), world_size=1)
    before = print_program(program)
    run_pass(InsertCollectives(), program)
    assert (program.history[-1].rewrites, print_program(program)) == (0, before)


def test_a_graph_without_parameters_is_left_alone() -> None:
    program = captured(nn.ReLU(), (torch.ones(4, requires_grad=True),))
    before = print_program(program)
    run_pass(InsertCollectives(), program)
    assert (program.history[-1].rewrites, print_program(program)) == (0, before)


def test_rejects_a_second_run() -> None:
    program = through(captured(Scale(4), (torch.ones(4),)), "insert-collectives")
    with pytest.raises(PassError, match="insert-collectives: the graph already has collectives; run this pass once"):
        run_pass(InsertCollectives(), program)


def test_rejects_a_parameter_that_is_not_a_shard() -> None:
    program = captured(Scale(4), (torch.ones(4),))
    program.established |= InsertCollectives.establishes
    message = r"sharded_inputs in joint: param:w has shape \[4\], its padded shard has \[2\]"
    with pytest.raises(PassError, match=message):
        verify(program, "insert-collectives")


def test_a_forward_without_gradients() -> None:
    program = through(captured(Scale(4), (torch.ones(4),), grad=False), "insert-collectives")
    forward = program.phases["forward"]
    assert len(calls(forward, "all_gather_into_tensor")) == 1
    assert not calls(forward, "reduce_scatter_tensor")


class _Mixed(nn.Module):
    """A trainable, a frozen, an integer and an unused parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.index = nn.Parameter(torch.tensor([3, 2, 1, 0]), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * self.trained + self.frozen) * self.mask)[self.index]


def test_only_trainable_parameters_are_reduced() -> None:
    model = _Mixed()
    program = through(captured(model, (torch.ones(4),)), "insert-collectives")
    joint = program.phases["joint"]
    gathered = [node.args[0] for node in calls(joint, "all_gather_into_tensor")]
    slots = joint.slot_of()
    assert sorted(slots[shard].name for shard in gathered) == ["frozen", "index", "trained"]
    assert len(calls(joint, "reduce_scatter_tensor")) == 1
    assert result(joint, "grad:unused") is None
    assert [str(slot) for slot in joint.outputs] == ["output:0", "grad:trained", "grad:unused"]
    shapes = {str(slot): tuple(node.meta["val"].shape) for node, slot in slots.items()}
    assert (shapes["buffer:mask"], shapes["param:unused"], shapes["input:0"]) == ((4,), (2,), (4,))


def test_tied_weights_are_one_gather_and_one_reduction() -> None:
    """The gradients of both uses are added before the reduction."""
    program = through(captured(Tied(), (torch.tensor([1, 2]),)), "insert-collectives")
    joint = program.phases["joint"]
    (gather,) = calls(joint, "all_gather_into_tensor")
    (wait,) = gather.users
    assert len(wait.users) > 1
    (reduction,) = calls(joint, "reduce_scatter_tensor")
    assert target_name(reduction.args[0]) == "add"


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_gradients_are_the_mean_over_ranks(world_size: int) -> None:
    """With 3 ranks a shard is partly padding, with 5 ranks the last shard is all padding."""
    batches = [(torch.randn(4),) for _ in range(world_size)]
    program = through(captured(Scale(4), batches[0], world_size=world_size), "partition")
    assert_gradients(program, Scale(4), batches)
    results = step(program, Scale(4), batches)
    for outputs, (x,) in zip(results, batches):
        torch.testing.assert_close(outputs["output:0"], Scale(4)(x), rtol=0, atol=0)


def test_gradients_in_half_precision() -> None:
    batches = [(torch.randn(4),) for _ in range(4)]
    program = through(captured(Scale(4), batches[0], world_size=4, mp_policy=FP16), "partition")
    grad = torch.cat([r["grad:w"] for r in step(program, Scale(4), batches)])
    assert grad.dtype == torch.float32
    expected = torch.stack([x.half() / 2 for (x,) in batches]).sum(0) / 2
    torch.testing.assert_close(grad, expected.float(), rtol=0, atol=0)


def test_gradients_of_tied_weights() -> None:
    model, batches = Tied(), [(torch.tensor([1, 2]),), (torch.tensor([0, 5]),)]
    assert_gradients(through(captured(model, batches[0]), "partition"), model, batches)
