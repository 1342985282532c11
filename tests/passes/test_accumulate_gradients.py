"""accumulate-gradients: inputs, collectives and results of backward for microbatches."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard.ir.graph import is_collective
from graphshard.ir.mesh import Mesh
from graphshard.ir.printer import print_phase
from graphshard.ir.program import Program
from graphshard.passes import AccumulateGradients
from graphshard.pipeline.pipeline import run_pass
from tests.helpers import COALESCED, PACKED, Affine, Blocks, ParallelBiases, Scale, calls, captured, copied, through

BATCH = (torch.ones(3, 4),)
WEIGHTS = frozenset({"layers.0.weight", "layers.1.weight"})


def _partitioned(**options: object) -> Program:
    return through(captured(Blocks(2), BATCH, **options), "partition")


def _accumulated(step: AccumulateGradients, program: Program | None = None) -> Program:
    program = copied(program or _partitioned())
    run_pass(step, program)
    return program


def _slots(program: Program) -> tuple[list[str], list[str]]:
    phase = program.phases["backward"]
    given = [str(slot) for slot in phase.inputs if slot.kind in ("accumulated", "partial")]
    return given, list(map(str, phase.outputs))


def test_before_and_after() -> None:
    """A microbatch in the middle adds to the accumulated gradient and launches no collectives."""
    program = through(captured(Scale(4), (torch.ones(4),)), "partition")
    run_pass(AccumulateGradients(unsynced=frozenset({"w"}), accumulated=frozenset({"w"})), program)
    assert program.history[-1].rewrites == 1
    assert_expected_inline(
        print_phase(program.phases["backward"]),
        """\
  %1: f32[4] = input:0
  %2: f32[4] = tangent:0
  %9: f32[4] = accumulated:w
  %6: f32[4] = mul.Tensor(%2, %1)
  %10: f32[4] = add.Tensor(%6, %9)
  return %10 as accumulated:w
""",
    )


def test_first_microbatch() -> None:
    program = _accumulated(AccumulateGradients(unsynced=WEIGHTS))
    assert _slots(program) == ([], ["accumulated:layers.0.weight", "accumulated:layers.1.weight"])
    assert calls(program.phases["backward"], "reduce_scatter_tensor") == []


def test_microbatch_in_the_middle() -> None:
    program = _accumulated(AccumulateGradients(unsynced=WEIGHTS, accumulated=WEIGHTS))
    names = ["accumulated:layers.0.weight", "accumulated:layers.1.weight"]
    assert _slots(program) == (names, names)
    assert len(calls(program.phases["backward"], "add")) == 2


def test_last_microbatch() -> None:
    program = _accumulated(AccumulateGradients(accumulated=WEIGHTS))
    given = ["accumulated:layers.0.weight", "accumulated:layers.1.weight"]
    assert _slots(program) == (given, ["grad:layers.0.weight", "grad:layers.1.weight"])
    for launch in calls(program.phases["backward"], "reduce_scatter_tensor"):
        (source,) = launch.all_input_nodes
        assert source.target is torch.ops.aten.add.Tensor


def test_one_unit() -> None:
    program = _accumulated(AccumulateGradients(unsynced=frozenset({"layers.1.weight"})))
    assert _slots(program) == ([], ["grad:layers.0.weight", "accumulated:layers.1.weight"])
    assert len(calls(program.phases["backward"], "reduce_scatter_tensor")) == 1


def test_sums_are_in_the_reduce_dtype() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    step = AccumulateGradients(unsynced=WEIGHTS, accumulated=WEIGHTS)
    program = _accumulated(step, _partitioned(mp_policy=policy))
    assert {value.meta["val"].dtype for value in program.phases["backward"].results} == {torch.float32}


def test_nothing_to_do() -> None:
    program = _partitioned()
    run_pass(AccumulateGradients(), program)
    assert program.history[-1].rewrites == 0


def _replicated() -> Program:
    program = captured(Blocks(2), BATCH)
    return through(replace(program, mesh=Mesh.of_shape((2, 2))), "partition")


def test_over_shards_only() -> None:
    program = _accumulated(AccumulateGradients(unreplicated=WEIGHTS), _replicated())
    assert _slots(program) == ([], ["partial:layers.0.weight", "partial:layers.1.weight"])
    backward = program.phases["backward"]
    assert len(calls(backward, "reduce_scatter_tensor")) == 2
    assert calls(backward, "all_reduce") == []


def test_over_replicas_with_accumulated_gradients() -> None:
    program = _accumulated(AccumulateGradients(partial=WEIGHTS), _replicated())
    assert _slots(program)[1] == ["grad:layers.0.weight", "grad:layers.1.weight"]
    for launch in calls(program.phases["backward"], "all_reduce"):
        (source,) = launch.all_input_nodes
        assert source.target is torch.ops.aten.add.Tensor


@pytest.mark.parametrize("model", [ParallelBiases(), Affine(4)], ids=["equal gradients", "two shapes"])
def test_gradients_with_common_subexpressions(model: torch.nn.Module) -> None:
    """Reductions merged by CSE are separated again."""
    batch = (torch.ones(2, 4),) if isinstance(model, ParallelBiases) else (torch.ones(4, 2),)
    program = captured(model, batch)
    names = frozenset(name for name, _ in model.named_parameters())
    program = _accumulated(AccumulateGradients(unsynced=names), through(program, "partition"))
    assert calls(program.phases["backward"], "reduce_scatter_tensor") == []
    assert set(_slots(program)[1]) == {f"accumulated:{name}" for name in names}


@pytest.mark.slow
def test_variants_are_planned_and_scheduled() -> None:
    """Later passes handle the variants like any backward, with packed and unpacked parameters."""
    model = Blocks(2, bias=True)
    names = frozenset(name for name, _ in model.named_parameters())
    for planner, (step, kinds) in itertools.product(
        (COALESCED, PACKED),
        (
            (AccumulateGradients(unsynced=names, accumulated=names), set()),
            (AccumulateGradients(accumulated=names), {"reduce", "all_reduce"}),
            (AccumulateGradients(unreplicated=names, partial=names), {"reduce"}),
            (AccumulateGradients(partial=names), {"reduce", "all_reduce"}),
        ),
    ):
        program = through(replace(captured(model, BATCH), mesh=Mesh.of_shape((2, 2))), "partition")
        program = through(_accumulated(step, program), "reorder", planner=planner)
        buckets = [bucket for bucket in program.plan.buckets if bucket.kind != "gather"]
        assert {bucket.kind for bucket in buckets} == kinds
        assert all(len(bucket.packed if planner is PACKED else bucket.params) == 2 for bucket in buckets)
        backward = program.phases["backward"].module.graph
        launched = {node.meta["bucket"] for node in backward.nodes if is_collective(node)}
        assert {bucket.name for bucket in buckets} <= launched
