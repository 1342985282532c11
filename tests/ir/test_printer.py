"""Programs as text that does not depend on FX's names."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard.ir.printer import describe, dtype_name, print_communication, print_graph, print_program
from graphshard.ir.program import Program
from graphshard.schedule.fsdp2_order import PlanByUnit
from tests.helpers import COALESCED, PACKED, Affine, Blocks, captured, through


@pytest.fixture(scope="module")
def program() -> Program:
    return through(captured(Blocks(1), (torch.ones(3, 4),)), "reorder")


def test_a_graph() -> None:
    """Numbered values, keywords, several results, constants among the results, optional labels."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[object, ...]:
        values, _ = torch.ops.aten.max.dim(x, 1)
        full = torch.ops.aten.full.default([2, 2], 1.5, dtype=torch.bfloat16)
        return values, torch.ops.aten.cat.default([x, y], 1), full, None

    graph = make_fx(function, tracing_mode="fake")(torch.ones(2, 3), torch.ones(2, 1, dtype=torch.int64)).graph
    for node in graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {"dtype": node.kwargs["dtype"]}
    assert_expected_inline(
        print_graph(graph, ["input:x", "input:y"], ["a", "", "b", "c"]),
        """\
  %0: f32[2, 3] = input:x
  %1: i64[2, 1] = input:y
  %2: (f32[2], i64[2]) = max.dim(%0, 1)
  %3: f32[2] = getitem(%2, 0)
  %4: i64[2] = getitem(%2, 1)
  %5: bf16[2, 2] = full([2, 2], 1.5, dtype=bf16)
  %6: f32[2, 4] = cat([%0, %1], 1)
  return %3 as a
  return %6
  return %5 as b
  return None as c
""",
    )


def test_collectives_and_modules() -> None:
    """Collectives start with a star; a comment names the module that computed a value."""
    program = through(captured(Blocks(1), (torch.ones(3, 4),)), "insert-collectives")
    assert_expected_inline(
        print_program(program),
        """\
joint:
  %0: f32[2, 4] = param:layers.0.weight
  %1: f32[3, 4] = input:0
  %2: f32[] = tangent:0  # (backward)
* %3: f32[4, 4] = all_gather_into_tensor(%0, 2, shard)  # layers.0
  %4: f32[4, 4] = wait_tensor(%3)  # layers.0
  %5: f32[4, 4] = t(%4)  # layers.0
  %6: f32[3, 4] = mm(%1, %5)  # layers.0
  %7: f32[3, 4] = relu(%6)
  %8: f32[3, 4] = detach(%7)
  %9: f32[] = sum(%7)
  %10: f32[3, 4] = expand(%2, [3, 4])  # (backward)
  %11: f32[3, 4] = detach(%8)  # (backward)
  %12: f32[3, 4] = threshold_backward(%10, %11, 0)  # (backward)
  %13: f32[4, 3] = t(%12)  # layers.0 (backward)
  %14: f32[4, 4] = mm(%13, %1)  # layers.0 (backward)
  %15: f32[4, 4] = t(%14)  # layers.0 (backward)
  %16: f32[4, 4] = t(%15)  # layers.0 (backward)
* %17: f32[2, 4] = reduce_scatter_tensor(%16, avg, 2, shard)  # (backward)
  %18: f32[2, 4] = wait_tensor(%17)  # (backward)
  return %9 as output:0
  return %18 as grad:layers.0.weight
""",
    )


def test_phases() -> None:
    program = through(captured(Affine(), (torch.ones(2),)), "partition")
    assert [line for line in print_program(program).splitlines() if not line.startswith((" ", "*"))] == [
        "forward:",
        "",
        "backward:",
    ]


def test_canonical(program: Program) -> None:
    phase = program.phases["forward"]
    text = print_graph(phase.module.graph, [""] * len(phase.inputs), [""] * len(phase.outputs), canonical=True)
    assert "#" not in text
    assert " as " not in text
    assert re.findall(r"%(\d+):", text) == [str(i) for i in range(text.count(":"))]


def test_names_of_nodes_do_not_matter(program: Program) -> None:
    before = print_program(program)
    for phase in program.phases.values():
        for i, node in enumerate(phase.module.graph.nodes):
            node.name = f"renamed_{i}"
    assert print_program(program) == before


def test_communication(program: Program) -> None:
    """What ranks compare: the collectives of all phases in order, with the tensors that each sends."""
    assert_expected_inline(
        "\n".join(print_communication(program)),
        """\
forward: gather layers.0.weight as f32[2, 4]
backward: reduce layers.0.weight as f32[4, 4]""",
    )
    assert not print_communication(captured(Blocks(1), (torch.ones(3, 4),)))


@pytest.mark.parametrize(
    ("planner", "sent"),
    [(COALESCED, "b, a as f32[2], f32[2, 2]"), (PACKED, "b, a as f32[6]")],
    ids=["coalesced", "packed"],
)
def test_communication_of_buckets(planner: PlanByUnit, sent: str) -> None:
    program = through(captured(Affine(), (torch.ones(2),), grad=False), "reorder", planner=planner)
    assert print_communication(program) == [f"forward: gather {sent}"]


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "f32"),
        (torch.float64, "f64"),
        (torch.float16, "f16"),
        (torch.bfloat16, "bf16"),
        (torch.int64, "i64"),
        (torch.uint8, "u8"),
        (torch.bool, "b8"),
        (torch.complex64, "c64"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
    ],
)
def test_dtypes(dtype: torch.dtype, name: str) -> None:
    assert dtype_name(dtype) == name


def test_describe() -> None:
    assert describe(torch.ones(2, 3)) == "f32[2, 3]"
    assert describe((torch.ones(()), [torch.ones(1)])) == "(f32[], (f32[1]))"
    assert describe(3) == "int"
