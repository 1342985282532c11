"""Decide what backward finds of a gathered parameter: nothing (gather again), or the full tensor (keep).

A row with `reshard` has its cast, gather, wait and cut-off marked to be recomputed, so that the partitioner saves
only the shard and repeats the gather in backward. A row without it has the full parameter marked to be saved. Views of
a parameter are made again: what forward leaves of it is the parameter itself or nothing, and `reshard()` may free that.
Of a parameter that decides itself what is gathered (`ir/joins.py`), what it does before and after its gather is
repeated, too. One that is not gathered, as on one rank, is there in backward; if it is offloaded, it is copied to the
device again, so its cast is repeated. The marks are torch's own: `meta["recompute"]` with a `CheckpointPolicy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from graphshard.errors import PassError
from graphshard.ir.graph import WAIT, aten, is_backward, is_view
from graphshard.ir.joins import around_gathers
from graphshard.ir.params import ParamRow
from graphshard.ir.program import Program
from graphshard.ir.transport import landing
from graphshard.passes.base import Pass
from graphshard.torch_compat.aot_autograd import CheckpointPolicy


@dataclass(frozen=True)
class ReshardAfterForward(Pass):
    """Requires: a joint graph with collectives inserted.
    Preserves: the graph; only marks for the partitioner change.

    Attributes:
        offloaded: parameters live on the host, but on CPU meshes, where that is the device.
    """

    name: ClassVar[str] = "reshard-after-forward"
    offloaded: bool = False

    def requires(self, program: Program) -> None:
        if "backward" in program.phases:
            raise PassError(f"{self.name}: the program is already partitioned; run this pass before partition")

    def rewrite(self, program: Program) -> int:
        count = 0
        joint = program.phases.get("joint")
        away = self.offloaded and program.device.type != "cpu"
        for node, slot in joint.slot_of().items() if joint else ():
            if slot.kind not in ("param", "gathered"):
                continue
            row = program.params[slot.name]
            chain = until_landed(node, row) if slot.kind == "param" else []
            again = away and row.num_shards == 1 and row.reshard and not row.ignored
            if again:
                chain = [user for user in node.users if user.target is aten._to_copy.default and not is_backward(user)]
            if chain and not row.reshard:
                count += _mark(chain[-1:], CheckpointPolicy.MUST_SAVE)
            else:
                count += _mark(chain, CheckpointPolicy.MUST_RECOMPUTE)
            full = [node, *chain] if again else [node] if slot.kind == "gathered" else chain[-1:]
            count += _mark(_views(full), CheckpointPolicy.MUST_RECOMPUTE)
        for name, (before, wait, after) in around_gathers(joint).items() if joint else ():
            if program.params[name].reshard:
                count += _mark([*before, wait, *after], CheckpointPolicy.MUST_RECOMPUTE)
            else:
                count += _mark([wait], CheckpointPolicy.MUST_SAVE)
        return count


def _mark(nodes: Sequence[Node], policy: CheckpointPolicy) -> int:
    count = sum(node.meta.get("recompute") != policy for node in nodes)
    for node in nodes:
        node.meta["recompute"] = policy
    return count


def _views(values: Sequence[Node]) -> list[Node]:
    """Views of values, and views of these."""
    found = [user for value in values for user in value.users if is_view(user) and not is_backward(user)]
    return [*found, *_views(found)] if found else []


def until_landed(shard: Node, row: ParamRow) -> list[Node]:
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
