"""Kernels of a run of operators, with their FLOPs, bytes and elementwise operations.

    norm, cast, mm, silu, mul, mm     ->     pointwise(norm, cast)  matmul  pointwise(silu, mul)  matmul

Elementwise operators and reductions that Inductor will fuse are one kernel, which reads its inputs once and writes the
values that are used outside once. Sizes are ints, or sympy expressions where the capture is symbolic (`meta["sizes"]`);
all arithmetic here works for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import sympy
import torch
from torch.fx import Node

from graphshard.cost.flops import Attention, Gemm, dtype_of, is_multiplication, multiplies, runs_graphs, runs_of, sizes
from graphshard.cost.scalars import Scalar
from graphshard.ir.graph import aten, base_of, is_alias, is_part
from graphshard.ir.opaque_calls import OPAQUE, seconds_of
from graphshard.ir.sizes import is_size

# Operators that read only the elements of their first input that they return.
_PICK = frozenset({aten.embedding.default, aten.gather.default, aten.index.Tensor, aten.index_select.default})
# Operators that read only the metadata of their input.
_LIKE = frozenset(
    {
        *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default),
        *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default),
        *(aten.new_empty_strided.default, aten.rand_like.default, aten.randn_like.default),
    }
)
# Operators, in addition to multiplications, that Inductor does not fuse with their neighbors.
_UNFUSED = frozenset(
    {
        *(aten.embedding_dense_backward.default, aten.index_put.default, aten.scatter_add.default),
        *(aten.scatter.src, aten.sort.default, aten.sort.stable, aten.topk.default, aten.cumsum.default),
        *(aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default),
        *OPAQUE,
    }
)


@dataclass(frozen=True)
class Work:
    """One kernel.

    Attributes:
        kind: which rate limits it, if not memory.
        operations: elementwise operations.
        num_bytes: read and written.
        dtype: name of the dtype it multiplies in, such as "bfloat16".
        gemms, attention: of known sizes.
        measured: kind of device on which the kernel was measured, and its seconds.
    """

    kind: Literal["matmul", "attention", "pointwise"]
    flop: Scalar
    operations: Scalar
    num_bytes: Scalar
    dtype: str
    gemms: tuple[Gemm, ...] = ()
    attention: Attention | None = None
    measured: tuple[str, Scalar] | None = None


def num_bytes(node: Node) -> Scalar:
    """Return the bytes of a value, of all tensors if there are several."""
    val, shape = node.meta.get("val"), sizes(node)
    if isinstance(val, torch.Tensor):
        return math.prod(shape) * val.dtype.itemsize
    if isinstance(val, (tuple, list)):
        return sum(math.prod(s) * v.dtype.itemsize for s, v in zip(shape, val) if isinstance(v, torch.Tensor))
    return 0


def work_of(nodes: Sequence[Node], *, fused: bool = True) -> list[Work]:
    """Return the kernels of compute nodes, in the order of their first operator; one per operator if not fused."""
    return [work for _, work in kernels_of(nodes, fused=fused)]


def kernels_of(nodes: Sequence[Node], *, fused: bool = True) -> list[tuple[list[Node], Work]]:
    """Return the kernels of compute nodes as `work_of` does, each with its operators."""
    kernels = [node for node in nodes if node.op == "call_function" and not (is_alias(node) or is_part(node))]
    kernels = [node for node in kernels if not is_size(node)]  # a number of the host
    found = []
    for group in _fuse(kernels) if fused else [[kernel] for kernel in kernels]:
        first = group[0]
        if runs_graphs(first):
            graphs, times = runs_of(first)
            once = [work for graph in graphs for work in work_of(list(graph.graph.nodes), fused=fused)]
            found += [(group, work) for work in once * times]
        elif _stands_alone(first):
            found.append((group, _alone(first)))
        elif not fused or group[1:] or first.all_input_nodes:  # else a constant, which its user makes in passing
            found.append((group, _fused(group)))
    return found


def _fuse(kernels: list[Node]) -> list[list[Node]]:
    """Group operators that one kernel runs: the connected ones of one level."""
    level = _levels(kernels)
    group_of: dict[Node, list[Node]] = {}
    groups: list[list[Node]] = []
    for node in kernels:
        group_of[node] = group = [node]
        groups.append(group)
        if _stands_alone(node):
            continue
        for source in map(producer, node.all_input_nodes):
            other = group_of.get(source, group)
            if other is not group and level[source] == level[node] and not _stands_alone(source):
                for member in group:
                    group_of[member] = other
                other += group
                group.clear()
                group = other
    return [group for group in groups if group]


def _levels(kernels: list[Node]) -> dict[Node, int]:
    """Return how many operators that stand alone run in sequence before each operator.

    An operator may wait for its users, if none of them stands alone.
    """
    level: dict[Node, int] = {}
    users: dict[Node, list[Node]] = {node: [] for node in kernels}
    for node in kernels:
        alone = _stands_alone(node)
        sources = [source for source in map(producer, node.all_input_nodes) if source in level]
        level[node] = max((level[source] + (_stands_alone(source) and not alone) for source in sources), default=0)
        for source in sources:
            users[source].append(node)
    for node in reversed(kernels):
        if users[node] and not _stands_alone(node) and not any(map(_stands_alone, users[node])):
            level[node] = min(level[user] for user in users[node])
    return level


def producer(node: Node) -> Node:
    """Return the operator that computes a value: skip views and selections of parts."""
    return base_of(node, lambda each: is_alias(each) or is_part(each))


def _alone(node: Node) -> Work:
    """Return the kernel of an operator that is not fused."""
    moved = num_bytes(node) + sum(_read(source) for source in node.all_input_nodes)
    kind, flop, found = multiplies(node)
    if kind:
        gemms, attention = ((), found) if isinstance(found, Attention) else (found, None)
        return Work(kind, flop, 0, moved, dtype_of(node.all_input_nodes[0]), gemms, attention)
    rate = seconds_of(node)
    measured = None if rate is None else (rate[0], rate[1] * moved)
    return Work("pointwise", 0, _numel(node), moved, dtype_of(node), measured=measured)


def _fused(group: list[Node]) -> Work:
    members = set(group)
    reads = {}
    for node in group:
        for position, source in enumerate(() if node.target in _LIKE else node.all_input_nodes):
            if producer(source) not in members:
                picks = node.target in _PICK and position == 0
                reads[base_of(source, is_alias)] = num_bytes(node) if picks else _read(source)
    written = [num_bytes(node) for node in group if leaves(node, members)]
    return Work("pointwise", 0, operations_of(group), sum(reads.values()) + sum(written), dtype_of(group[-1]))


def operations_of(nodes: Iterable[Node]) -> Scalar:
    """Return the elementwise operations of operators: one for each element read or written, whichever are more."""
    return sum(max((_numel(n) for n in (node, *node.all_input_nodes)), key=_order) for node in nodes)


def leaves(node: Node, members: set[Node]) -> bool:
    """Return whether a value is used outside its kernel, directly or through views."""
    for user in node.users:
        if is_alias(user) or is_part(user):
            if leaves(user, members):
                return True
        elif user not in members:
            return True
    return not node.users


def _read(source: Node) -> Scalar:
    """Return the bytes read of an input: at most the memory of an expanded view, at most the extent of a slice."""
    return min((num_bytes(source), num_bytes(base_of(source, is_alias))), key=_order)


def _order(value: Scalar) -> float:
    """Return a key to compare sizes that may be symbolic: their value at large sizes."""
    if isinstance(value, sympy.Expr):
        return float(value.subs(dict.fromkeys(value.free_symbols, 4096)))
    return float(value)


def _numel(node: Node) -> Scalar:
    shape = sizes(node)
    if isinstance(shape, list):
        return max((math.prod(s) for s in shape if s is not None), key=_order, default=0)
    return math.prod(shape) if shape is not None else 0


def _stands_alone(node: Node) -> bool:
    return node.target in _UNFUSED or is_multiplication(node) or runs_graphs(node)
