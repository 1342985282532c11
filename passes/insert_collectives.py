"""Turn parameters into shards: gather each before its first use, reduce-scatter each gradient.

    %w: f32[8, 4] = param:w                  %s: f32[4, 4] = param:w
    %y = mm(%x, %w)                        * %g = all_gather_into_tensor(%s, 2, shard)
    return %dw as grad:w                     %w: f32[8, 4] = wait_tensor(%g)
                                             %y = mm(%x, %w)
                                           * %r = reduce_scatter_tensor(%dw, avg, 2, shard)
                                             %ds: f32[4, 4] = wait_tensor(%r)
                                             return %ds as grad:w

The reduction is in the parameter's reduce dtype. Shards are padded to equal size, so the graph is the same on every
rank: rows beyond the parameter's are cut off after the gather and filled with zeros before the reduction. A world of
one rank gets no collectives at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from graphshard.errors import PassError
from graphshard.graph import aten, c10d, emit, fake, is_communication
from graphshard.params import ParamRow
from graphshard.passes.base import Pass
from graphshard.program import Axis, Phase, Program


@dataclass(frozen=True)
class InsertCollectives(Pass):
    """Requires: no collectives yet.  Preserves: the value of every output, gradients as the mean over ranks."""

    name: ClassVar[str] = "insert-collectives"
    establishes: ClassVar[frozenset[str]] = frozenset({"sharded_inputs", "reduced_once"})

    def requires(self, program: Program) -> None:
        for phase in program.phases.values():
            if any(is_communication(n) for n in phase.module.graph.nodes):
                raise PassError(f"{self.name}: the graph already has collectives; run this pass once, first")

    def rewrite(self, program: Program) -> int:
        if program.axis.size == 1:
            return 0
        count = 0
        for phase in program.phases.values():
            for node, slot in phase.slot_of().items():
                if slot.kind == "param":
                    gather(phase.module.graph, node, program.params[slot.name], program.axis)
                    count += 1
            count += _reduce_gradients(phase, program)
        return count


def gather(graph: Graph, shard: Node, row: ParamRow, axis: Axis) -> None:
    """Make the placeholder a shard and replace its uses by the gathered parameter."""
    users = list(shard.users)
    shard.meta["val"] = fake(shard).new_empty(row.padded_shape)
    if not users:
        return
    first = min(users)
    with graph.inserting_before(first):
        start = emit(graph, c10d.all_gather_into_tensor.default, shard, axis.size, axis.name, like=first)
        full = emit(graph, c10d.wait_tensor.default, start, like=first)
        if not row.is_even:
            full = emit(graph, aten.slice.Tensor, full, 0, 0, row.shape[0], like=first)
    for user in users:
        user.replace_input_with(shard, full)


def _reduce_gradients(phase: Phase, program: Program) -> int:
    graph = phase.module.graph
    results = phase.results
    count = 0
    for index, slot in enumerate(phase.outputs):
        grad = results[index]
        if slot.kind == "grad" and slot.of == "param" and isinstance(grad, Node):
            with graph.inserting_after(grad):
                results[index] = reduce(graph, grad, program.params[slot.name], program.axis)
            count += 1
    phase.set_results(results)
    return count


def reduce(graph: Graph, grad: Node, row: ParamRow, axis: Axis) -> Node:
    """Mean of a full gradient over the ranks in the reduce dtype, as this rank's padded shard."""
    pre, post = divide_factors(row.reduce_dtype, axis.size)
    node = grad

    def then(target: torch._ops.OpOverload, *args: object, **kwargs: object) -> Node:
        with graph.inserting_after(node):
            return emit(graph, target, node, *args, like=grad, **kwargs)

    if fake(grad).dtype != row.reduce_dtype:
        node = then(aten._to_copy.default, dtype=row.reduce_dtype)
    if not row.is_even:
        padding = row.shard_len * row.num_shards - row.shape[0]
        node = then(aten.constant_pad_nd.default, [0, 0] * (len(row.shape) - 1) + [0, padding])
    if pre != 1:
        node = then(aten.div.Tensor, pre)
    if not fake(node).is_contiguous():
        node = then(aten.clone.default, memory_format=torch.contiguous_format)
    op = "avg" if post is None else "sum"
    node = then(c10d.reduce_scatter_tensor.default, op, axis.size, axis.name)
    node = then(c10d.wait_tensor.default)
    return node if post is None else then(aten.div.Tensor, post)


def divide_factors(reduce_dtype: torch.dtype, world_size: int) -> tuple[float, float | None]:
    """Divisors of a gradient before and after its reduction; no divisor after means the collective averages.

    FSDP2's rule: float32 and bfloat16 have the exponent range for a sum, so the collective averages. Others are
    summed, with about sqrt(world size) divided away before and the rest after, to keep float16 in range.
    """
    if reduce_dtype in (torch.float32, torch.bfloat16):
        return 1, None
    pre = 1
    while world_size % pre == 0 and world_size / pre > pre:
        pre *= 2
    return pre, world_size / pre
