"""Keep parameters and gradients on the host: copy shards to the device before their gather, gradients back afterwards.

    %s: f32[4, 4] = param:w                  %s: f32[4, 4] = param:w              (host)
  * %g = all_gather_into_tensor(%s)          %u = upload(%s)                      one gather ahead
                                             %c = arrived(%u)
                                           * %g = all_gather_into_tensor(%c)
    return %ds as grad:w                     %h = download(%ds)
                                             return %h as grad:w                  (host)

With `cast_on_host` a shard that is cast right away is cast before the copy:

    %c: bf16[4, 4] = _to_copy(%s, dtype=bf16)  %u: bf16[4, 4] = upload(%s, cuda, bf16)

The copies overlap the compute; `reorder` starts those for a gather when the gather before it starts. A unit that is not
gathered, as on one rank, is copied while the unit before it computes: its copies start where the copies of that unit
have arrived. On a CPU mesh there is nothing to do.

    %u0 = upload(%w0)                          %u0 = upload(%w0)
    %c0 = arrived(%u0)                         %c0 = arrived(%u0)
    %y0 = mm(%x, %c0)                          %u1 = upload(%w1)
    %u1 = upload(%w1)                          %y0 = mm(%x, %c0)
    %c1 = arrived(%u1)                         %c1 = arrived(%u1)
    %y1 = mm(%y0, %c1)                         %y1 = mm(%y0, %c1)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from graphshard.ir.graph import aten, emit, fake, rewrite_gradients, trace
from graphshard.ir.operators import ARRIVED, DOWNLOAD, UPLOAD
from graphshard.ir.program import Program
from graphshard.passes.base import Pass


@dataclass(frozen=True)
class OffloadParameters(Pass):
    """Requires: a partitioned program.  Preserves: every value; parameters and gradients live on the host.

    Attributes:
        always: copy on a CPU mesh, too, where copies are of no use.
        cast_on_host: cast a shard before it is copied, if the cast makes it smaller. This occupies the thread that
            launches kernels; it pays where each rank has four threads or more and waits for copies.
    """

    name: ClassVar[str] = "offload-parameters"
    runs: ClassVar = "partitioned"
    always: bool = False
    cast_on_host: bool = False

    def rewrite(self, program: Program) -> int:
        if program.device.type == "cpu" and not self.always:
            return 0
        program.offloaded = True

        def download(grad: Node, name: str) -> Node:
            done = grad.target is DOWNLOAD or program.params[name].ignored
            return grad if done else emit(grad.graph, DOWNLOAD, grad, like=grad)

        count = 0
        for phase in program.phases.values():
            units: dict[Node, str] = {}  # by the arrival of a parameter that is not gathered
            for node, slot in phase.slot_of().items():
                if slot.kind not in ("param", "part") or program.params[slot.name].ignored:
                    continue
                changed, arrived = _upload(node, program.device.type, cast_on_host=self.cast_on_host)
                count += changed
                if arrived is not None and program.params[slot.name].num_shards == 1:
                    units[arrived] = program.params[slot.name].unit
            _start_one_unit_ahead(units)
            count += rewrite_gradients(phase, download)
        return count


def _upload(shard: Node, device: str, *, cast_on_host: bool) -> tuple[int, Node | None]:
    """Copy a shard to the device; return the number of changes, and the arrival of the copy."""
    users = [user for user in shard.users if user.op == "call_function"]
    if any(user.target is UPLOAD for user in users):
        return 0, None
    shard.meta["val"] = fake(shard).to("cpu")
    if not users:
        return 0, None
    first = min(users)
    # The only user is a cast to a smaller dtype, and nothing else.
    is_cast = first.target is aten._to_copy.default and set(first.kwargs) == {"dtype"} and len(users) == 1
    narrows = cast_on_host and is_cast and fake(first).dtype.itemsize < fake(shard).dtype.itemsize
    dtype = (fake(first).dtype,) if narrows else ()
    arrived = trace(first, ARRIVED, trace(first, UPLOAD, shard, device, *dtype))
    if narrows:
        first.replace_all_uses_with(arrived)
        shard.graph.erase_node(first)
        users = []
    for user in users:
        user.replace_input_with(shard, arrived)
    return 1, arrived


def _start_one_unit_ahead(units: dict[Node, str]) -> None:
    """Start the copies of each unit where the copies of the unit before it have arrived; all of a unit arrive together.

    An arrival waits for every copy that was started before it, so copies for later units must start after it. The
    root's compute before its blocks, and after them, counts as two units.
    """
    before: Node | None = None  # the last arrival of the unit before
    for _, group in itertools.groupby(sorted(units), units.__getitem__):
        first, *others = arrivals = list(group)
        anchor = first
        for arrived in others:
            anchor.append(arrived)
            anchor = arrived
        for arrived in arrivals:
            (copy,) = arrived.all_input_nodes
            if before is None:
                first.prepend(copy)
            else:
                before.append(copy)
                before = copy
        before = anchor
