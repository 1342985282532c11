"""Collectives of one parameter: its gather, the reduction of its gradient, and their prologues and epilogues."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from graphshard.ir.graph import WAIT, aten, behind, c10d, emit, fake
from graphshard.ir.mesh import Axis
from graphshard.ir.operators import ALL_REDUCE, ALL_REDUCE_IN_ORDER, REDUCE_SCATTER, REDUCE_SCATTER_IN_ORDER
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.program import Program
from graphshard.torch_compat.torch_ops import OpOverload

# Mark of the operators between a full gradient and the returned shard.
OF_A_REDUCTION = "of_a_reduction"
# Mark of a sum of embedding rows that ranks have exchanged: the name of the axis.
ROWS_REDUCED = "rows_reduced"

# Dtypes, by item size, that gloo and NCCL both send; other dtypes are bitcast to these.
_BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
_PAIRS = torch.complex128  # travels as pairs of float64, for no dtype of 16 bytes can be sent
_SENDABLE = frozenset({*_BITS.values(), torch.float32, torch.float64, torch.bfloat16, torch.int8})


def gather(graph: Graph, shard: Node, spec: ParamSpec, axis: Axis) -> None:
    """Turn the placeholder into a shard, and replace its uses by the gathered parameter."""
    users = list(shard.users)
    shard.meta["val"] = fake(shard).new_empty_strided(spec.padded_shape, spec.stride_of(spec.padded_shape))
    if not users:
        return
    first = min(users)
    node = shard
    gather_steps: Steps = [(c10d.all_gather_into_tensor.default, (axis.size, axis.name), {}), (WAIT, (), {})]
    with graph.inserting_before(first):
        for target, args, kwargs in (*prologue(spec), *gather_steps, *gather_epilogue(spec)):
            node = emit(graph, target, node, *args, like=first, **kwargs)
    for user in users:
        user.replace_input_with(shard, node)


# Chain of operators: each with the arguments after the first, and keyword arguments.
Steps = list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]]


def prologue(spec: ParamSpec) -> Steps:
    """Return the operators from a shard in the compute dtype to the input of the gather."""
    steps: Steps = []
    if spec.order:
        steps.append((aten.permute.default, (list(spec.order),), {}))
    if spec.compute_dtype == _PAIRS:
        steps.append((aten.view_as_real.default, (), {}))
    elif spec.compute_dtype != carrier(spec.compute_dtype):
        steps.append((aten.view.dtype, (carrier(spec.compute_dtype),), {}))
    return steps


def gather_epilogue(spec: ParamSpec) -> Steps:
    """Return the operators from the gathered buffer, the concatenated shards, to the parameter.

    Empty for a parameter with an extension: see `passes/insert_collectives.py`.
    """
    if spec.extension:
        return []
    shape, dim = list(spec.in_memory(spec.padded_shape)), spec.memory_dim
    shape += [2] * (spec.compute_dtype == _PAIRS)
    joined = [*shape[:dim], spec.num_shards * shape[dim], *shape[dim + 1 :]]
    steps: Steps = []
    if dim > 0:
        steps += along_dim(spec.num_shards, shape, dim, joined)
    if not spec.is_even:
        steps.append((aten.slice.Tensor, (dim, 0, spec.shape[spec.dim]), {}))
        if dim > 0:  # remove the gaps that the slice leaves, as the captured parameter is dense
            steps.append((aten.clone.default, (), {"memory_format": torch.contiguous_format}))
    if spec.compute_dtype == _PAIRS:
        steps.append((aten.view_as_complex.default, (), {}))
    elif spec.compute_dtype != carrier(spec.compute_dtype):
        steps.append((aten.view.dtype, (spec.compute_dtype,), {}))
    if spec.order:
        steps.append((aten.permute.default, (list(spec.inverse_order),), {}))
    return steps


def along_dim(num_shards: int, shard: Sequence[int], dim: int, whole: Sequence[int]) -> Steps:
    """Return the operators that concatenate gathered shards of a shape along another dim than 0."""
    return [
        (aten.view.default, ([num_shards, *shard],), {}),
        (aten.permute.default, ([*range(1, dim + 1), 0, *range(dim + 1, len(shard) + 1)],), {}),
        (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
        (aten.view.default, (list(whole),), {}),
    ]


def carrier(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to bitcast to for a collective, if gloo or NCCL cannot send `dtype`; else `dtype`."""
    return dtype if dtype in _SENDABLE else _BITS[dtype.itemsize]


def reduced_over(spec: ParamSpec, program: Program) -> tuple[Axis, ...]:
    """Return the axes that a parameter's gradient is reduced over, the sharding axis first."""
    mesh = spec.on(program.mesh)
    axes = (mesh.shard, mesh.replicate)
    return () if spec.ignored else tuple(axis for axis in axes if axis is not None and axis.size > 1)


def reduce(graph: Graph, grad: Node, spec: ParamSpec, axes: tuple[Axis, ...]) -> Node:
    """Insert the mean of a full gradient over ranks in the reduce dtype; return this rank's padded shard."""
    if not axes and spec.divide_factor is None and not (spec.split and spec.split.sums):
        return grad
    return over_replicas(graph, over_shards(graph, grad, spec, axes), spec, axes)


