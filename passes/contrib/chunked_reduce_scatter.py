"""Reduce the gradient of a head that `vocab-sharded-loss` has cut chunk by chunk, while the next chunk is computed.

    %j = cat([view(%dw0), view(%dw1)], 1)            %r0: f32[2, 3] = reduce_scatter(%dw0, avg, 2, shard)
    %d: f32[8, 3] = view(%j)                         %r1: f32[2, 3] = reduce_scatter(%dw1, avg, 2, shard)
  * %r = reduce_scatter_tensor(%d, avg, 2, shard)    %ds: f32[4, 3] = cat([%r0, %r1])
    %ds: f32[4, 3] = wait_tensor(%r)

A chunk has the same rows of every rank's shard, so each rank receives a part of its shard. The whole gradient is never
held. Each element is the sum of the same numbers: equal bits on two ranks, and on more if the reduce-scatter adds up
ranks in an order that does not depend on the neighboring elements.

If the head is tied to the embedding, the gradient of the lookup is reduced separately (`embedding-row-exchange` may
send its rows instead) and added to the reduced chunks. The pass skips gradients that are added to the ones of earlier
microbatches, and gradients that are reduced over replicas, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from graphshard.ir.graph import aten, erase_dead, trace
from graphshard.ir.operators import REDUCE_SCATTER
from graphshard.ir.program import Program
from graphshard.ir.transport import OF_A_REDUCTION, ROWS_REDUCED, reduced_over
from graphshard.passes.accumulate_gradients import apply, full_gradient, until_reduced
from graphshard.passes.base import Pass, gradients_of
from graphshard.passes.contrib.vocab_sharded_loss import OF_PIECES


@dataclass(frozen=True)
class ChunkedReduceScatter(Pass):
    """Requires: a partitioned program without a plan.  Preserves: values up to rounding."""

    name: ClassVar[str] = "chunked-reduce-scatter"
    runs: ClassVar = "before overlap"
    exact: ClassVar[bool] = False

    def rewrite(self, program: Program) -> int:
        count = 0
        for phase in program.phases.values():
            grads = [value for value, spec in gradients_of(phase, program) if len(reduced_over(spec, program)) == 1]
            split = sum(map(_split, grads))
            if split:
                erase_dead(phase.module.graph)
            count += split
        return count


def _split(value: Node) -> bool:
    """Replace the reduction of a gradient that is concatenated from chunks by a reduction of each chunk."""
    full = full_gradient(value)
    if full is None:
        return False
    chunks, looked_up = _parts(full)
    chain = until_reduced(full)
    if chunks is None or not chain:
        return False
    *steps, launch, wait = chain
    _, op, ranks, axis = launch.args
    parts = [_scattered(chunk, steps, launch) for by in chunks.all_input_nodes for chunk in by.all_input_nodes]
    total = trace(wait, aten.cat.default, parts, like=launch)
    if looked_up is not None:
        chain[0].replace_input_with(full, looked_up)
        rows = trace(wait, REDUCE_SCATTER, launch.args[0], op, ranks, axis, like=launch)
        rows.meta[OF_A_REDUCTION] = True
        total = trace(wait, aten.add.Tensor, rows, total, like=launch)
    total.meta.update({OF_A_REDUCTION: True, ROWS_REDUCED: axis})
    wait.replace_all_uses_with(total)
    wait.graph.erase_node(wait)
    wait.graph.erase_node(launch)
    return True


def _parts(full: Node) -> tuple[Node | None, Node | None]:
    """Return the concatenation of chunks that a gradient is, and the gradient of a lookup that is added to it."""
    if full.target is aten.add.Tensor and len(full.args) == 2 and len(full.all_input_nodes) == 2:
        first, second = full.all_input_nodes
        for chunks, other in ((first, second), (second, first)):
            joined = _concatenation(chunks)
            if joined is not None and other.target is aten.embedding_dense_backward.default:
                return joined, other
    return _concatenation(full), None


def _concatenation(value: Node) -> Node | None:
    while value.target in (aten.slice.Tensor, aten.view.default, aten.t.default):
        value = value.all_input_nodes[0]
    return value if OF_PIECES in value.meta else None


def _scattered(chunk: Node, steps: list[Node], launch: Node) -> Node:
    """Reduce-scatter a chunk as soon as it is computed."""
    return trace(chunk.next, lambda value: REDUCE_SCATTER(apply(steps, value), *launch.args[1:]), chunk, like=chunk)
