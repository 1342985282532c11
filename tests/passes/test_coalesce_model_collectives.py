"""coalesce-model-collectives: coalesces collectives that the model launches one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings

from graphshard.errors import PassError
from graphshard.ir.graph import WAIT, aten, c10d, emit
from graphshard.ir.operators import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COALESCED_FORMS, REDUCE_SCATTER
from graphshard.ir.printer import print_communication, print_phase
from graphshard.ir.program import Program
from graphshard.passes import CoalesceModelCollectives, OverlapModelCollectives
from graphshard.pipeline.pipeline import run_pass
from tests.helpers import Blocks, captured, copied
from tests.passes.handwritten import ADD, CALLS, MM, RAND, SQUARE, Written, drawn, order_of, results_of, two_layers

MUL = aten.mul.Tensor


def _keys_and_values() -> Program:
    """Gather keys and values along the sequence, one after the other."""
    write = Written(SQUARE, SQUARE, SQUARE)
    q, k, v = write.inputs
    keys = write(ALL_GATHER, k, 2, "shard")
    doubled = write(MUL, v, 2)  # input of the second gather, independent of the first
    values = write(ALL_GATHER, doubled, 2, "shard")
    return write.returning(write(MM, keys, q), write(MM, values, q))


def test_before_and_after() -> None:
    program = _keys_and_values()
    run_pass(CoalesceModelCollectives(), program)
    assert_expected_inline(
        print_phase(program.phases["forward"]),
        """\
  %0: f32[2, 2] = input:0
  %1: f32[2, 2] = input:1
  %2: f32[2, 2] = input:2
  %3: f32[2, 2] = mul.Tensor(%2, 2)
  %4: (f32[4, 2], f32[4, 2]) = all_gather_coalesced([%1, %3], 2, shard)
  %5: f32[4, 2] = getitem(%4, 0)
  %6: f32[4, 2] = getitem(%4, 1)
  %7: f32[4, 2] = mm(%5, %0)
  %8: f32[4, 2] = mm(%6, %0)
  return %7 as output:0
  return %8 as output:1
""",
    )
    assert print_communication(program) == ["forward: all_gather_coalesced over shard"]


def test_a_second_run_changes_nothing() -> None:
    program = _keys_and_values()
    run_pass(CoalesceModelCollectives(), program)
    once = print_phase(program.phases["forward"])
    assert CoalesceModelCollectives().rewrite(program) == 0
    assert print_phase(program.phases["forward"]) == once


REDUCE = (ALL_REDUCE, "sum", "shard")
ALONE = {
    "another operator": (REDUCE, (REDUCE_SCATTER, "sum", 2, "shard")),
    "another reduction": (REDUCE, (ALL_REDUCE, "max", "shard")),
    "another axis": (REDUCE, (ALL_REDUCE, "sum", "replicate")),
    "all-to-alls": ((ALL_TO_ALL, [2, 2], [2, 2], "shard"), (ALL_TO_ALL, [2, 2], [2, 2], "shard")),
}


def _pair(first: tuple[Any, ...], second: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> Program:
    write = Written((4, 2), (4, 2))
    x, y = write.inputs
    y.meta["val"] = y.meta["val"].to(dtype)
    return write.returning(write(first[0], x, *first[1:]), write(second[0], y, *second[1:]))


@pytest.mark.parametrize(("first", "second"), ALONE.values(), ids=ALONE)
def test_coalesces_only_equal_collectives(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    program = _pair(first, second)
    before = print_phase(program.phases["forward"])
    assert CoalesceModelCollectives().rewrite(program) == 0
    assert print_phase(program.phases["forward"]) == before


def test_coalesces_one_dtype_only() -> None:
    assert CoalesceModelCollectives().rewrite(_pair(REDUCE, REDUCE, torch.bfloat16)) == 0
    program = _pair(REDUCE, REDUCE)
    assert CoalesceModelCollectives().rewrite(program) == 2
    assert order_of(program) == ["all_reduce_coalesced", "getitem", "getitem"]


def test_coalesces_within_a_unit_only() -> None:
    """A unit's gradients are reduced after its backward: they must not wait for another unit."""
    program = _pair(REDUCE, REDUCE)
    calls = [node for node in program.phases["forward"].module.graph.nodes if node.target is ALL_REDUCE]
    for number, node in enumerate(calls):
        node.meta["nn_module_stack"] = {"key": (f"layers.{number}", torch.nn.Module)}
    assert {"layers.0", "layers.1"} <= set(program.params.units)
    assert CoalesceModelCollectives().rewrite(program) == 0
    calls[1].meta["nn_module_stack"] = {"key": ("layers.0.inner", torch.nn.Module)}
    assert CoalesceModelCollectives().rewrite(program) == 2


def _needed_between(target: torch._ops.OpOverload, *, for_second: bool = False) -> tuple[int, list[str]]:
    """Use the first result before the second launch; return the number of rewrites and the order of operators."""
    write = Written(SQUARE, SQUARE)
    x, y = write.inputs
    made = write(target, write(ALL_REDUCE, x, "sum", "shard"), *([] if target is RAND else [y]))
    program = write.returning(made, write(ALL_REDUCE, made if for_second else y, "sum", "shard"))
    return CoalesceModelCollectives().rewrite(program), order_of(program)


