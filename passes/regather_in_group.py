"""Keep a piece of what forward gathered, from which a smaller group of ranks gathers it again in backward.

    forward                                               backward
    %g = all_gather_into_tensor(%s, 8, shard)           - %g = all_gather_into_tensor(%s, 8, shard)
    %w: f32[8, 4] = wait_tensor(%g)                     * %g = all_gather_into_tensor(%piece, 2, shard/2)
  * %piece: f32[4, 4] = own_chunk(%w, 2, shard/2)         %w: f32[8, 4] = wait_tensor(%g)
  * return %piece as piece:w

The piece takes more memory between forward and backward than the shard, and the smaller group, of ranks on one node,
say, is faster. It is what an int for `reshard_after_forward` asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphshard.errors import PassError
from graphshard.ir.graph import emit, erase_dead, fake
from graphshard.ir.layout import Collective, collectives
from graphshard.ir.operators import OWN_CHUNK
from graphshard.ir.program import Phase, Program, Slot
from graphshard.passes.base import Pass, check_partitioned


@dataclass(frozen=True)
class RegatherInGroup(Pass):
    """Requires: a partitioned program whose mesh has an axis to regather over.  Preserves: every value."""

    name: ClassVar[str] = "regather-in-group"

    def requires(self, program: Program) -> None:
        if program.mesh.regather is None:
            raise PassError(
                f"{self.name}: the program has no smaller group of ranks; give reshard_after_forward an int"
            )
        check_partitioned(self, program)

    def rewrite(self, program: Program) -> int:
        group = program.mesh.regather
        assert group is not None
        if "backward" not in program.phases:
            return 0
        backward = program.phases["backward"]
        again = {c.params[0]: c for c in collectives(backward) if c.kind == "gather"}
        first: dict[str, Collective] = {}
        if forward := program.phases.get("forward"):  # not there where only another backward is made
            first = {c.params[0]: c for c in collectives(forward) if c.kind == "gather"}
        for name, gather in again.items():
            slot = Slot("piece", name)
            if forward:
                (wait,) = first[name].waits
                with forward.module.graph.inserting_after(wait):
                    piece = emit(forward.module.graph, OWN_CHUNK, wait, group.size, group.name, like=wait)
                forward.set_results([*forward.results, piece])
                forward.outputs = (*forward.outputs, slot)
            whole = fake(gather.node)
            shape = [whole.shape[0] // group.size, *whole.shape[1:]]
            given = backward.add_input(f"piece_of_{name.replace('.', '_')}", slot, whole.new_empty(shape))
            gather.node.args = (given, group.size, group.name)
        erase_dead(backward.module.graph)
        _drop_idle_shards(backward)
        return len(again)


def _drop_idle_shards(backward: Phase) -> None:
    """Take away the shards that backward does not read any more."""
    slots = backward.slot_of()
    idle = [node for node, slot in slots.items() if slot.kind in ("param", "part") and not node.users]
    backward.inputs = tuple(slot for node, slot in slots.items() if node not in idle)
    for node in idle:
        backward.module.graph.erase_node(node)
