"""Keep parameters and gradients on the host: copy shards to the device before their gather, gradients back after.

    %s: f32[4, 4] = param:w                  %s: f32[4, 4] = param:w              (host)
  * %g = all_gather_into_tensor(%s)          %u = upload(%s)                      one gather ahead
                                             %c = arrived(%u)
                                           * %g = all_gather_into_tensor(%c)
    return %ds as grad:w                     %h = download(%ds)
                                             return %h as grad:w                  (host)

The copies run beside the compute; `reorder` starts those for a gather when the gather before it starts. On a CPU mesh
there is nothing to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph, Node

from graphshard.ir.errors import PassError
from graphshard.ir.graph import emit, fake, rewrite_gradients
from graphshard.ir.operators import ARRIVED, DOWNLOAD, UPLOAD
from graphshard.ir.program import Phase, Program
from graphshard.passes.base import Pass


@dataclass(frozen=True)
class Offload(Pass):
    """Requires: a partitioned program.  Preserves: every value; those of parameters and gradients live on the host.

    Attributes:
        always: on a CPU mesh, too, where the copies are of no use.
    """

    name: ClassVar[str] = "offload"
    always: bool = False

    def requires(self, program: Program) -> None:
        if "joint" in program.phases:
            raise PassError(f"{self.name}: the program is not partitioned yet; run this pass after partition")

    def rewrite(self, program: Program) -> int:
        if program.device.type == "cpu" and not self.always:
            return 0
        program.offloaded = True
        count = 0
        for phase in program.phases.values():
            for node, slot in phase.slot_of().items():
                if slot.kind in ("param", "part") and not program.params[slot.name].ignored:
                    count += _upload(phase, node, program.device.type)

            def download(grad: Node, name: str, graph: Graph = phase.module.graph) -> Node:
                done = grad.target is DOWNLOAD or program.params[name].ignored
                return grad if done else emit(graph, DOWNLOAD, grad, like=grad)

            count += rewrite_gradients(phase, download)
        return count


def _upload(phase: Phase, shard: Node, device: str) -> int:
    users = [user for user in shard.users if user.op == "call_function"]
    if any(user.target is UPLOAD for user in users):
        return 0
    shard.meta["val"] = fake(shard).to("cpu")
    if not users:
        return 0
    first = min(users)
    with phase.module.graph.inserting_before(first):
        copy = emit(phase.module.graph, UPLOAD, shard, device, like=first)
        arrived = emit(phase.module.graph, ARRIVED, copy, like=first)
    for user in users:
        user.replace_input_with(shard, arrived)
    return 1