def test_moves_uses_of_the_first_after_the_launch() -> None:
    assert _needed_between(ADD) == (2, ["all_reduce_coalesced", "getitem", "getitem", "add"])


def test_leaves_operators_that_cannot_move() -> None:
    """Matmuls, random numbers, and inputs of the second collective."""
    assert _needed_between(MM) == (0, ["all_reduce", "mm", "all_reduce"])
    assert _needed_between(RAND) == (0, ["all_reduce", "rand_like", "all_reduce"])
    assert _needed_between(ADD, for_second=True) == (0, ["all_reduce", "add", "all_reduce"])


def test_groups_with_a_common_user() -> None:
    """A value that depends on both groups waits for both."""
    write = Written(SQUARE, SQUARE, SQUARE, SQUARE)
    sums, wholes = [], []
    for index in range(2):
        sums.append(write(ALL_REDUCE, write.inputs[index], "sum", "shard"))
        wholes.append(write(ALL_GATHER, write.inputs[2 + index], 1, "shard"))
        if index == 0:
            both = write(ADD, sums[0], wholes[0])
    program = write.returning(both, sums[1], wholes[1])
    assert CoalesceModelCollectives().rewrite(program) == 4
    pair = ["getitem", "getitem"]
    assert order_of(program) == ["all_reduce_coalesced", *pair, "all_gather_coalesced", *pair, "add"]


def test_several_results_of_one_operator() -> None:
    """The results move before the coalesced launch."""
    write = Written(SQUARE)
    pair = write(aten.split.Tensor, write(MUL, write.inputs[0], 2), 1)
    sums = [write(ALL_REDUCE, write.part(pair, index), "sum", "shard") for index in range(2)]
    program = write.returning(*sums)
    run_pass(CoalesceModelCollectives(), program)
    assert order_of(program) == ["mul", "split", "getitem", "getitem", "all_reduce_coalesced", "getitem", "getitem"]


def test_reductions_of_gradients_follow() -> None:
    """As before, gradients are summed along one axis and then reduced along the other."""
    write = Written(SQUARE, SQUARE, SQUARE)
    x, y, z = write.inputs
    first = write(ALL_REDUCE, x, "sum", "shard")
    sent = write(c10d.reduce_scatter_tensor.default, first, "sum", 2, "replicate")
    product = write(MM, y, z)
    second = write(ALL_REDUCE, y, "sum", "shard")
    program = write.returning(write(WAIT, sent), product, second)
    assert CoalesceModelCollectives().rewrite(program) == 2
    expected = ["mm", "all_reduce_coalesced", "getitem", "getitem", "reduce_scatter_tensor", "wait_tensor"]
    assert order_of(program) == expected


def test_collectives_that_overlap_compute_stay_separate() -> None:
    write = Written(SQUARE, SQUARE, SQUARE)
    x, y, z = write.inputs
    first = write(ALL_REDUCE, x, "sum", "shard")
    second = write(ALL_REDUCE, write(MM, y, z), "sum", "shard")
    program = write.returning(write(ADD, first, second))
    run_pass(OverlapModelCollectives(), program)
    assert CoalesceModelCollectives().rewrite(program) == 0
    assert order_of(program) == ["start_all_reduce", "mm", "all_reduce", "wait", "add"]


def test_a_phase_that_writes_is_left_alone() -> None:
    program = _keys_and_values()
    graph = program.phases["forward"].module.graph
    first = next(node for node in graph.nodes if node.target is MM)
    with graph.inserting_after(first):
        emit(graph, aten.relu_.default, first)
    before = print_phase(program.phases["forward"])
    assert CoalesceModelCollectives().rewrite(program) == 0
    assert print_phase(program.phases["forward"]) == before


def test_nothing_to_coalesce() -> None:
    program = copied(two_layers())
    before = [print_phase(phase) for phase in program.phases.values()]
    run_pass(CoalesceModelCollectives(), program)
    assert [print_phase(phase) for phase in program.phases.values()] == before


def test_before_partition() -> None:
    with pytest.raises(
        PassError, match="coalesce-model-collectives: the program is not partitioned yet; run this pass after"
    ):
        run_pass(CoalesceModelCollectives(), captured(Blocks(1), (torch.ones(3, 4),)))


@given(CALLS)
@settings(max_examples=200, deadline=None)
@pytest.mark.slow
def test_any_phase_computes_the_same(calls: list[tuple[torch._ops.OpOverload, int, int]]) -> None:
    """Values and the order of random operators; the same number of tensors is sent."""
    program = drawn(calls)
    before, draws = results_of(program)
    sent = len([name for name in order_of(program) if name in ("all_reduce", "all_gather")])
    found = CoalesceModelCollectives().rewrite(program)
    after, draws_after = results_of(program)
    assert all(map(torch.equal, before, after))
    assert draws == draws_after
    nodes = program.phases["forward"].module.graph.nodes
    together = [len(node.args[0]) for node in nodes if node.target in COALESCED_FORMS.values()]
    assert sum(together) == found
    assert all(number > 1 for number in together)
    assert sent == found + len([name for name in order_of(program) if name in ("all_reduce", "all_gather")])


def test_most_collectives_coalesce() -> None:
    assert set(COALESCED_FORMS) == {ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER}
