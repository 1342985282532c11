"""async-tensor-parallel: splits matmuls and the model's collectives next to them into pieces that overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import Node

import graphshard
from graphshard.codec.converter import decode_pass, encode_pass
from graphshard.cost.costs import Costs
from graphshard.errors import PassError
from graphshard.ir.graph import aten
from graphshard.ir.operators import ALL_GATHER, MODEL_WAIT, REDUCE_SCATTER, STARTS
from graphshard.ir.printer import print_phase
from graphshard.ir.program import Program
from graphshard.passes import AsyncTensorParallel, OverlapModelCollectives
from graphshard.pipeline.pipeline import run_pass
from tests.helpers import Blocks, captured
from tests.passes.handwritten import Written, order_of

MM, ADDMM, VIEW, SPLIT, CAT = (
    aten.mm.default,
    aten.addmm.default,
    aten.view.default,
    aten.split.Tensor,
    aten.cat.default,
)
RANKS = 2


def _gathered() -> Program:
    """Gather [4, 3] rows of each rank along dim 0 and multiply."""
    write = Written((4, 3), (3, 5))
    x, w = write.inputs
    return write.returning(write(MM, write(ALL_GATHER, x, RANKS, "shard"), w))


def _gathered_along_sequences() -> Program:
    """Gather [2, 4, 3] along dim 1, multiply twice, and add another use."""
    write = Written((2, 4, 3), (3, 5), (5, 3), (5,))
    x, w, transposed, bias = write.inputs
    split = write(SPLIT, write(ALL_GATHER, x, RANKS, "shard"), 2)
    whole = write(CAT, [write.part(split, 0), write.part(split, 1)], 1)
    rows = write(VIEW, whole, [16, 3])
    first = write(VIEW, write(MM, rows, w), [2, 8, 5])
    second = write(ADDMM, bias, write(VIEW, whole, [16, 3]), write(aten.t.default, transposed))
    return write.returning(first, second, write(aten.mul.Tensor, whole, 2))


def _scattered() -> Program:
    """Multiply [8, 3] rows and scatter their sum as [4, 5] per rank."""
    write = Written((8, 3), (3, 5))
    x, w = write.inputs
    return write.returning(write(REDUCE_SCATTER, write(MM, x, w), "sum", RANKS, "shard"))


def _scattered_along_sequences() -> Program:
    """Multiply [2, 8, 3] and scatter their sum along dim 1 as [2, 4, 5] per rank."""
    write = Written((2, 8, 3), (3, 5))
    x, w = write.inputs
    y = write(VIEW, write(MM, write(VIEW, x, [16, 3]), w), [2, 8, 5])
    parts = [write.part(write(SPLIT, y, 4, 1), index) for index in range(RANKS)]
    return write.returning(write(REDUCE_SCATTER, write(CAT, parts), "sum", RANKS, "shard"))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "gathered": _gathered,
    "gathered along sequences": _gathered_along_sequences,
    "reduce_scatter": _scattered,
    "scattered along sequences": _scattered_along_sequences,
}


def test_before_and_after() -> None:
    program = _gathered()
    run_pass(AsyncTensorParallel(pieces=(2,)), program)
    run_pass(OverlapModelCollectives(), program)
    assert_expected_inline(
        print_phase(program.phases["forward"]),
        """\
  %0: f32[4, 3] = input:0
  %1: f32[3, 5] = input:1
  %2: f32[2, 3] = slice.Tensor(%0, 0, 0, 2)
  %3: f32[4, 3] = all_gather(%2, 2, shard)
  %6: f32[2, 3] = slice.Tensor(%0, 0, 2, 4)
  %7: f32[4, 3] = start_all_gather(%6, 2, shard)
  %4: f32[4, 3] = view(%3, [4, 3])
  %5: f32[4, 5] = mm(%4, %1)
  %10: f32[2, 2, 5] = view(%5, [2, 2, 5])
  %14: f32[4, 3] = wait(%7)
  %8: f32[4, 3] = view(%14, [4, 3])
  %9: f32[4, 5] = mm(%8, %1)
  %11: f32[2, 2, 5] = view(%9, [2, 2, 5])
  %12: f32[2, 4, 5] = cat([%10, %11], 1)
  %13: f32[8, 5] = view(%12, [8, 5])
  return %13 as output:0
