"""partition: splits the joint graph into forward and backward."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.errors import PassError
from graphshard.ir.collective_regions import collectives
from graphshard.ir.printer import print_program
from graphshard.ir.program import Slot
from graphshard.passes.partition import Partition
from graphshard.pipeline.pipeline import run_pass
from graphshard.pipeline.rules import verify
from graphshard.schedule.fsdp2_order import PlanByUnit
from tests.helpers import (
    COALESCED,
    PACKED,
    Blocks,
    ParallelBiases,
    Scale,
    Scales,
    assert_gradients,
    calls,
    captured,
    step,
    through,
)
from tests.ranks import FakeWorld


class _Sine(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sin()


def test_before_and_after() -> None:
    """Inputs of forward that backward reads keep their label; other values are `saved`."""
    program = through(captured(_Sine(), (torch.ones(4),), world_size=1), "reshard-after-forward")
    assert_expected_inline(
        print_program(program),
        """\
joint:
  %0: f32[4] = param:w
  %1: f32[4] = input:0
  %2: f32[4] = tangent:0  # (backward)
  %3: f32[4] = mul.Tensor(%1, %0)
  %4: f32[4] = sin(%3)
  %5: f32[4] = cos(%3)  # (backward)
  %6: f32[4] = mul.Tensor(%2, %5)  # (backward)
  %7: f32[4] = mul.Tensor(%6, %1)  # (backward)
  return %4 as output:0
  return %7 as grad:w
""",
    )
    run_pass(Partition(), program)
    assert program.history[-1].rewrites == 1
    assert_expected_inline(
        print_program(program),
        """\
forward:
  %0: f32[4] = param:w
  %1: f32[4] = input:0
  %3: f32[4] = mul.Tensor(%1, %0)
  %4: f32[4] = sin(%3)
  return %4 as output:0
  return %0 as param:w
  return %1 as input:0

backward:
  %0: f32[4] = param:w
  %1: f32[4] = input:0
  %2: f32[4] = tangent:0
  %3: f32[4] = mul.Tensor(%1, %0)
  %5: f32[4] = cos(%3)
  %6: f32[4] = mul.Tensor(%2, %5)
  %7: f32[4] = mul.Tensor(%6, %1)
  return %7 as grad:w
