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

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from graphshard.errors import PassError
from graphshard.ir.graph import WAIT, aten, c10d, calls_of, is_communication, rewrite_gradients, trace
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


def _replace_join(join: Node, program: Program) -> None:
    """Replace a join with an all-gather, or with its tensors in a world of one rank."""
    args: Any = join.args
    tensors, num_ranks, name = args
    spec = program.params[name]
    axis = spec.on(program.mesh).shard if num_ranks > 1 else None
    wholes = trace(join, partial(_gathered, spec, axis), list(tensors))
    for user in list(join.users):
        index: Any = user.args[1]
        user.replace_all_uses_with(wholes[index])
        join.graph.erase_node(user)
    join.graph.erase_node(join)


def _gathered(spec: ParamSpec, axis: Axis | None, tensors: list[Tensor]) -> list[Tensor]:
    """Gather tensors in one collective; without an axis return them."""
    assert spec.extension is not None
    dtype = carrier(spec.extension.dtype)
    tensors = [tensor if tensor.dim() else tensor.reshape([1]) for tensor in tensors]
    if axis is None:
        return tensors

    def gather(tensor: Tensor) -> Tensor:
        return WAIT(c10d.all_gather_into_tensor.default(tensor, axis.size, axis.name))

    if len(tensors) == 1:
        wholes = [_bits(gather(_bits(aten.contiguous.default(tensors[0]), dtype)), tensors[0].dtype)]
    else:
        flats = [_bits(tensor.reshape([-1]), dtype) for tensor in tensors]
        ends = list(accumulate(map(len, flats)))
        rows = gather(torch.cat(flats)).view([axis.size, ends[-1]])
        cuts = [aten.slice.Tensor(rows, 1, start, end) for start, end in zip([0, *ends], ends)]
        columns = map(aten.contiguous.default, cuts)
        typed = [_bits(column, tensor.dtype) for column, tensor in zip(columns, tensors)]
        wholes = [each.view([axis.size * len(own), *own.shape[1:]]) for each, own in zip(typed, tensors)]
    return [_along_dim(whole, spec) for whole in wholes] if spec.dim > 0 else wholes


def _along_dim(whole: Tensor, spec: ParamSpec) -> Tensor:
    """Concatenate gathered shards along another dim than 0, as memory of the full parameter."""
    for target, args, kwargs in along_dim(spec.num_shards, spec.padded_shape, spec.dim, whole.shape):
        whole = target(whole, *args, **kwargs)
    return whole


def _bits(value: Tensor, dtype: torch.dtype) -> Tensor:
    """View the bits as another dtype; the last dim counts elements of that."""
    return value if value.dtype == dtype else value.view(dtype)
