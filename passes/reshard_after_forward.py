"""Decide what backward finds of a gathered parameter: nothing (gather again), or the full tensor (keep).

A row with `reshard` has its cast, gather, wait and cut-off marked to be recomputed, so that the partitioner saves
only the shard and repeats the gather in backward; a row without it has the full parameter marked to be saved.
The marks are torch's own: `meta["recompute"]` with a `CheckpointPolicy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from graphshard.ir.errors import PassError
from graphshard.ir.graph import WAIT
from graphshard.ir.params import ParamRow
from graphshard.ir.program import Program
from graphshard.ir.torch_internals import CheckpointPolicy
from graphshard.ir.transport import landing
from graphshard.passes.base import Pass


@dataclass(frozen=True)
class ReshardAfterForward(Pass):
    """Requires: a joint graph with collectives inserted.
    Preserves: the graph; only marks for the partitioner change."""

    name: ClassVar[str] = "reshard-after-forward"

    def requires(self, program: Program) -> None:
        if "backward" in program.phases:
            raise PassError(f"{self.name}: the program is already partitioned; run this pass before partition")

    def rewrite(self, program: Program) -> int:
        count = 0
        joint = program.phases.get("joint")
        for node, slot in joint.slot_of().items() if joint else ():
            if slot.kind != "param":
                continue
            chain = _gathered(node, program.params[slot.name])
            policy = CheckpointPolicy.MUST_RECOMPUTE
            if chain and not program.params[slot.name].reshard:
                chain = chain[-1:]
                policy = CheckpointPolicy.MUST_SAVE
            for member in chain:
                count += member.meta.get("recompute") != policy
                member.meta["recompute"] = policy
        return count


def _gathered(shard: Node, row: ParamRow) -> list[Node]:
    """The chain that graphshard put between a shard and the model's use of the full parameter."""
    if row.num_shards == 1 or not shard.users:
        return []
    chain = [shard]
    while chain[-1].target is not WAIT:
        if len(chain[-1].users) != 1:  # nobody gathers it
            return []
        chain += chain[-1].users
    for _ in landing(row):
        chain += chain[-1].users
    return chain[1:]
