"""overlap-model-collectives: overlaps the model's collectives with independent compute."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings

from graphshard.errors import PassError
from graphshard.ir.graph import WAIT, aten, c10d, emit
from graphshard.ir.operators import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, MODEL_WAIT, REDUCE_SCATTER, STARTS
from graphshard.ir.printer import print_communication, print_phase
from graphshard.ir.program import Program
from graphshard.passes import OverlapModelCollectives
from graphshard.pipeline.pipeline import run_pass
from tests.helpers import Blocks, captured, copied
from tests.passes.handwritten import CALLS, SQUARE, Written, drawn, order_of, results_of, two_layers

MM, ADD, MUL = aten.mm.default, aten.add.Tensor, aten.mul.Tensor


def _columns() -> Program:
    """Build backward of a column-parallel layer: the gradient of its input is reduced, the weight's is not."""
    write = Written(SQUARE, SQUARE, SQUARE)
    grad, weight, x = write.inputs
    of_weight = write(MM, x, grad)
    of_input = write(ALL_REDUCE, write(MM, grad, weight), "sum", "shard")
    return write.returning(of_weight, write(MUL, of_input, 2))


def test_before_and_after() -> None:
    program = _columns()
    assert_expected_inline(
        print_phase(program.phases["forward"]),
        """\
  %0: f32[2, 2] = input:0
  %1: f32[2, 2] = input:1
  %2: f32[2, 2] = input:2
  %3: f32[2, 2] = mm(%2, %0)
  %4: f32[2, 2] = mm(%0, %1)
  %5: f32[2, 2] = all_reduce(%4, sum, shard)
  %6: f32[2, 2] = mul.Tensor(%5, 2)
  return %3 as output:0
  return %6 as output:1
""",
    )
    run_pass(OverlapModelCollectives(), program)
    assert_expected_inline(
        print_phase(program.phases["forward"]),
        """\
  %0: f32[2, 2] = input:0
  %1: f32[2, 2] = input:1
  %2: f32[2, 2] = input:2
  %3: f32[2, 2] = mm(%0, %1)
  %4: f32[2, 2] = start_all_reduce(%3, sum, shard)
  %5: f32[2, 2] = mm(%2, %0)
  %6: f32[2, 2] = wait(%4)
  %7: f32[2, 2] = mul.Tensor(%6, 2)
  return %5 as output:0
  return %7 as output:1
""",
    )
    assert print_communication(program) == ["forward: start_all_reduce over shard"]


def test_a_second_run_changes_nothing() -> None:
    program = _columns()
    run_pass(OverlapModelCollectives(), program)
    once = print_phase(program.phases["forward"])
    assert OverlapModelCollectives().rewrite(program) == 0
    assert print_phase(program.phases["forward"]) == once


def test_nothing_to_overlap() -> None:
    """A graph without collectives of the model, or without independent matmuls, does not change."""
    program = copied(two_layers())
    before = [print_phase(phase) for phase in program.phases.values()]
    run_pass(OverlapModelCollectives(), program)
    assert [print_phase(phase) for phase in program.phases.values()] == before

    write = Written(SQUARE, SQUARE, SQUARE)
    x, y, z = write.inputs
    total = write(ADD, y, z)
    program = write.returning(total, write(MM, write(ALL_REDUCE, x, "sum", "shard"), z))
    before = print_phase(program.phases["forward"])
    assert OverlapModelCollectives().rewrite(program) == 0
    assert print_phase(program.phases["forward"]) == before


def test_shared_experts_run_while_tokens_are_sent() -> None:
    """Operators that neither need a collective nor are needed by the next one."""
    write = Written(SQUARE, SQUARE, SQUARE)
    x, shared, expert = write.inputs
    there = write(ALL_TO_ALL, x, [1, 1], [1, 1], "shard")
    back = write(ALL_TO_ALL, write(MM, there, expert), [1, 1], [1, 1], "shard")
    program = write.returning(write(ADD, write(MM, x, shared), back))
    run_pass(OverlapModelCollectives(), program)
    assert order_of(program) == ["all_to_all", "mm", "start_all_to_all", "mm", "wait", "add"]


def test_gradient_reductions_are_not_delayed() -> None:
    """They start when their gradients are ready; otherwise all gradients would live to the end."""
    write = Written(SQUARE, SQUARE, SQUARE)
    grad, weight, x = write.inputs
    sent = write(c10d.reduce_scatter_tensor.default, write(MM, x, grad), "sum", 2, "shard")
    of_input = write(ALL_REDUCE, write(MM, grad, weight), "sum", "shard")
    program = write.returning(write(WAIT, sent), write(MM, of_input, weight))
    assert OverlapModelCollectives().rewrite(program) == 1
    expected = ["mm", "start_all_reduce", "mm", "reduce_scatter_tensor", "wait_tensor", "wait", "mm"]
    assert order_of(program) == expected


def test_a_phase_that_writes_is_left_alone() -> None:
    """Writes must not move before or after reads."""
    program = _columns()
    graph = program.phases["forward"].module.graph
    first = next(node for node in graph.nodes if node.target is MM)
    with graph.inserting_after(first):
        emit(graph, aten.relu_.default, first)
    before = print_phase(program.phases["forward"])
    assert OverlapModelCollectives().rewrite(program) == 0
    assert print_phase(program.phases["forward"]) == before


def test_before_partition() -> None:
    with pytest.raises(
        PassError, match="overlap-model-collectives: the program is not partitioned yet; run this pass after"
    ):
        run_pass(OverlapModelCollectives(), captured(Blocks(1), (torch.ones(3, 4),)))


@given(CALLS)
@settings(max_examples=200, deadline=None)
@pytest.mark.slow
def test_any_phase_computes_the_same(calls: list[tuple[torch._ops.OpOverload, int, int]]) -> None:
    """Values and the order of random operators; collectives keep their order, and results are read after the wait."""
    program = drawn(calls)
    before, draws = results_of(program)
    sent = [name for name in order_of(program) if name in ("all_reduce", "all_gather")]
    run_pass(OverlapModelCollectives(), program)
    after, draws_after = results_of(program)
    assert all(map(torch.equal, before, after))
    assert draws == draws_after
    done = {"start_all_reduce": "all_reduce", "start_all_gather": "all_gather"}
    now = [done.get(name, name) for name in order_of(program)]
    assert [name for name in now if name in ("all_reduce", "all_gather")] == sent
    for node in program.phases["forward"].module.graph.nodes:
        if node.target in STARTS.values():
            assert [user.target for user in node.users] == [MODEL_WAIT]


def test_all_kinds_have_an_asynchronous_form() -> None:
    assert set(STARTS) == {ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL}
