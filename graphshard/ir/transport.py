"""How a row of the parameter table travels: in which dtype, where a gather lands, and how a sum becomes a mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from graphshard.ir.graph import aten, behind, c10d, emit, fake
from graphshard.ir.mesh import Axis
from graphshard.ir.operators import REDUCED, SCATTERED
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.program import Program
from graphshard.torch_compat.operators import OpOverload

# Mark of the operators between a full gradient and what the graph returns of it.
OF_A_REDUCTION = "of_a_reduction"
# Mark of a sum over shards of rows that ranks have sent each other: the name of the axis.
ROWS_REDUCED = "rows_reduced"

# What both gloo and NCCL send as it is; other dtypes travel as these, bit by bit.
_BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
_SENDABLE = frozenset({*_BITS.values(), torch.float32, torch.float64, torch.bfloat16, torch.int8})


def gather(graph: Graph, shard: Node, row: ParamSpec, axis: Axis) -> None:
    """Make the placeholder a shard and replace its uses by the gathered parameter."""
    users = list(shard.users)
    shard.meta["val"] = fake(shard).new_empty_strided(row.padded_shape, row.stride_of(row.padded_shape))
    if not users:
        return
    first = min(users)
    node = shard
    with graph.inserting_before(first):
        for target, args, kwargs in prologue(row):
            node = emit(graph, target, node, *args, like=first, **kwargs)
        node = emit(graph, c10d.all_gather_into_tensor.default, node, axis.size, axis.name, like=first)
        node = emit(graph, c10d.wait_tensor.default, node, like=first)
        for target, args, kwargs in landing(row):
            node = emit(graph, target, node, *args, like=first, **kwargs)
    for user in users:
        user.replace_input_with(shard, node)


# Operators one after the other: each with its arguments behind what is changed, and its keyword arguments.
Steps = list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]]


def prologue(row: ParamSpec) -> Steps:
    """How a shard in the compute dtype becomes what travels in a gather."""
    steps: Steps = []
    if row.order:
        steps.append((aten.permute.default, (list(row.order),), {}))
    if row.compute_dtype != carrier(row.compute_dtype):
        steps.append((aten.view.dtype, (carrier(row.compute_dtype),), {}))
    return steps


def landing(row: ParamSpec) -> Steps:
    """How a gathered buffer, the ranks' shards one behind another, becomes the parameter.

    Nothing is known of it where the parameter decides itself what is gathered: see `passes/insert_collectives.py`.
    """
    if row.extension:
        return []
    shape, dim = list(row.in_memory(row.padded_shape)), row.memory_dim
    joined = [*shape[:dim], row.num_shards * shape[dim], *shape[dim + 1 :]]
    steps: Steps = []
    if dim > 0:
        side_by_side = [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)]
        steps += [
            (aten.view.default, ([row.num_shards, *shape],), {}),
            (aten.permute.default, (side_by_side,), {}),
            (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
            (aten.view.default, (joined,), {}),
        ]
    if not row.is_even:
        steps.append((aten.slice.Tensor, (dim, 0, row.shape[row.dim]), {}))
        if dim > 0:  # what is cut off left gaps, which the captured parameter does not have
            steps.append((aten.clone.default, (), {"memory_format": torch.contiguous_format}))
    if row.compute_dtype != carrier(row.compute_dtype):
        steps.append((aten.view.dtype, (row.compute_dtype,), {}))
    if row.order:
        steps.append((aten.permute.default, (list(row.inverse_order),), {}))
    return steps


def carrier(dtype: torch.dtype) -> torch.dtype:
    """The dtype whose bits travel in the place of one that gloo or NCCL cannot send."""
    return dtype if dtype in _SENDABLE else _BITS[dtype.itemsize]


def reduced_over(row: ParamSpec, program: Program) -> tuple[Axis, ...]:
    """The axes that a parameter's gradient is reduced over: the sharding one first."""
    mesh = row.on(program.mesh)
    axes = (mesh.shard, mesh.replicate)
    return () if row.ignored else tuple(axis for axis in axes if axis is not None and axis.size > 1)


def reduce(graph: Graph, grad: Node, row: ParamSpec, axes: tuple[Axis, ...]) -> Node:
    """Mean of a full gradient over the ranks in the reduce dtype, as this rank's padded shard."""
    if not axes and row.divide_factor is None and not (row.split and row.split.sums):
        return grad
    return over_replicas(graph, over_shards(graph, grad, row, axes), row, axes)


