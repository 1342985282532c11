"""Turn parameters into shards: gather each before its first use, reduce-scatter each gradient.

    %w: f32[8, 4] = param:w                  %s: f32[4, 4] = param:w
    %y = mm(%x, %w)                        * %g = all_gather_into_tensor(%s, 2, shard)
    return %dw as grad:w                     %w: f32[8, 4] = wait_tensor(%g)
                                             %y = mm(%x, %w)
                                           * %r = reduce_scatter_tensor(%dw, avg, 2, shard)
                                             %ds: f32[4, 4] = wait_tensor(%r)
                                             return %ds as grad:w

The reduction is in the parameter's reduce dtype. Shards are padded to equal size, so the graph is the same on every
rank: rows beyond the parameter's are cut off after the gather and filled with zeros before the reduction. Where
parameters are replicated over a second mesh axis, an all-reduce of the shard over that axis follows. A collective
joins shards along the outermost dim in memory; where a parameter is sharded along another, its landing brings them side
by side. A parameter that is not sharded, and a world of one rank, gets no collectives at all. Where a parameter decides
itself what is gathered of it, capture has left a `join`, which becomes a gather: see `ir/joins.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from graphshard.errors import PassError
from graphshard.ir.graph import is_communication, rewrite_gradients
from graphshard.ir.joins import insert_gathers
from graphshard.ir.program import Phase, Program, Slot
from graphshard.ir.transport import gather, reduce, reduced_over
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

    def rewrite(self, program: Program) -> int:
        count = 0
        for phase in program.phases.values():
            phase.inputs = tuple(_as_held(slot, program) for slot in phase.inputs)
            for node, slot in phase.slot_of().items():
                if slot.kind == "param" and program.params[slot.name].num_shards > 1:
                    row = program.params[slot.name]
                    gather(phase.module.graph, node, row, row.on(program.mesh).shard)
                    count += 1
            count += insert_gathers(phase, program.params, program.mesh)
            count += _reduce_gradients(phase, program)
        return count


def _as_held(slot: Slot, program: Program) -> Slot:
    """A parameter that was gathered by hand comes in as it is."""
    return Slot("gathered", slot.name) if slot.kind == "param" and program.params[slot.name].held else slot


def _reduce_gradients(phase: Phase, program: Program) -> int:
    def reduced(grad: Node, name: str) -> Node:
        row = program.params[name]
        return reduce(phase.module.graph, grad, row, reduced_over(row, program))

    return rewrite_gradients(phase, reduced)
