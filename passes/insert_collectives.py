"""Shard the parameters: all-gather each before its first use, reduce-scatter each gradient.

    %w: f32[8, 4] = param:w                  %s: f32[4, 4] = param:w
    %y = mm(%x, %w)                        * %g = all_gather_into_tensor(%s, 2, shard)
    return %dw as grad:w                     %w: f32[8, 4] = wait_tensor(%g)
                                             %y = mm(%x, %w)
                                           * %r = reduce_scatter_tensor(%dw, avg, 2, shard)
                                             %ds: f32[4, 4] = wait_tensor(%r)
                                             return %ds as grad:w

The reduction is in the parameter's reduce dtype. Shards are padded to equal size, so the graph is the same on every
rank: padding is cut off after the gather and filled with zeros before the reduction. If parameters are replicated over
a second mesh axis, an all-reduce of the shard over that axis follows. A collective concatenates shards along the
outermost dim in memory; the epilogue of a parameter that is sharded along another dim moves them there. A parameter
that is not sharded, and a world of one rank, gets no collectives.

For a parameter with `fsdp_pre_all_gather` capture has left a `subclass_all_gather` of any number of tensors, which
becomes one all-gather: a single tensor travels as it is, several in one buffer, of bytes if their dtypes differ.

    %t = subclass_all_gather([%a, %b], 2, w)     %f: u8[134] = cat([%a as bytes, %b as bytes])
    %x: f32[8, 8] = %t[0]                        %g: u8[268] = wait_tensor(all_gather_into_tensor(%f, 2, shard))
    %y: u8[12] = %t[1]                           %x, %y = columns of %g in their dtypes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch.fx import Node

from graphshard.errors import PassError
from graphshard.ir.graph import WAIT, aten, c10d, calls_of, emit, fake, is_communication, rewrite_gradients
from graphshard.ir.mesh import Axis
from graphshard.ir.operators import SUBCLASS_ALL_GATHER
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.program import Phase, Program, Slot
from graphshard.ir.transport import along_dim, carrier, gather, reduce, reduced_over
from graphshard.passes.base import Pass


@dataclass(frozen=True)
class InsertCollectives(Pass):
    """Requires: no collectives yet.  Preserves: the value of every output, gradients as the mean over ranks."""

    name: ClassVar[str] = "insert-collectives"
    establishes: ClassVar[frozenset[str]] = frozenset({"sharded_inputs", "reduced_once"})

    def requires(self, program: Program) -> None:
        for phase in program.phases.values():
            if any(is_communication(n) for n in phase.module.graph.nodes):
                raise PassError(f"{self.name}: the graph already has collectives; run this pass once, first")

    def rewrite_phase(self, phase: Phase, program: Program) -> int:
        def reduced(grad: Node, name: str) -> Node:
            spec = program.params[name]
            return reduce(phase.module.graph, grad, spec, reduced_over(spec, program))

        count = 0
        held = {spec.name for spec in program.params if spec.held}  # gathered by the user
        phase.inputs = tuple(
            Slot("gathered", slot.name) if slot.kind == "param" and slot.name in held else slot for slot in phase.inputs
        )
        for node, slot in phase.slot_of().items():
            if slot.kind == "param" and program.params[slot.name].num_shards > 1:
                spec = program.params[slot.name]
                gather(phase.module.graph, node, spec, spec.on(program.mesh).shard)
                count += 1
        joins = calls_of(phase, SUBCLASS_ALL_GATHER)
        for join in joins:
            _replace_join(join, program)
        count += len(joins) + rewrite_gradients(phase, reduced)
        return count


# Inserts a call.
_Write = Callable[..., Node]


def _replace_join(join: Node, program: Program) -> None:
    """Replace a join with an all-gather, or with its tensors in a world of one rank."""
    args: Any = join.args
    tensors, num_ranks, name = args
    graph, spec = join.graph, program.params[name]
    write = partial(emit, graph, like=join)
    with graph.inserting_before(join):
        wholes = [tensor if fake(tensor).dim() else write(aten.reshape.default, tensor, [1]) for tensor in tensors]
        if num_ranks > 1:
            wholes = _gathered(write, wholes, spec, spec.on(program.mesh).shard)
            if spec.dim > 0:
                wholes = [_along_dim(write, whole, spec) for whole in wholes]
    for user in list(join.users):
        index: Any = user.args[1]
        user.replace_all_uses_with(wholes[index])
        graph.erase_node(user)
    graph.erase_node(join)


def _gathered(write: _Write, tensors: list[Node], spec: ParamSpec, axis: Axis) -> list[Node]:
    """Gather tensors in one collective."""
    assert spec.extension is not None
    dtype = carrier(spec.extension.dtype)
    if len(tensors) == 1:
        (tensor,) = tensors
        if not fake(tensor).is_contiguous():
            tensor = write(aten.clone.default, tensor, memory_format=torch.contiguous_format)
        whole = _launch(write, _view_as(write, tensor, dtype), axis)
        return [_view_as(write, whole, fake(tensor).dtype)]
    flats = [_view_as(write, write(aten.reshape.default, tensor, [-1]), dtype) for tensor in tensors]
    buffer = _launch(write, write(aten.cat.default, flats), axis)
    ends = list(accumulate(fake(flat).numel() for flat in flats))
    rows = write(aten.view.default, buffer, [axis.size, ends[-1]])
    wholes = []
    for tensor, start, end in zip(tensors, [0, *ends], ends):
        column = write(aten.slice.Tensor, rows, 1, start, end)
        dense = write(aten.clone.default, column, memory_format=torch.contiguous_format)
        typed = _view_as(write, dense, fake(tensor).dtype)
        shape = list(fake(tensor).shape)
        wholes.append(write(aten.view.default, typed, [axis.size * shape[0], *shape[1:]]))
    return wholes


def _along_dim(write: _Write, whole: Node, spec: ParamSpec) -> Node:
    """Concatenate gathered shards along another dim than 0, as memory of the full parameter."""
    for target, args, kwargs in along_dim(spec.num_shards, spec.padded_shape, spec.dim, fake(whole).shape):
        whole = write(target, whole, *args, **kwargs)
    return whole


def _launch(write: _Write, tensor: Node, axis: Axis) -> Node:
    return write(WAIT, write(c10d.all_gather_into_tensor.default, tensor, axis.size, axis.name))


def _view_as(write: _Write, value: Node, dtype: torch.dtype) -> Node:
    """View the bits as another dtype; the last dim counts elements of that."""
    return value if fake(value).dtype == dtype else write(aten.view.dtype, value, dtype)
