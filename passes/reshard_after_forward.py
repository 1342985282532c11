"""Decide what backward finds of a gathered parameter: nothing (gather again), or the full tensor (keep).

For a parameter with `reshard`, its cast, gather, wait and epilogue are marked to be recomputed, so that the partitioner
saves only the shard and repeats the gather in backward. For any other the full parameter is marked to be saved. Views
of a parameter are recomputed: forward leaves the parameter itself or nothing, and `reshard()` may free that. For a
parameter with `fsdp_pre_all_gather`, its computation before and after the gather is repeated, too. A parameter that is
not gathered, as on one rank, is still there in backward; if it is offloaded, it is copied to the device again, so its
cast is repeated. The marks are torch's: `meta["recompute"]` with a `CheckpointPolicy`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from graphshard.ir.graph import WAIT, aten, is_backward, is_view
from graphshard.ir.operators import ALL_REDUCE
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.program import Phase, Program
from graphshard.ir.transport import gather_epilogue
from graphshard.passes.base import Pass, ancestors, gathers_of
from graphshard.torch_compat.aot_autograd import CheckpointPolicy


@dataclass(frozen=True)
class ReshardAfterForward(Pass):
    """Requires: a joint graph with collectives inserted.
    Preserves: the graph; only marks for the partitioner change.

    Attributes:
        offloaded: parameters live on the host; without effect on a CPU mesh.
    """

    name: ClassVar[str] = "reshard-after-forward"
    runs: ClassVar = "joint"
    offloaded: bool = False

    def rewrite(self, program: Program) -> int:
        joint = program.phases.get("joint")
        if joint is None:
            return 0
        count = 0
        away = self.offloaded and program.device.type != "cpu"
        for node, slot in joint.slot_of().items():
            if slot.kind not in ("param", "gathered"):
                continue
            spec = program.params[slot.name]
            chain = until_landed(node, spec) if slot.kind == "param" else []
            again = away and spec.num_shards == 1 and spec.reshard and not spec.ignored
            if again:
                chain = [user for user in node.users if user.target is aten._to_copy.default and not is_backward(user)]
            if chain and not spec.reshard:
                count += _mark(chain[-1:], CheckpointPolicy.MUST_SAVE)
            else:
                count += _mark(chain, CheckpointPolicy.MUST_RECOMPUTE)
            full = [node, *chain] if again else [node] if slot.kind == "gathered" else chain[-1:]
            count += _mark(_views(full), CheckpointPolicy.MUST_RECOMPUTE)
        for spec, before, wait, after in _around_subclass_gathers(joint, program):
            if spec.reshard:
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
    """Return the views of values, and views of these."""
    found = [user for value in values for user in value.users if is_view(user) and not is_backward(user)]
    return [*found, *_views(found)] if found else []


def until_landed(shard: Node, spec: ParamSpec) -> list[Node]:
    """Return the nodes that graphshard inserted between a shard and the model's uses of the full parameter."""
    if spec.num_shards == 1 or not shard.users:
        return []
    chain = [shard]
    while chain[-1].target is not WAIT:
        if len(chain[-1].users) != 1:  # it is not gathered
            return []
        chain += chain[-1].users
    for _ in gather_epilogue(spec):
        chain += chain[-1].users
    return chain[1:]


def _around_subclass_gathers(
    phase: Phase, program: Program
) -> Iterator[tuple[ParamSpec, list[Node], Node, list[Node]]]:
    """Yield each parameter with `fsdp_pre_all_gather`, the nodes before its gather, its wait, and the nodes after it.

    The nodes after the wait read gathered and stored parameters alone, in forward. The nodes before the gather do not
    include what is reduced over ranks on the way, nor the sources of that.
    """
    parts = {node for node, slot in phase.slot_of().items() if slot.kind == "part"}
    for gather, spec in gathers_of(phase, program):
        sources = ancestors(gather.node)
        if parts.isdisjoint(sources):
            continue
        (wait,) = gather.waits
        reduced = [node for node in sources if node.target is ALL_REDUCE]
        before = ancestors(
            gather.node, within=lambda node: node.op == "call_function" and node.target is not ALL_REDUCE
        )
        yield spec, list(before), wait, _following(wait, {*parts, *before, *reduced, wait})


def _following(wait: Node, known: set[Node]) -> list[Node]:
    """Return the forward nodes that read a gathered parameter and known nodes alone."""
    found: dict[Node, None] = {}
    stack = [wait]
    while stack:
        for user in stack.pop().users:
            ours = user.op == "call_function" and not is_backward(user)
            if ours and user not in found and all(node in known or node in found for node in user.all_input_nodes):
                found[user] = None
                stack.append(user)
    return list(found)
