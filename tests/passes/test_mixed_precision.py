"""mixed-precision: shards are stored in their dtype, gathered and reduced in the policy's dtypes."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard.errors import PassError
from graphshard.ir.graph import fake
from graphshard.ir.printer import print_program
from graphshard.passes import InsertCollectives, MixedPrecision
from graphshard.pipeline.pipeline import run_pass
from graphshard.pipeline.rules import verify
from tests.helpers import Scale, Tied, calls, captured, full_gradients, result, step, through

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
BF16_REDUCED_IN_F32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def test_before_and_after() -> None:
    """The captured graph already computes in bf16; casts are added at the shard and at its gradient."""
    program = through(captured(Scale(4), (torch.ones(4),), mp_policy=BF16), "insert-collectives")
    assert_expected_inline(
        print_program(program),
        """\
joint:
  %0: bf16[2] = param:w
  %1: f32[4] = input:0
  %2: bf16[4] = tangent:0  # (backward)
  %3: bf16[4] = _to_copy(%1, dtype=bf16)
* %4: bf16[4] = all_gather_into_tensor(%0, 2, shard)
  %5: bf16[4] = wait_tensor(%4)
  %6: bf16[4] = mul.Tensor(%3, %5)
  %7: bf16[4] = mul.Tensor(%2, %3)  # (backward)
* %8: bf16[2] = reduce_scatter_tensor(%7, sum, 2, shard)  # (backward)
  %9: bf16[2] = wait_tensor(%8)  # (backward)
  %10: bf16[2] = div.Tensor(%9, 2)  # (backward)
  return %6 as output:0
  return %10 as grad:w
""",
    )
    run_pass(MixedPrecision(), program)
    assert program.history[-1].rewrites == 2
    assert_expected_inline(
        print_program(program),
        """\
joint:
  %0: f32[2] = param:w
  %1: f32[4] = input:0
  %2: bf16[4] = tangent:0  # (backward)
  %3: bf16[4] = _to_copy(%1, dtype=bf16)
  %11: bf16[2] = _to_copy(%0, dtype=bf16)
* %4: bf16[4] = all_gather_into_tensor(%11, 2, shard)
  %5: bf16[4] = wait_tensor(%4)
  %6: bf16[4] = mul.Tensor(%3, %5)
  %7: bf16[4] = mul.Tensor(%2, %3)  # (backward)
* %8: bf16[2] = reduce_scatter_tensor(%7, sum, 2, shard)  # (backward)
  %9: bf16[2] = wait_tensor(%8)  # (backward)
  %10: bf16[2] = div.Tensor(%9, 2)  # (backward)
  %12: f32[2] = _to_copy(%10, dtype=f32)  # (backward)
  return %6 as output:0
  return %12 as grad:w
""",
    )


def test_reduction_in_another_dtype() -> None:
    """The gradient is cast and scaled before it is summed in float32, which is the stored dtype: no cast follows."""
    program = captured(Scale(4), (torch.ones(4),), mp_policy=BF16_REDUCED_IN_F32)
    joint = through(program, "mixed-precision").phases["joint"]
    (reduction,) = calls(joint, "reduce_scatter_tensor")
    assert fake(reduction.args[0]).dtype == torch.float32
    assert reduction.args[1] == "sum"
    cast, factor = reduction.args[0].args
    assert (factor, fake(cast.args[0]).dtype) == (0.5, torch.bfloat16)
    assert result(joint, "grad:w") is next(iter(reduction.users))


def test_without_a_policy_the_graph_is_left_alone() -> None:
    program = through(captured(Scale(4), (torch.ones(4),)), "insert-collectives")
    before = print_program(program)
    run_pass(MixedPrecision(), program)
    assert (program.history[-1].rewrites, print_program(program)) == (0, before)


def test_a_second_run_changes_nothing() -> None:
    program = through(captured(Scale(4), (torch.ones(4),), mp_policy=BF16), "mixed-precision")
    before = print_program(program)
    run_pass(MixedPrecision(), program)
    assert (program.history[-1].rewrites, print_program(program)) == (0, before)


def test_one_rank_casts_too() -> None:
    program = through(captured(Scale(4), (torch.ones(4),), world_size=1, mp_policy=BF16), "mixed-precision")
    joint = program.phases["joint"]
    assert [fake(node).dtype for node in (joint.placeholders[0], result(joint, "grad:w"))] == [torch.float32] * 2
    assert fake(result(joint, "output:0")).dtype == torch.bfloat16


class _Kinds(nn.Module):
    """Frozen, integer and unused parameters, and a floating-point buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.index = nn.Parameter(torch.tensor([3, 2, 1, 0]), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.frozen)[self.index] * self.mask


