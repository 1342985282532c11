"""Reduce the gradient of a head that `pieced-loss` has cut piece by piece, while the next piece is computed.

    %j = cat([view(%dw0), view(%dw1)], 1)            %r0: f32[2, 3] = scattered(%dw0, avg, 2, shard)
    %d: f32[8, 3] = view(%j)                         %r1: f32[2, 3] = scattered(%dw1, avg, 2, shard)
  * %r = reduce_scatter_tensor(%d, avg, 2, shard)    %ds: f32[4, 3] = cat([%r0, %r1])
    %ds: f32[4, 3] = wait_tensor(%r)

A piece has the same rows of every rank's shard, so what each rank gets of it is a part of its shard. The whole gradient
is never held. Each element is the sum of the same numbers: equal bits on two ranks, and on more where a reduce-scatter
adds up ranks in an order that does not depend on what lies beside it.

Of a head that is tied to the embedding the gradient of the lookup is reduced by itself, where `exchange-rows` may send
its rows instead, and added to what ranks have of the pieces.

Reduced as before are gradients that are added to those of earlier microbatches, and those of replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from graphshard.errors import PassError
from graphshard.ir.graph import aten, emit, erase_dead
from graphshard.ir.operators import SCATTERED
from graphshard.ir.program import Phase, Program
from graphshard.ir.row_pieces import OF_PIECES
from graphshard.ir.transport import OF_A_REDUCTION, ROWS_REDUCED, reduced_over
from graphshard.passes.accumulate_gradients import full_gradient
from graphshard.passes.base import Pass
from graphshard.passes.exchange_rows import ARITHMETIC, until_reduced


@dataclass(frozen=True)
class ReduceInPieces(Pass):
    """Requires: a partitioned program without a plan.  Preserves: values up to rounding."""

    name: ClassVar[str] = "reduce-in-pieces"
    exact: ClassVar[bool] = False

    def requires(self, program: Program) -> None:
        if "joint" in program.phases or program.plan is not None:
            raise PassError(f"{self.name}: insert this pass after 'partition' and before 'overlap-collectives'")

    def rewrite(self, program: Program) -> int:
        return sum(_reduce_in_pieces(program, phase) for phase in program.phases.values())


def _reduce_in_pieces(program: Program, phase: Phase) -> int:
    count = 0
    for value, slot in zip(phase.results, phase.outputs):
        if slot.kind == "grad" and slot.of == "param" and isinstance(value, Node):
            alone = len(reduced_over(program.params[slot.name], program)) == 1
            count += alone and _split(value)
    if count:
        erase_dead(phase.module.graph)
    return count


def _split(value: Node) -> bool:
    """Replace the reduction of a gradient that is joined of pieces by one of each."""
    full = full_gradient(value)
    if full is None:
        return False
    pieces, looked_up = _parts(full)
    chain = until_reduced(full)
    if pieces is None or not chain:
        return False
    *steps, launch, wait = chain
    _, op, ranks, axis = launch.args
    parts = [_scattered(piece, steps, op, ranks, axis) for by in pieces.all_input_nodes for piece in by.all_input_nodes]
    with wait.graph.inserting_before(wait):
        total = emit(wait.graph, aten.cat.default, parts, like=launch)
        if looked_up is not None:
            chain[0].replace_input_with(full, looked_up)
            rows = emit(wait.graph, SCATTERED, launch.args[0], op, ranks, axis, like=launch)
            rows.meta[OF_A_REDUCTION] = True
            total = emit(wait.graph, aten.add.Tensor, rows, total, like=launch)
    total.meta.update({OF_A_REDUCTION: True, ROWS_REDUCED: axis})
    wait.replace_all_uses_with(total)
    wait.graph.erase_node(wait)
    wait.graph.erase_node(launch)
    return True


def _parts(full: Node) -> tuple[Node | None, Node | None]:
    """What a gradient is joined of pieces by, and what an embedding adds to it."""
    if full.target is aten.add.Tensor and len(full.args) == 2 and len(full.all_input_nodes) == 2:
        first, second = full.all_input_nodes
        for pieces, other in ((first, second), (second, first)):
            joined = _joined(pieces)
            if joined is not None and other.target is aten.embedding_dense_backward.default:
                return joined, other
    return _joined(full), None


def _joined(value: Node) -> Node | None:
    while value.target in (aten.slice.Tensor, aten.view.default, aten.t.default):
        value = value.all_input_nodes[0]
    return value if OF_PIECES in value.meta else None


def _scattered(piece: Node, steps: list[Node], op: object, ranks: object, axis: object) -> Node:
    """This rank's rows of the sum of a piece over ranks, started as soon as it is there."""
    graph = piece.graph
    for step in steps:
        if step.target in ARITHMETIC:
            with graph.inserting_after(piece):
                piece = emit(graph, step.target, piece, *step.args[1:], like=step, **step.kwargs)
    with graph.inserting_after(piece):
        return emit(graph, SCATTERED, piece, op, ranks, axis, like=piece)