def over_shards(graph: Graph, grad: Node, spec: ParamSpec, axes: tuple[Axis, ...]) -> Node:
    """Insert the first half of `reduce`: this rank's padded shard of the sum over the sharding axis."""
    then = _Chain(graph, grad)
    how = division(spec, axes)
    # They follow the sum over microbatches, which is in the reduce dtype.
    for left in spec.split.sums if spec.split else ():
        if left.num_pieces > 1:  # with one microbatch, FSDP2 casts after it
            then(REDUCE_SCATTER, left.operation, left.num_pieces, left.axis)
            continue
        then.cast(spec.reduce_dtype)
        then(ALL_REDUCE, left.operation, left.axis)
    then.cast(spec.reduce_dtype)
    if spec.order:
        then(aten.permute.default, list(spec.order))
    dim, rank = spec.memory_dim if spec.num_shards > 1 else 0, len(spec.shape)
    if not spec.is_even:
        padding = spec.shard_len * spec.num_shards - spec.shape[spec.dim]
        then(aten.constant_pad_nd.default, [0, 0] * (rank - 1 - dim) + [0, padding])
    if how.scale is not None:
        then(aten.mul.Tensor, how.scale)
    if how.before != 1:
        then(aten.div.Tensor, how.before)
    shape = list(spec.in_memory(spec.padded_shape))
    if dim > 0:
        # Concatenate the shards, as reduce-scatter expects them.
        then(aten.reshape.default, [*shape[:dim], spec.num_shards, *shape[dim:]])
        then(aten.permute.default, [dim, *(d for d in range(rank + 1) if d != dim)])
    if not fake(then.node).is_contiguous() or spec.reduce_dtype.is_complex:  # it may be conjugated lazily
        then(aten.clone.default, memory_format=torch.contiguous_format)
    if dim > 0:
        then(aten.view.default, [spec.num_shards * shape[0], *shape[1:]])
    if spec.num_shards > 1:
        with then.real():
            packet = REDUCE_SCATTER_IN_ORDER if spec.exchanged else c10d.reduce_scatter_tensor
            then(packet.default, how.over_shards, axes[0].size, axes[0].name)
            then(WAIT)
    return then.node


def over_replicas(graph: Graph, shard: Node, spec: ParamSpec, axes: tuple[Axis, ...]) -> Node:
    """Insert the second half of `reduce`: the all-reduce over replicas and the division."""
    then = _Chain(graph, shard)
    how = division(spec, axes)
    for axis in axes[1:] if spec.num_shards > 1 else axes:
        then.cast(spec.reduce_dtype)
        with then.real():
            if spec.exchanged:
                then(ALL_REDUCE_IN_ORDER.default, how.over_replicas, axis.size, axis.name)
            else:
                then(c10d.all_reduce.default, how.over_replicas, axis.name)
            then(WAIT)
    if how.after != 1:
        then(aten.div.Tensor, how.after)
    if spec.order:
        then(aten.permute.default, list(spec.inverse_order))
    return then.node


@dataclass
class _Chain:
    """Chain of inserted operators, each on the result of the previous one, marked with `OF_A_REDUCTION`."""

    graph: Graph
    node: Node

    def __call__(self, target: OpOverload, *args: object, **kwargs: object) -> None:
        with behind(self.node):
            self.node = emit(self.graph, target, self.node, *args, like=self.node, **kwargs)
        self.node.meta[OF_A_REDUCTION] = True

    def cast(self, dtype: torch.dtype) -> None:
        """Insert a cast, unless the result has the dtype."""
        if fake(self.node).dtype != dtype:
            self(aten._to_copy.default, dtype=dtype)

    @contextlib.contextmanager
    def real(self) -> Iterator[None]:
        """Let the operators of the block see the real and imaginary parts of complex numbers, which no group adds."""
        is_complex = fake(self.node).dtype.is_complex
        if is_complex:
            self(aten.view_as_real.default)
        yield
        if is_complex:
            self(aten.view_as_complex.default)


@dataclass(frozen=True)
class Division:
    """Scaling that turns a sum over ranks into a mean.

    Attributes:
        scale: factor that the gradient is multiplied by first; None for none.
        before, after: divisors before the first and after the last reduction; 1 for none.
        over_shards, over_replicas: operation of the reduction, "avg" or "sum".
    """

    scale: float | None = None
    before: float = 1
    after: float = 1
    over_shards: str = "sum"
    over_replicas: str = "sum"


def division(spec: ParamSpec, axes: tuple[Axis, ...]) -> Division:
    """Return the scaling, with the bits of FSDP2, where float32 and bfloat16, whose range suffices, are averaged.

    A power of two scales exactly, denormal numbers aside. So if the gradient is cast before or after its reduction, the
    collective sums, which NVLink's switch can do (NVLS) and an average it cannot, and the factor is part of the cast.
    In other dtypes it sums, with a division by about sqrt(divisor) before and by the rest after, to keep float16 in
    range. A divisor that is not the number of ranks becomes a factor in front, unless it is the number of shards.
    Exchanged gradients are divided after their sum, which is wide enough.
    """
    if spec.exchanged and spec.divide_factor is None and not spec.force_sum:
        return Division(over_shards="avg", over_replicas="avg")
    num_ranks = math.prod(axis.size for axis in axes)
    divisor = num_ranks if spec.divide_factor is None else spec.divide_factor
    if spec.reduce_dtype not in (torch.float32, torch.bfloat16) and not spec.exchanged:
        before = 1
        while divisor % before == 0 and divisor / before > before:
            before *= 2
        return Division(before=before, after=divisor / before)
    if spec.force_sum or spec.exchanged:
        return Division(after=divisor)
    if spec.divide_factor is None:
        if num_ranks & (num_ranks - 1) == 0 and spec.compute_dtype != spec.reduce_dtype:
            return Division(scale=1 / num_ranks)
        if num_ranks & (num_ranks - 1) == 0 and spec.dtype != spec.reduce_dtype:
            return Division(after=num_ranks)
        return Division(over_shards="avg", over_replicas="avg")
    if spec.num_shards == 1:
        return Division(before=divisor)
    return Division(over_shards="avg") if divisor == spec.num_shards else Division(scale=1 / divisor)
