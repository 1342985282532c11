"""Keep a piece of each gathered parameter, so that a smaller group of ranks gathers it again in backward.

    forward                                               backward
    %g = all_gather_into_tensor(%s, 8, shard)           - %g = all_gather_into_tensor(%s, 8, shard)
    %w: f32[8, 4] = wait_tensor(%g)                     * %g = all_gather_into_tensor(%piece, 2, shard/2)
  * %piece: f32[4, 4] = own_chunk(%w, 2, shard/2)         %w: f32[8, 4] = wait_tensor(%g)
  * return %piece as piece:w

The piece takes more memory between forward and backward than the shard, but the smaller group, for example the ranks of
one node, is faster. This is `reshard_after_forward=N`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphshard.errors import PassError
from graphshard.ir.graph import erase_dead, fake, trace
from graphshard.ir.operators import OWN_CHUNK
from graphshard.ir.program import Program, Slot
from graphshard.passes.base import Pass, gathers_of


@dataclass(frozen=True)
class RegatherInSubgroup(Pass):
    """Requires: a partitioned program whose mesh has an axis to regather over.  Preserves: every value."""

    name: ClassVar[str] = "regather-in-subgroup"
    runs: ClassVar = "partitioned"

    def requires(self, program: Program) -> None:
        if program.mesh.regather is None:
            raise PassError(
                f"{self.name}: the program has no smaller group of ranks; give reshard_after_forward an int"
            )
        super().requires(program)

    def rewrite(self, program: Program) -> int:
        group = program.mesh.regather
        assert group is not None
        if "backward" not in program.phases:
            return 0
        forward, backward = program.phases.get("forward"), program.phases["backward"]
        # The forward is not there where another backward is made.
        first = {spec.name: gather for gather, spec in gathers_of(forward, program)} if forward else {}
        count = 0
        for gather, spec in list(gathers_of(backward, program)):
            slot = Slot("piece", spec.name)
            if forward:
                (wait,) = first[spec.name].waits
                piece = trace(wait.next, OWN_CHUNK, wait, group.size, group.name, like=wait)
                forward.set_results([*forward.results, piece])
                forward.outputs = (*forward.outputs, slot)
            whole = fake(gather.node)
            shape = [whole.shape[0] // group.size, *whole.shape[1:]]
            given = backward.add_input(f"piece_of_{spec.name.replace('.', '_')}", slot, whole.new_empty(shape))
            gather.node.args = (given, group.size, group.name)
            count += 1
        erase_dead(backward.module.graph)
        backward.erase_inputs(lambda node, slot: slot.kind in ("param", "part") and not node.users)
        return count
