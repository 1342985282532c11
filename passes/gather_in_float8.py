"""Gather parameters in eight bits: every shard has a scale of its own, which travels behind it.

  * %g = all_gather_into_tensor(%s, 2, shard)        * %b = cat([(%s / %scale) as float8, %scale as bytes])
    %w: bf16[8, 4] = wait_tensor(%g)                 * %g = all_gather_into_tensor(%b, 2, shard)
                                                     * %r: u8[34] = wait_tensor(%g)
                                                     * %w: bf16[8, 4] = (%r as float8) * (%r as scales)

What FSDP2's `fsdp_pre_all_gather` and `fsdp_post_all_gather` are used for with float8 weights: half the bytes of
bfloat16, a quarter of float32. The gradient is that of the gathered values and goes to the stored parameter as it is.
Uneven parameters are left alone: what lies in the padding of their shards must not reach a scale. So are those that
decide themselves what is gathered of them.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from graphshard.errors import PassError
from graphshard.ir.graph import aten, emit, fake
from graphshard.ir.layout import Collective, collectives
from graphshard.ir.params import ParamRow
from graphshard.ir.program import Program
from graphshard.passes.base import Pass

_FLOAT8 = torch.float8_e4m3fn
_SCALE_BYTES = 4  # a float32


@dataclass(frozen=True)
class GatherInFloat8(Pass):
    """Requires: a partitioned program without a plan.  Preserves: shapes and dtypes; values within 2^-4, relative.

    Attributes:
        params: patterns of the names of parameters, such as "layers.*.weight".
    """

    name: ClassVar[str] = "gather-in-float8"
    exact: ClassVar[bool] = False
    params: tuple[str, ...] = ("*",)

    def requires(self, program: Program) -> None:
        if "joint" in program.phases or program.plan is not None:
            raise PassError(f"{self.name}: insert this pass after 'partition' and before 'plan'")

    def rewrite(self, program: Program) -> int:
        count = 0
        for phase in program.phases.values():
            for collective in collectives(phase):
                row = program.params[collective.params[0]]
                if collective.kind == "gather" and self._applies(row):
                    _rewrite(collective)
                    count += 1
        return count

    def _applies(self, row: ParamRow) -> bool:
        chosen = any(fnmatch.fnmatchcase(row.name, pattern) for pattern in self.params)
        large = row.compute_dtype.is_floating_point and row.compute_dtype.itemsize > 1
        return chosen and large and row.is_even and row.extension is None


def _rewrite(gather: Collective) -> None:
    graph, shard = gather.node.graph, gather.node.all_input_nodes[0]
    (wait,) = gather.waits
    launch: Any = gather.node.args
    _, num_ranks, axis = launch
    dtype, numel, shape = fake(shard).dtype, fake(shard).numel(), list(fake(wait).shape)
    like = gather.node
    with graph.inserting_before(gather.node):
        flat = emit(graph, aten.reshape.default, shard, [numel], like=like)
        wide = emit(graph, aten._to_copy.default, flat, dtype=torch.float32, like=like)
        largest = emit(graph, aten.amax.default, emit(graph, aten.abs.default, wide, like=like), [0], True, like=like)
        above_zero = emit(graph, aten.clamp_min.default, largest, torch.finfo(torch.float32).tiny * 2**10, like=like)
        scale = emit(graph, aten.div.Tensor, above_zero, torch.finfo(_FLOAT8).max, like=like)
        small = emit(
            graph, aten._to_copy.default, emit(graph, aten.div.Tensor, wide, scale, like=like), dtype=_FLOAT8, like=like
        )
        parts = [emit(graph, aten.view.dtype, part, torch.uint8, like=like) for part in (small, scale)]
        sent = emit(graph, aten.cat.default, parts, like=like)
    gather.node.args = (sent, num_ranks, axis)
    gather.node.meta["val"] = fake(sent).new_empty([num_ranks * (numel + _SCALE_BYTES)])
    wait.meta["val"] = fake(gather.node)
    users = list(wait.users)
    with graph.inserting_after(wait):
        anchor = emit(graph, aten.view.default, wait, [num_ranks, numel + _SCALE_BYTES], like=like)
    full = _restored(anchor, num_ranks, numel, shape, dtype)
    for user in users:
        user.replace_input_with(wait, full)


def _restored(rows: Node, num_ranks: int, numel: int, shape: list[int], dtype: torch.dtype) -> Node:
    """The gathered parameter from the rows of bytes, one for each rank."""
    graph, last = rows.graph, rows

    def then(target: Any, *args: Any, **kwargs: Any) -> Node:
        nonlocal last
        with graph.inserting_after(last):
            last = emit(graph, target, *args, like=rows, **kwargs)
        return last

    values = then(aten.view.dtype, then(aten.slice.Tensor, rows, 1, 0, numel), _FLOAT8)
    tail = then(aten.slice.Tensor, rows, 1, numel, numel + _SCALE_BYTES)
    dense = then(aten.clone.default, tail, memory_format=torch.contiguous_format)
    scales = then(aten.view.dtype, dense, torch.float32)
    product = then(aten.mul.Tensor, then(aten._to_copy.default, values, dtype=torch.float32), scales)
    return then(aten.reshape.default, then(aten._to_copy.default, product, dtype=dtype), shape)
