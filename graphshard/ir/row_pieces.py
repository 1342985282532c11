"""The rows of a parameter in pieces: each has the same rows of every rank's shard, so it is gathered by one collective.

    %s: f32[4, 3]    of rank 0: rows 0 1 2 3      rank 1: rows 4 5 6 and padding
    piece 0          rows 0 1 4 5                 gathered of %s[:2]
    piece 1          rows 2 3 6, and zeros        gathered of %s[2:]

What was computed of each piece is joined in the order of the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx import Node

from graphshard.ir.graph import aten, fake
from graphshard.ir.operators import BEGUN, JOINING, SETTLED
from graphshard.ir.params import ParamRow

# Mark of what joins the pieces of a gradient: one behind another for each rank.
OF_PIECES = "of_pieces"


class RowPieces:
    """The rows of one parameter.

    Args:
        row: the parameter, whose shards are rows of it.
        axis: that it is gathered along.
        pieces: into how many it is cut.
        index: numbers of rows, as those that are computed here are to be.
        emit_call: is given an operator and its arguments.

    Attributes:
        ranges: for each piece, from which row of a shard to which.
    """

    def __init__(self, row: ParamRow, axis: str, pieces: int, index: Node, emit_call: Callable[..., Node]) -> None:
        self._row, self._axis, self._index, self._emit = row, axis, index, emit_call
        size = math.ceil(row.shard_len / pieces)
        self.ranges = [(at, min(at + size, row.shard_len)) for at in range(0, row.shard_len, size)]

    def begin(self, shard: Node, number: int) -> Node:
        """Start to gather a piece of a shard."""
        piece = self._emit(aten.slice.Tensor, shard, 0, *self.ranges[number])
        begun = self._emit(JOINING, piece, self._row.num_shards, self._axis)
        begun.meta[BEGUN] = True
        return begun

    def settle(self, begun: Node | None, number: int) -> Node:
        """A piece that has arrived; what lies in the padding is zero."""
        assert begun is not None
        piece, dtype = self._emit(SETTLED, begun), self._row.compute_dtype
        piece = piece if fake(piece).dtype == dtype else self._emit(aten.view.dtype, piece, dtype)
        none = self.padding(number)
        return piece if none is None else self._emit(aten.masked_fill.Scalar, piece, none, 0)

    def padding(self, number: int) -> Node | None:
        """Which rows of a piece, in one column, lie behind the last row of all; None if none do."""
        (at, end), ranks, length = self.ranges[number], self._row.num_shards, self._row.shard_len
        if (ranks - 1) * length + end <= self._row.shape[0]:
            return None
        ones = self._emit(aten.new_ones.default, self._index, [ranks, end - at])
        before = self._emit(aten.mul.Tensor, self._emit(aten.cumsum.default, ones, 0), length)
        rows = self._emit(aten.add.Tensor, self._emit(aten.cumsum.default, ones, 1), before)
        none = self._emit(aten.gt.Scalar, rows, self._row.shape[0] + length - at)  # a row, one, and a shard
        return self._emit(aten.view.default, none, [ranks * (end - at), 1])

    def of_vector(self, vector: Node, number: int) -> Node:
        """What a vector that has a number for each row has for those of a piece."""
        (at, end), ranks, length = self.ranges[number], self._row.num_shards, self._row.shard_len
        if not self._row.is_even:
            vector = self._emit(aten.constant_pad_nd.default, vector, [0, ranks * length - self._row.shape[0]])
        piece = self._emit(aten.slice.Tensor, self._emit(aten.view.default, vector, [ranks, length]), 1, at, end)
        whole = self._emit(aten.clone.default, piece, memory_format=torch.contiguous_format)
        return self._emit(aten.view.default, whole, [ranks * (end - at)])

    def joined(self, parts: dict[int, Node], dim: int) -> Node | None:
        """What has all rows along a dim, such as a gradient, of what has those of a piece each; None of nothing."""
        if not parts:
            return None
        ranks, width = self._row.num_shards, (self._row.shape[1],) if dim == 0 else ()
        by_rank = [
            self._emit(aten.view.default, parts[number], [ranks, end - at, *width])
            for number, (at, end) in enumerate(self.ranges)
        ]
        joined = self._emit(aten.cat.default, by_rank, 1)
        if width:
            joined.meta[OF_PIECES] = True
        joined = self._emit(aten.view.default, joined, [*([1] * dim), ranks * self._row.shard_len, *width])
        return joined if self._row.is_even else self._emit(aten.slice.Tensor, joined, dim, 0, self._row.shape[0])