def over_shards(graph: Graph, grad: Node, row: ParamSpec, axes: tuple[Axis, ...]) -> Node:
    """The first half of `reduce`: this rank's padded shard of the sum over the ranks that share a parameter."""
    then = _Chain(graph, grad)
    how = division(row, axes)
    for left in row.split.sums if row.split else ():  # after the sum over microbatches, which is in the reduce dtype
        if left.num_pieces > 1:  # FSDP2 casts what one microbatch has behind it
            then(SCATTERED, left.operation, left.num_pieces, left.axis)
            continue
        _in_reduce_dtype(then, row)
        then(REDUCED, left.operation, left.axis)
    _in_reduce_dtype(then, row)
    if row.order:
        then(aten.permute.default, list(row.order))
    dim, rank = row.memory_dim if row.num_shards > 1 else 0, len(row.shape)
    if not row.is_even:
        padding = row.shard_len * row.num_shards - row.shape[row.dim]
        then(aten.constant_pad_nd.default, [0, 0] * (rank - 1 - dim) + [0, padding])
    if how.scale is not None:
        then(aten.mul.Tensor, how.scale)
    if how.before != 1:
        then(aten.div.Tensor, how.before)
    shape = list(row.in_memory(row.padded_shape))
    if dim > 0:
        # One shard behind another, as the reduction deals them out.
        then(aten.reshape.default, [*shape[:dim], row.num_shards, *shape[dim:]])
        then(aten.permute.default, [dim, *(d for d in range(rank + 1) if d != dim)])
    if not fake(then.node).is_contiguous():
        then(aten.clone.default, memory_format=torch.contiguous_format)
    if dim > 0:
        then(aten.view.default, [row.num_shards * shape[0], *shape[1:]])
    if row.num_shards > 1:
        then(c10d.reduce_scatter_tensor.default, how.over_shards, axes[0].size, axes[0].name)
        then(c10d.wait_tensor.default)
    return then.node


def _in_reduce_dtype(then: _Chain, row: ParamSpec) -> None:
    if fake(then.node).dtype != row.reduce_dtype:
        then(aten._to_copy.default, dtype=row.reduce_dtype)


def over_replicas(graph: Graph, shard: Node, row: ParamSpec, axes: tuple[Axis, ...]) -> Node:
    """The second half of `reduce`: the mean over all ranks of what the first half made."""
    then = _Chain(graph, shard)
    how = division(row, axes)
    for axis in axes[1:] if row.num_shards > 1 else axes:
        then(c10d.all_reduce.default, how.over_replicas, axis.name)
        then(c10d.wait_tensor.default)
    if how.after != 1:
        then(aten.div.Tensor, how.after)
    if row.order:
        then(aten.permute.default, list(row.inverse_order))
    return then.node


@dataclass
class _Chain:
    """A row of operators, each on the result of the one before; marked, so that its beginning is found again."""

    graph: Graph
    node: Node

    def __call__(self, target: OpOverload, *args: object, **kwargs: object) -> None:
        with behind(self.node):
            self.node = emit(self.graph, target, self.node, *args, like=self.node, **kwargs)
        self.node.meta[OF_A_REDUCTION] = True


@dataclass(frozen=True)
class Division:
    """How a sum over ranks becomes a mean.

    Attributes:
        scale: the gradient is multiplied by it first; None leaves it.
        before, after: it is divided by these before the first and after the last reduction; 1 leaves it.
        over_shards, over_replicas: "avg" or "sum".
    """

    scale: float | None = None
    before: float = 1
    after: float = 1
    over_shards: str = "sum"
    over_replicas: str = "sum"


def division(row: ParamSpec, axes: tuple[Axis, ...]) -> Division:
    """FSDP2's rule: float32 and bfloat16 have the exponent range for a sum, so the collective averages.

    Others are summed, with about sqrt(divisor) divided away before and the rest after, to keep float16 in range. A
    divisor that is not the number of ranks is multiplied in first, unless the gradient is sharded over that many.
    """
    num_ranks = math.prod(axis.size for axis in axes)
    divisor = num_ranks if row.divide_factor is None else row.divide_factor
    if row.reduce_dtype not in (torch.float32, torch.bfloat16):
        before = 1
        while divisor % before == 0 and divisor / before > before:
            before *= 2
        return Division(before=before, after=divisor / before)
    if row.force_sum:
        return Division(after=divisor)
    if row.divide_factor is None:
        return Division(over_shards="avg", over_replicas="avg")
    if row.num_shards == 1:
        return Division(before=divisor)
    return Division(over_shards="avg") if divisor == row.num_shards else Division(scale=1 / divisor)