""",
    )


def _results(program: Program) -> list[list[Tensor]]:
    """Return the results of each rank, from different inputs and equal weights."""
    phase = program.phases["forward"]
    generator = torch.Generator().manual_seed(0)
    values: list[dict[Node, Tensor]] = [{} for _ in range(RANKS)]
    for index, node in enumerate(phase.placeholders):
        for of_rank in values:
            of_rank[node] = torch.randn(node.meta["val"].shape, generator=generator, dtype=torch.float64)
            of_rank[node] = values[0][node] if index else of_rank[node]
    for node in phase.module.graph.nodes:
        if node.op != "call_function":
            continue
        args = [torch.fx.map_arg(node.args, of_rank.__getitem__) for of_rank in values]
        if node.target in (ALL_GATHER, STARTS[ALL_GATHER]):
            results: Sequence[Tensor] = [torch.cat([given[0] for given in args])] * RANKS
        elif node.target in (REDUCE_SCATTER, STARTS[REDUCE_SCATTER]):
            results = torch.stack([given[0] for given in args]).sum(0).chunk(RANKS)
        elif node.target is MODEL_WAIT:
            results = [given[0] for given in args]
        else:
            results = [node.target(*given, **node.kwargs) for given in args]
        for of_rank, made in zip(values, results, strict=True):
            of_rank[node] = made
    return [[of_rank[result] for result in phase.results] for of_rank in values]


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_equal_on_every_rank(name: str, pieces: int) -> None:
    """Values and shapes; each collective is split, and all pieces except one overlap a matmul."""
    program = PROGRAMS[name]()
    expected = _results(program)
    run_pass(AsyncTensorParallel(pieces=(pieces,)), program)
    run_pass(OverlapModelCollectives(), program)
    torch.testing.assert_close(_results(program), expected, rtol=1e-12, atol=1e-12)
    names = order_of(program)
    assert names.count("all_gather") + names.count("reduce_scatter") == 1
    assert names.count("start_all_gather") + names.count("start_reduce_scatter") == pieces - 1
    assert names.count("wait") == pieces - 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_second_run_changes_nothing(name: str) -> None:
    program = PROGRAMS[name]()
    run_pass(AsyncTensorParallel(pieces=(2,)), program)
    once = print_phase(program.phases["forward"])
    assert AsyncTensorParallel(pieces=(2,)).rewrite(program) == 0
    assert print_phase(program.phases["forward"]) == once


def _used_elsewhere() -> Program:
    """Build a matmul whose full result has another use."""
    write = Written((8, 3), (3, 5))
    y = write(MM, *write.inputs)
    return write.returning(write(REDUCE_SCATTER, y, "sum", RANKS, "shard"), write(aten.relu.default, y))


def _multiplied_by_itself() -> Program:
    """Build a matmul of a gathered tensor with itself; both operands need the whole tensor."""
    write = Written((4, 3))
    whole = write(ALL_GATHER, write.inputs[0], RANKS, "shard")
    return write.returning(write(MM, whole, write(aten.t.default, whole)))


def _of_columns() -> Program:
    """Build a matmul that contracts the gathered dim."""
    write = Written((4, 3), (5, 8))
    x, w = write.inputs
    return write.returning(write(MM, w, write(ALL_GATHER, x, RANKS, "shard")))


def _transposed() -> Program:
    """Build a matmul whose scattered rows are columns of its operands."""
    write = Written((3, 8), (3, 8))
    y = write(MM, write(aten.t.default, write.inputs[0]), write.inputs[1])
    return write.returning(write(REDUCE_SCATTER, write(aten.t.default, y), "sum", RANKS, "shard"))


def _split_differently() -> Program:
    """Build a matmul of sequences that are not split like the ranks' parts."""
    write = Written((4, 4, 3), (3, 5))
    x, w = write.inputs
    split = write(SPLIT, write(ALL_GATHER, x, RANKS, "shard"), 2)
    whole = write(CAT, [write.part(split, index) for index in (0, 1, 2, 3)], 1)
    rows = write(VIEW, whole, [32, 3])
    return write.returning(write(MM, rows, w))


def _odd() -> Program:
    """Build a matmul of three gathered rows, which cannot be halved."""
    write = Written((3, 3), (3, 5))
    x, w = write.inputs
    return write.returning(write(MM, write(ALL_GATHER, x, RANKS, "shard"), w))


@pytest.mark.parametrize(
    "make", [_used_elsewhere, _multiplied_by_itself, _of_columns, _transposed, _split_differently, _odd]
)
def test_left_alone(make: Callable[[], Program]) -> None:
    program = make()
    before = print_phase(program.phases["forward"])
    assert AsyncTensorParallel(pieces=(2,)).rewrite(program) == 0
    assert print_phase(program.phases["forward"]) == before


def _large(rows: int, columns: int) -> Program:
    """Build a column-parallel matmul with the sizes of Llama 8B, in bf16."""
    write = Written((rows, 4096), (4096, columns), dtype=torch.bfloat16)
    x, w = write.inputs
    return write.returning(write(MM, write(ALL_GATHER, x, RANKS, "shard"), w))


def test_applies_where_it_pays() -> None:
    """On H100s; not for pieces dominated by latency, nor if copying rows takes longer than sending them."""
    step = AsyncTensorParallel(Costs(graphshard.profiling.load_profile("h100")))
    assert step.rewrite(_large(4096, 1792)) == 1
    assert step.rewrite(_large(64, 1792)) == 0
    assert step.rewrite(_large(4096, 14336)) == 0


def test_rejects_wrong_options() -> None:
    with pytest.raises(
        PassError, match="async-tensor-parallel: insert this pass after 'partition' and before 'overlap-mod"
    ):
        run_pass(AsyncTensorParallel(), captured(Blocks(1), (torch.ones(3, 4),)))
    with pytest.raises(PassError, match=r"async-tensor-parallel: pieces must be numbers from 2 on, got \(1,\)"):
        run_pass(AsyncTensorParallel(pieces=(1,)), _gathered())
    program = _scattered()
    run_pass(AsyncTensorParallel(pieces=(2,)), program)
    run_pass(OverlapModelCollectives(), program)
    with pytest.raises(
        PassError, match="async-tensor-parallel: insert this pass after 'partition' and before 'overlap-mod"
    ):
        run_pass(AsyncTensorParallel(), program)


def test_dumps_hold_it() -> None:
    """With its costs, so that `graphshard repro` can run it again."""
    step = AsyncTensorParallel(Costs(graphshard.profiling.load_profile("h100")), pieces=(2,))
    assert decode_pass(encode_pass(step)).step == step
