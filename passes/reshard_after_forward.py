"""Decide what backward finds of a gathered parameter: nothing (gather again), or the full tensor (keep).

A row with `reshard` has its cast, gather, wait and cut-off marked to be recomputed, so that the partitioner saves
only the shard and repeats the gather in backward; a row without it has the full parameter marked to be saved.
The marks are torch's own: `meta["recompute"]` with a `CheckpointPolicy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from graphshard._torch import CheckpointPolicy
from graphshard.errors import PassError
from graphshard.graph import WAIT, aten, is_communication
from graphshard.passes.base import Pass
from graphshard.program import Program

_EDGE_OPS = frozenset({aten._to_copy.default, aten.slice.Tensor})


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
            chain = _gathered(node)
            policy = CheckpointPolicy.MUST_RECOMPUTE
            if chain and not program.params[slot.name].reshard:
                chain = chain[-1:]
                policy = CheckpointPolicy.MUST_SAVE
            for member in chain:
                count += member.meta.get("recompute") != policy
                member.meta["recompute"] = policy
        return count


def _gathered(shard: Node) -> list[Node]:
    """The chain that graphshard put between a shard and the model's use of the full parameter."""
    chain: list[Node] = []
    node = shard
    while len(node.users) == 1:
        (user,) = node.users
        inside = is_communication(user) or (user.target in _EDGE_OPS and not _complete(chain))
        # The cut-off of padding rows directly follows the wait.
        if not inside and not (user.target is aten.slice.Tensor and chain and chain[-1].target is WAIT):
            break
        chain.append(user)
        node = user
    return chain


def _complete(chain: list[Node]) -> bool:
    return any(node.target is WAIT for node in chain)
