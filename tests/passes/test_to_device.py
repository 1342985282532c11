"""to-device: converts a program captured on the CPU for GPUs, without a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

from graphshard.errors import ArtifactError
from graphshard.ir.graph import calls_of
from graphshard.ir.printer import print_program
from graphshard.passes import ToDevice
from graphshard.passes.contrib.float8_all_gather import Float8AllGather
from graphshard.pipeline.pipeline import Pipeline, run_pass
from tests.helpers import PACKED, Blocks, captured, copied, step, through


class Positions(nn.Module):
    """Calls a factory function with a device."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w + torch.arange(4, device=x.device)


def devices(program) -> set[str]:
    values = (n.meta["val"] for phase in program.phases.values() for n in phase.module.graph.nodes if "val" in n.meta)
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}


def test_before_and_after() -> None:
    program = captured(Positions(), (torch.ones(2, 4),))
    before = print_program(program)
    (arange,) = calls_of(program.phases["joint"], torch.ops.aten.arange.start_step) or calls_of(
        program.phases["joint"], torch.ops.aten.arange.default
    )
    assert (devices(program), str(arange.kwargs["device"])) == ({"cpu"}, "cpu")
    run_pass(ToDevice("cuda"), program)
    assert (devices(program), str(arange.kwargs["device"]), str(program.device)) == ({"cuda"}, "cuda", "cuda")
    assert print_program(program).replace("device=cuda", "device=cpu") == before
    assert_expected_inline(
        print_program(program),
        """\
joint:
  %0: f32[4] = param:w
  %1: f32[2, 4] = input:0
  %2: f32[2, 4] = tangent:0  # (backward)
  %3: f32[2, 4] = mul.Tensor(%1, %0)
  %4: i64[4] = arange(4, device=cuda, pin_memory=False)
  %5: f32[2, 4] = add.Tensor(%3, %4)
  %6: f32[2, 4] = mul.Tensor(%2, %1)  # (backward)
  %7: f32[1, 4] = sum.dim_IntList(%6, [0], True)  # (backward)
  %8: f32[4] = view(%7, [4])  # (backward)
  return %5 as output:0
  return %8 as grad:w
""",
    )


def test_leaves_a_program_of_that_device_alone() -> None:
    program = captured(Blocks(1), (torch.ones(2, 4),))
    run_pass(ToDevice("cpu"), program)
    assert program.history[-1].rewrites == 0


def test_idempotent() -> None:
    program = captured(Positions(), (torch.ones(2, 4),))
    run_pass(ToDevice("cuda"), program)
    run_pass(ToDevice("cuda"), program)
    assert [stage.rewrites for stage in program.history] == [1, 0]


def test_other_passes_run_on_it_with_equal_results() -> None:
    """Running the graph on real tensors ignores the devices of fake values."""
    model = Blocks(2)
    program = captured(model, (torch.ones(2, 4),))
    plain = copied(program)
    run_pass(ToDevice("cuda"), program)
    for passes in (program, plain):
        through(passes, Pipeline().passes[-1].name)
    batches = [(torch.randn(2, 4),), (torch.randn(2, 4),)]
    torch.testing.assert_close(step(program, model, batches), step(plain, model, batches), rtol=0, atol=0)
    assert devices(program) == {"cuda"}


def test_passes_that_trace_formulas_need_no_gpu() -> None:
    program = through(captured(Blocks(2, 8, bias=True), (torch.ones(3, 8),)), "partition")
    run_pass(ToDevice("cuda"), program)
    run_pass(Float8AllGather(("layers.1.weight",)), program)
    through(program, "reorder", planner=PACKED)
    assert devices(program) == {"cuda"}


class Attention(nn.Module):
    """The CPU has a separate attention operator."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.w
        return F.scaled_dot_product_attention(x, x, x)


def test_rejects_operators_that_only_the_cpu_has() -> None:
    program = captured(Attention(), (torch.ones(1, 2, 4, 8),))
    with pytest.raises(ArtifactError, match=r"_scaled_dot_product_flash_attention_for_cpu.* only the CPU has"):
        run_pass(ToDevice("cuda"), program)
