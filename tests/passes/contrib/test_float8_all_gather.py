"""float8-all-gather: gathers in eight bits; what is sent, and the accuracy of the result."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard.errors import PassError
from graphshard.ir.collective_regions import collectives
from graphshard.ir.graph import fake
from graphshard.ir.printer import print_phase
from graphshard.ir.program import Program
from graphshard.passes.contrib.float8_all_gather import Float8AllGather
from graphshard.pipeline.pipeline import run_pass
from tests.helpers import (
    COALESCED,
    PACKED,
    Blocks,
    Scale,
    assert_gradients,
    captured,
    full_gradients,
    mean_gradients,
    step,
    through,
)

BATCHES = [(torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)),) for seed in (0, 1)]


def _quantized(model: nn.Module, params: tuple[str, ...] = ("*",), **options: object) -> Program:
    program = through(captured(model, BATCHES[0], **options), "partition")
    run_pass(Float8AllGather(params), program)
    return program


def test_before_and_after() -> None:
    program = through(captured(Scale(4), (torch.ones(4),)), "partition")
    run_pass(Float8AllGather(), program)
    assert program.history[-1].rewrites == 1
    sent, received = print_phase(program.phases["forward"]).split("* ")
    assert_expected_inline(
        sent,
        """\
  %0: f32[2] = param:w
  %1: f32[4] = input:0
  %9: f32[2] = view(%0, [-1])
  %10: f32[2] = abs(%9)
  %11: f32[1] = amax(%10, [0], True)
  %12: f32[1] = clamp_min(%11, 1.2037062152420224e-35)
  %13: f32[1] = div.Tensor(%12, 448.0)
  %14: f32[2] = div.Tensor(%9, %13)
  %15: float8_e4m3fn[2] = _to_copy(%14, dtype=float8_e4m3fn)
  %16: u8[2] = view.dtype(%15, u8)
  %17: u8[4] = view.dtype(%13, u8)
  %18: u8[6] = cat([%16, %17])
""",
    )
    assert_expected_inline(
        received,
        """\
%3: u8[12] = all_gather_into_tensor(%18, 2, shard)
  %4: u8[12] = wait_tensor(%3)
  %19: u8[2, 6] = view(%4, [2, 6])
  %20: u8[2, 2] = slice.Tensor(%19, 1, 0, 2)
  %21: float8_e4m3fn[2, 2] = view.dtype(%20, float8_e4m3fn)
  %22: f32[2, 2] = _to_copy(%21, dtype=f32)
  %23: u8[2, 4] = slice.Tensor(%19, 1, 2, 6)
  %24: u8[2, 4] = clone(%23, memory_format=torch.contiguous_format)
  %25: f32[2, 1] = view.dtype(%24, f32)
  %26: f32[2, 2] = mul.Tensor(%22, %25)
  %27: f32[4] = view(%26, [4])
  %5: f32[4] = mul.Tensor(%1, %27)
  return %5 as output:0
  return %1 as input:0
""",
    )


def test_a_byte_for_each_element_and_a_scale_for_each_shard() -> None:
    program = _quantized(Blocks(2, 8))
    for phase in program.phases.values():
        for collective in collectives(phase):
            if collective.kind == "gather":
                (sent,) = collective.node.all_input_nodes
                assert (fake(sent).dtype, list(fake(sent).shape)) == (torch.uint8, [4 * 8 + 4])
    assert not program.history[-1].exact


def as_gathered(weight: torch.Tensor) -> torch.Tensor:
    """Round a weight as two ranks gather it: each half to eight bits by a separate scale."""
    scales = [shard.abs().max() / torch.finfo(torch.float8_e4m3fn).max for shard in weight.chunk(2)]
    return torch.cat([(s / scale).to(torch.float8_e4m3fn).float() * scale for s, scale in zip(weight.chunk(2), scales)])


@pytest.mark.parametrize("planner", [COALESCED, PACKED])
def test_gradients_match_the_rounded_weights(planner: object) -> None:
    model, rounded = Blocks(2, 8), Blocks(2, 8)
    rounded.load_state_dict({name: as_gathered(weight) for name, weight in model.state_dict().items()})
    program = through(_quantized(model), "reorder", planner=planner)
    found, wanted = full_gradients(program, step(program, model, BATCHES)), mean_gradients(rounded, BATCHES)
    torch.testing.assert_close(found, wanted)
    assert not any(torch.equal(found[name], exact) for name, exact in mean_gradients(model, BATCHES).items())


def test_mixed_precision_gathers_and_computes_in_the_policys_dtype() -> None:
    """The only difference is the rounding of bfloat16: a model without ReLUs has no kinks that it could cross.

    Weights are cast to bfloat16 before they are rounded to eight bits.
    """
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    rounded = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    cast = {name: weight.bfloat16().float() for name, weight in model.state_dict().items()}
    rounded.load_state_dict({name: as_gathered(weight) for name, weight in cast.items()})
    program = through(_quantized(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)), "reorder")
    found, wanted = full_gradients(program, step(program, model, BATCHES)), mean_gradients(rounded, BATCHES)
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() < 0.05 * gradient.norm()


def test_some_parameters() -> None:
    """Other parameters, and uneven ones, are gathered unchanged; their gradients are exact."""
    model = Blocks(2, 8, bias=True)
    program = through(_quantized(model, ("layers.9.*",)), "reorder")
    assert_gradients(program, model, BATCHES)
    program = _quantized(model, ("*.bias",))
    kinds = {(c.params[0], fake(c.node.all_input_nodes[0]).dtype) for c in collectives(program.phases["forward"])}
    assert ("layers.0.bias", torch.uint8) in kinds
    assert ("layers.0.weight", torch.float32) in kinds
    through(program, "reorder", planner=PACKED)


def test_uneven_parameters_are_left_alone() -> None:
    program = through(captured(Blocks(2, 8), BATCHES[0], world_size=3), "partition")
    run_pass(Float8AllGather(), program)
    assert program.history[-1].rewrites == 0


def test_it_comes_after_the_partition() -> None:
    with pytest.raises(PassError, match="insert this pass after 'partition' and before 'plan'"):
        run_pass(Float8AllGather(), captured(Blocks(2, 8), BATCHES[0]))
