"""How parameters travel that decide themselves what is gathered of them: any number of tensors, in one collective.

    %t = join([%a, %b], 2, w)         %f: u8[134] = cat([%a as bytes, %b as bytes])
    %x: f32[8, 8] = %t[0]             %g: u8[268] = wait_tensor(all_gather_into_tensor(%f, 2, shard))
    %y: u8[12] = %t[1]                %x, %y = columns of %g as they were

A single tensor travels as it is, several in one buffer: of their dtype, or of bytes if they differ.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch.fx import Graph, Node

from graphshard.ir.graph import aten, c10d, calls_of, emit, fake, is_backward
from graphshard.ir.layout import collectives
from graphshard.ir.mesh import Axis, Mesh
from graphshard.ir.operators import JOIN, REDUCED
from graphshard.ir.params import ParamRow, ParamTable
from graphshard.ir.program import Phase
from graphshard.ir.transport import carrier


def insert_gathers(phase: Phase, params: ParamTable, mesh: Mesh) -> int:
    """Put a gather, or in a world of one rank nothing, in the place of every join; how many there were."""
    joins = calls_of(phase, JOIN)
    for join in joins:
        given: Any = join.args
        pieces, num_ranks, name = given
        emitter = _Emitter(phase.module.graph, join)
        with phase.module.graph.inserting_before(join):
            rows = [piece if fake(piece).dim() else emitter(aten.reshape.default, piece, [1]) for piece in pieces]
            wholes = _gathered(emitter, rows, params[name], params[name].on(mesh).shard) if num_ranks > 1 else rows
            if num_ranks > 1 and params[name].dim > 0:
                wholes = [_side_by_side(emitter, whole, params[name]) for whole in wholes]
        for user in list(join.users):
            index: Any = user.args[1]
            user.replace_all_uses_with(wholes[index])
            phase.module.graph.erase_node(user)
        phase.module.graph.erase_node(join)
    return len(joins)


class _Emitter:
    """Inserts operators at the graph's insertion point as parts of the module that a node belongs to."""

    def __init__(self, graph: Graph, like: Node) -> None:
        self._graph, self._like = graph, like

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return emit(self._graph, target, *args, like=self._like, **kwargs)


def _gathered(emitter: _Emitter, pieces: list[Node], row: ParamRow, axis: Axis) -> list[Node]:
    """What every piece becomes when it has been gathered."""
    assert row.extension is not None
    sent = row.extension.dtype
    dtype = carrier(sent)
    if len(pieces) == 1:
        return [_one(emitter, pieces[0], dtype, axis)]
    flats = [_as(emitter, emitter(aten.reshape.default, piece, [-1]), dtype) for piece in pieces]
    buffer = _launch(emitter, emitter(aten.cat.default, flats), axis)
    ends = list(accumulate(fake(flat).numel() for flat in flats))
    rows = emitter(aten.view.default, buffer, [axis.size, ends[-1]])
    wholes = []
    for piece, start, end in zip(pieces, [0, *ends], ends):
        column = emitter(aten.slice.Tensor, rows, 1, start, end)
        dense = emitter(aten.clone.default, column, memory_format=torch.contiguous_format)
        typed = _as(emitter, dense, fake(piece).dtype)
        wholes.append(emitter(aten.view.default, typed, _whole_shape(piece, axis)))
    return wholes


def _one(emitter: _Emitter, piece: Node, dtype: torch.dtype, axis: Axis) -> Node:
    if not fake(piece).is_contiguous():
        piece = emitter(aten.clone.default, piece, memory_format=torch.contiguous_format)
    return _as(emitter, _launch(emitter, _as(emitter, piece, dtype), axis), fake(piece).dtype)


def _side_by_side(emitter: _Emitter, whole: Node, row: ParamRow) -> Node:
    """What was gathered of shards along another dim than 0, as the memory of the parameter, in rows of a shard's."""
    dim, shape = row.dim, list(fake(whole).shape)
    ranks = emitter(aten.view.default, whole, [row.num_shards, *row.padded_shape])
    joined = emitter(aten.permute.default, ranks, [*range(1, dim + 1), 0, *range(dim + 1, len(row.shape) + 1)])
    dense = emitter(aten.clone.default, joined, memory_format=torch.contiguous_format)
    return emitter(aten.view.default, dense, shape)


def _launch(emitter: _Emitter, piece: Node, axis: Axis) -> Node:
    launch = emitter(c10d.all_gather_into_tensor.default, piece, axis.size, axis.name)
    return emitter(c10d.wait_tensor.default, launch)


def _as(emitter: _Emitter, value: Node, dtype: torch.dtype) -> Node:
    """The same bits as another dtype; the last dim counts elements of that."""
    return value if fake(value).dtype == dtype else emitter(aten.view.dtype, value, dtype)


def _whole_shape(piece: Node, axis: Axis) -> list[int]:
    shape = list(fake(piece).shape)
    return [axis.size * shape[0], *shape[1:]]


def around_gathers(phase: Phase) -> dict[str, tuple[list[Node], Node, list[Node]]]:
    """For each parameter that decides what is gathered: what makes that of its shard, the wait, and what follows.

    What follows is computed from gathered and stored parameters alone, in forward. What is reduced over the ranks on
    the way to the gather, and what that is made of, is not among what makes it.
    """
    found = {}
    parts = {node for node, slot in phase.slot_of().items() if slot.kind == "part"}
    for gather in collectives(phase):
        if gather.kind == "gather" and parts & set(_behind(gather.node, set())):
            (wait,) = gather.waits
            reduced = [node for node in _behind(gather.node, set()) if node.target is REDUCED]
            before = [n for n in _behind(gather.node, set(reduced)) if n.op == "call_function"]
            found[gather.params[0]] = (before, wait, _following(wait, {*parts, *before, *reduced, wait}))
    return found


def _behind(node: Node, ends: set[Node]) -> list[Node]:
    """A value and what it is made of; nothing of what `ends` are made of, nor these."""
    found: dict[Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in found and current not in ends:
            found[current] = None
            stack.extend(current.all_input_nodes)
    return list(found)


def _following(wait: Node, known: set[Node]) -> list[Node]:
    """What is computed in forward from a gathered parameter and nothing else."""
    found: dict[Node, None] = {}
    stack = [wait]
    while stack:
        for user in stack.pop().users:
            ours = user.op == "call_function" and not is_backward(user)
            if ours and user not in found and all(node in known or node in found for node in user.all_input_nodes):
                found[user] = None
                stack.append(user)
    return list(found)
