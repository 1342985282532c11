"""What each call of a region allocates while it runs, beyond what goes in and what it returns.

    %b, %c = region_7([%a, %w])      %a is read by nothing else from here on: it is let go of inside the region

A region is given a list of its inputs, which it empties. So what its call is the last to read, such as what forward has
saved, makes room for what follows inside. Calls of equal regions may differ in that.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from graphshard.cost.costs import Costs
from graphshard.cost.workspace import BLOCK, workspace
from graphshard.ir.program import LASTING, Phase, Program, Slot
from graphshard.schedule.shared import Saved, owners, saved_memory


def workspaces(program: Program, costs: Costs) -> dict[Node, int]:
    """Bytes by the call of a region, for the same inputs asked once; the allocator of a GPU rounds up."""
    block = BLOCK if costs.profile.device == "cuda" else 1
    known: dict[tuple[str, frozenset[int]], int] = {}
    found = {}
    saved = saved_memory(program)
    for phase in program.phases.values():
        for call, dying in _dying(program, phase, saved).items():
            key = program.region_names[str(call.target)]
            if (key, dying) not in known:
                nodes = list(program.regions[key].module.graph.nodes)
                inputs = [node for node in nodes if node.op == "placeholder"]
                freed = [inputs[index] for index in dying]
                known[key, dying] = workspace(nodes, fused=costs.fused, block=block, freed=freed)
            found[call] = known[key, dying]
    return found


def _dying(program: Program, phase: Phase, saved: Mapping[Slot, Saved]) -> dict[Node, frozenset[int]]:
    """By the call of a region, which of its inputs nothing reads from there on; others may have their memory."""
    nodes = list(phase.module.graph.nodes)
    owner = owners(program, phase, saved)
    last: dict[Node, Node] = {}
    for node in nodes:
        last.update((owner[source], node) for source in node.all_input_nodes)
    slots = phase.slot_of()
    stay = {
        node for node, slot in slots.items() if slot.kind in LASTING or (slot in saved and not saved[slot].num_bytes)
    }
    found = {}
    for call in nodes:
        if call.op == "call_module":
            given = call.args[0]
            assert isinstance(given, (list, tuple))
            read = [owner[value] if isinstance(value, Node) else None for value in given]
            found[call] = frozenset(
                index
                for index, held in enumerate(read)
                if held is not None and read.count(held) == 1 and last[held] is call and held not in stay
            )
    return found