def test_dtypes_of_gathers_and_gradients() -> None:
    """Floating-point parameters are gathered in bf16, frozen or not. Integers and buffers keep their dtype."""
    program = captured(_Kinds(), (torch.ones(4, requires_grad=True),), mp_policy=BF16)
    joint = through(program, "mixed-precision").phases["joint"]
    dtypes = {str(slot): fake(node).dtype for node, slot in joint.slot_of().items()}
    assert dtypes["param:frozen"] == dtypes["param:unused"] == dtypes["buffer:mask"] == torch.float32
    assert dtypes["param:index"] == torch.int64
    gathered = {joint.slot_of().get(n.args[0]): fake(n).dtype for n in calls(joint, "all_gather_into_tensor")}
    assert sorted(gathered.values(), key=str) == [torch.bfloat16, torch.int64]
    assert result(joint, "grad:unused") is None


def test_a_gradient_of_another_dtype_is_reported() -> None:
    program = through(captured(Scale(4), (torch.ones(4),), mp_policy=BF16), "insert-collectives")
    program.established |= MixedPrecision.establishes
    with pytest.raises(PassError, match="stored_dtypes in joint: param:w is bf16, the stored parameter is f32"):
        verify(program, "mixed-precision")


def test_order_of_casts_and_padding() -> None:
    """The cast comes before the gather, so half the bytes are sent."""
    program = captured(Scale(4), (torch.ones(4),), world_size=3, mp_policy=BF16)
    run_pass(InsertCollectives(), program)
    run_pass(MixedPrecision(), program)
    (gather,) = calls(program.phases["joint"], "all_gather_into_tensor")
    assert [fake(n).dtype for n in (gather.args[0], gather)] == [torch.bfloat16] * 2
    assert fake(gather.args[0]).shape == (2,)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("policy", [BF16, BF16_REDUCED_IN_F32], ids=["bf16", "reduced in f32"])
def test_values_match_fsdp2(policy: MixedPrecisionPolicy, world_size: int) -> None:
    """Bit for bit: parameters and inputs rounded to bf16, gradients averaged in the reduce dtype."""
    model = Scale(4)
    batches = [(torch.randn(4),) for _ in range(world_size)]
    program = through(captured(model, batches[0], world_size=world_size, mp_policy=policy), "partition")
    results = step(program, model, batches)
    for outputs, (x,) in zip(results, batches):
        assert torch.equal(outputs["output:0"], x.bfloat16() * model.w.bfloat16())
    reduced = torch.stack([x.bfloat16().to(policy.reduce_dtype or torch.bfloat16) for (x,) in batches])
    expected = (reduced.sum(0) / world_size).float()
    assert torch.equal(full_gradients(program, results)["w"], expected)


def test_tied_weights_are_cast_once() -> None:
    program = through(captured(Tied(), (torch.tensor([1, 2]),), mp_policy=BF16), "mixed-precision")
    joint = program.phases["joint"]
    shard = joint.placeholders[0]
    (cast,) = shard.users
    assert [fake(n).dtype for n in (shard, cast)] == [torch.float32, torch.bfloat16]