""",
    )


def test_a_second_run_changes_nothing() -> None:
    program = through(captured(Blocks(2), (torch.ones(3, 4),)), "partition")
    before = print_program(program)
    run_pass(Partition(), program)
    assert (program.history[-1].rewrites, print_program(program)) == (0, before)


def test_inference_is_left_alone() -> None:
    program = through(captured(Blocks(2), (torch.ones(3, 4),), grad=False), "reshard-after-forward")
    before = print_program(program)
    run_pass(Partition(), program)
    assert (program.history[-1].rewrites, print_program(program)) == (0, before)


def test_a_value_that_forward_does_not_return_is_reported() -> None:
    program = through(captured(Blocks(2), (torch.ones(3, 4),)), "partition")
    backward = program.phases["backward"]
    backward.inputs = (Slot("saved", "nowhere"), *backward.inputs[1:])
    message = "saved_is_returned in backward: backward reads saved:nowhere, which forward does not return"
    with pytest.raises(PassError, match=message):
        verify(program, "partition")


def test_placeholders_have_readable_names() -> None:
    """Names of parameters and buffers become identifiers; duplicates get an underscore."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_b = nn.Parameter(torch.ones(4))
            self.a = nn.ParameterDict({"b": torch.ones(4)})
            self.stack = nn.Sequential(Scale(4))
            self.add_module("0", Scale(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.get_submodule("0")(self.stack(x * self.a_b) * self.a["b"])

    forward = through(captured(Model(), (torch.ones(4),)), "partition").phases["forward"]
    names = {str(slot): node.name for node, slot in forward.slot_of().items()}
    assert names == {
        "param:a_b": "a_b",
        "param:a.b": "a_b_",
        "param:stack.0.w": "stack_0_w",
        "param:0.w": "_0_w",
        "input:0": "input_0",
    }
    assert [node.target for node in forward.placeholders] == [node.name for node in forward.placeholders]


class _Dropout(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.5)


def test_random_numbers_are_drawn_once() -> None:
    program = through(captured(_Dropout(), (torch.ones(4),)), "partition")
    assert len(calls(program.phases["forward"], "bernoulli")) == 1
    assert not calls(program.phases["backward"], "bernoulli")


def test_values_match_autograd() -> None:
    torch.manual_seed(0)
    model, batches = Blocks(3, bias=True), [(torch.randn(3, 4),)]
    program = through(captured(model, batches[0], world_size=1), "partition")
    (results,) = step(program, model, batches)
    loss = model(*batches[0])
    loss.backward()
    assert torch.equal(results["output:0"], loss)
    for name, param in model.named_parameters():
        assert torch.equal(results[f"grad:{name}"], param.grad)


class _Shift(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.w


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (_Shift(4), torch.ones(4)),
        (_Shift(4), torch.ones(2, 4)),
        (Scales(2), torch.ones(4)),
        (ParallelBiases(), torch.ones(2, 4)),
        (Blocks(2, bias=True), torch.ones(2, 4)),
    ],
)
def test_backward_uses_all_its_inputs(model: nn.Module, x: torch.Tensor) -> None:
    """Backward has no unused gathers or saved values.

    The gradient of `x + w` needs no `w`:

        %g = all_gather_into_tensor(%w)           (nothing)
        %f = wait_tensor(%g)
    """
    program = through(captured(model, (x,), reshard_after_forward=True), "partition")
    backward = program.phases["backward"]
    idle = [n.name for n in backward.module.graph.nodes if n.op == "call_function" and not n.users]
    idle += [str(s) for n, s in backward.slot_of().items() if s.kind != "tangent" and not n.users]
    assert idle == []


@pytest.mark.parametrize("planner", [COALESCED, PACKED], ids=["coalesced", "packed"])
def test_equal_gradients_are_reduced_separately(planner: PlanByUnit) -> None:
    """The gradients of parallel layers are one tensor, so their reductions are equal calls.

    Merged into one by the partitioner's CSE they would be one collective for two parameters:

        %r = reduce_scatter(%g)  # f.bias         %r = reduce_scatter(%g)
        %s = reduce_scatter(%g)  # g.bias         return wait(%r) as grad:f.bias, wait(%r) as grad:g.bias
    """
    model, batches = ParallelBiases(), [(torch.randn(2, 4),) for _ in range(2)]
    program = through(captured(model, batches[0]), "partition")
    reduced = [c.params for c in collectives(program.phases["backward"]) if c.kind == "reduce"]
    assert sorted(reduced) == [("f.bias",), ("f.weight",), ("g.bias",), ("g.weight",)]
    through(program, "reorder", planner=planner)
    assert_gradients(program, model, batches)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_share_no_memory(fake_world: FakeWorld, world_size: int) -> None:
    """Scaling gradients in place must scale each once. `x + w0 + w1` has one gradient: the tangent."""

    class Sum(Scales):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.layers[0].w + self.layers[1].w

    fake_world(world_size)
    model = graphshard.compile(Sum(2), init_device_mesh("cpu", (world_size,)), backend="eager")
    tangent = torch.ones(4)
    model(torch.ones(4)).backward(tangent)
    pointers = {layer.w.grad.to_local().data_ptr() for layer in model.layers}
    assert len(pointers | {tangent.data_ptr()}) == 3


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_are_contiguous(fake_world: FakeWorld, world_size: int) -> None:
    """For any layout of backward's last operator: a transposed, an expanded and a channels-last gradient."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transposed = nn.Parameter(torch.ones(4, 2, 3))
            self.expanded = nn.Parameter(torch.ones(4, 2))
            self.conv = nn.Conv2d(2, 4, 3)

        def forward(self, x: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
            y = torch.bmm(x, self.transposed.mT).sin().sum() + self.expanded.sum()
            return y + self.conv(image).sin().sum()

    fake_world(world_size)
    model = graphshard.compile(Model(), init_device_mesh("cpu", (world_size,)), backend="eager")
    image = torch.ones(1, 2, 4, 4).to(memory_format=torch.channels_last)
    model(torch.ones(4, 5, 3), image).backward()
    assert [name for name, p in model.named_parameters() if not p.grad.to_local().is_contiguous()] == []
