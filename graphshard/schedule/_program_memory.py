"""Memory of a program's values: which share it, and bytes that are alive whatever the schedule.

    forward      %out = attention(...)   %a = transpose(%out)   %b = detach(%out)   return %a, %b
    backward     %a, %b                                         one memory, until the last of both is read

Two slots say nothing of that, and backward's placeholders are two nodes. A view holds all of its base. A region may
return one of its inputs, too, in another shape.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch.fx import Node

from graphshard.cost.costs import Costs
from graphshard.cost.kernels import num_bytes
from graphshard.cost.scalars import Scalar
from graphshard.cost.workspace import BLOCK, workspace
from graphshard.ir.collective_regions import Collective, CollectiveRegions
from graphshard.ir.graph import WAIT, base_of, is_alias, is_on_host, is_part
from graphshard.ir.operators import ARRIVED, DOWNLOAD, MODEL_WAIT, OWN_CHUNK
from graphshard.ir.program import LASTING, Phase, Program, Region, Slot


@dataclass(frozen=True)
class Saved:
    """Memory of values that forward saves."""

    slot: Slot  # the first of their slots
    num_bytes: Scalar  # of the whole memory, 0 if an input of forward has it, which is there anyway


def saved_memory(program: Program) -> dict[Slot, Saved]:
    """Return by slot the memory of saved values that are no full parameters; {} without both phases."""
    if not {"forward", "backward"} <= program.phases.keys():
        return {}
    forward = program.phases["forward"]
    owner, slots = owners(program, forward), forward.slot_of()
    first: dict[Node, Saved] = {}
    found = {}
    for node, slot in zip(forward.results, forward.outputs):
        if isinstance(node, Node) and slot.kind == "saved" and not slot.is_full:
            held = owner[node]
            lasts = held in slots and slots[held].kind in LASTING
            found[slot] = first.setdefault(held, Saved(slot, 0 if lasts else num_bytes(held)))
    return found


def _first_of(slots: Mapping[Node, Slot], saved: Mapping[Slot, Saved]) -> dict[Node, Node]:
    """Return by placeholder of a saved value the first one that has the same memory."""
    first: dict[Slot, Node] = {}
    return {node: first.setdefault(saved[slot].slot, node) for node, slot in slots.items() if slot in saved}


def owners(program: Program, phase: Phase, saved: Mapping[Slot, Saved] | None = None) -> dict[Node, Node]:
    """Return by node the one whose memory its value has: a view's, a wait's, a region's input or result.

    Several values in `saved` may have one memory.
    """
    first = _first_of(phase.slot_of(), saved or {})
    aliases: dict[str, list[Node | int]] = {}
    returned: dict[tuple[Node, Node], Node] = {}
    found: dict[Node, Node] = {}
    for node in phase.module.graph.nodes:
        found[node] = first.get(node, node)
        if node.op != "call_function" or not node.all_input_nodes:
            continue
        source = node.all_input_nodes[0]
        if node.target in (WAIT, ARRIVED, MODEL_WAIT) or is_alias(node):
            found[node] = found[source]
        elif node.target is operator.getitem and source.op == "call_module":
            key = program.region_names[str(source.target)]
            if key not in aliases:
                aliases[key] = _aliases(program.regions[key])
            of = aliases[key][node.args[1]]
            found[node] = found[source.args[0][of]] if isinstance(of, int) else returned.setdefault((source, of), node)
    return found


def _aliases(region: Region) -> list[Node | int]:
    """Return by result of a region the number of the input whose memory it has, or the node inside that made it."""
    nodes = region.module.graph.nodes
    inputs = {node: index for index, node in enumerate(n for n in nodes if n.op == "placeholder")}
    (output,) = (node for node in nodes if node.op == "output")
    owner = (base_of(node, is_alias) for node in output.args[0])
    return [inputs.get(node, node) for node in owner]


def base_bytes(
    phase: Phase,
    layout: CollectiveRegions,
    cuts: Sequence[int],
    reductions: Sequence[Collective],
    ready: Mapping[Node, int],
    sent: Mapping[Node, int],
    until: Mapping[Node, int] | None = None,
    saved: Mapping[Slot, Saved] | None = None,
) -> list[int]:
    """Return the most bytes alive during each item, without gathered parameters and gradients of the schedule.

    Shards, inputs and results live to the end; other values from their operator to their last use. A gradient counts up
    to the item before the last that its reduction waits for: from there on it is the schedule's. The schedule has it
    for the whole of the item that makes it. Values that are alive there only before it is made count less by its bytes:
    the gradient of the last layer comes when the gradients of the logits, in float32 the largest of a step, are gone.

    Args:
        cuts: positions at which items begin, and the end of the phase.
        ready: per launch of a reduction, the index of the item after which its bucket can start.
        sent: per launch of a reduction, the bytes of its gradient for the schedule.
        until: by node the last position at which it holds its input, where that is after its own.
        saved: by slot the memory of saved values.
    """
    until, saved = until or {}, saved or {}
    end = len(layout.compute)
    index = {**layout.index, phase.module.graph.output_node(): end}
    change = [0] * (end + 2)

    def alive(start: int, last: int, size: int) -> None:
        if last >= start:
            change[start] += size
            change[last + 1] -= size

    for wait, following in layout.after.items():
        for piece in (node for node in following if node.target is OWN_CHUNK):  # backward gathers it again
            users = (user for node in (wait, *following) for user in node.users)
            first = min((layout.index[user] for user in users if user in layout.index), default=end)
            alive(first, end, num_bytes(piece))
    ours = {node for nodes in (*layout.before.values(), *layout.after.values()) for node in nodes}
    slots = phase.slot_of()
    same = _first_of(slots, saved)
    spans: dict[Node, list[int]] = {}
    for node in layout.compute:
        if node.target is not DOWNLOAD:
            spans.setdefault(_owner(node, same), [index[node], index[node]])
    for node, slot in slots.items():
        if slot.kind != "saved" or not is_on_host(node):
            spans[same.get(node, node)] = [0, end if slot.kind in LASTING else 0]
    for node in phase.module.graph.nodes:
        for source in () if node in ours or node not in index else node.all_input_nodes:
            # A collective of the model holds its input until it is settled.
            for held in (source, *source.all_input_nodes) if node.target is MODEL_WAIT else (source,):
                owner = _owner(held, same)
                if owner in spans:
                    spans[owner][1] = max(spans[owner][1], index[node], until.get(node, 0))
    made, held_bytes = [0] * (end + 2), [0] * len(cuts)
    for reduction in reductions:
        item = ready[reduction.node] - 1
        first = begin = cuts[item]
        for node in (*layout.before[reduction.node], reduction.node):
            for owner in (_owner(source, same) for source in node.all_input_nodes):
                if owner in spans:
                    spans[owner][1] = max(spans[owner][1], begin - 1)
                    first = max(first, spans[owner][0])
        alive(cuts[item + 1], end, sum(num_bytes(wait) for wait in reduction.waits))
        held_bytes[item] += sent[reduction.node]
        made[first] += sent[reduction.node]
        made[cuts[item + 1]] -= sent[reduction.node]
    for owner, (start, last) in spans.items():
        alive(start, last, saved[slots[owner]].num_bytes if owner in same else num_bytes(owner))
    total = list(accumulate(change))
    peaks = [a + b for a, b in zip(total, accumulate(made))]
    # Between two items the smaller one counts, so that it must not be less than what is alive at its begin.
    return [max(*peaks[a:b], total[a] + n) - n for (a, b), n in zip(pairwise(cuts), held_bytes)]


def lasting_beside(program: Program, phase: Phase) -> int:
    """Return the bytes of shards, buffers and inputs that this phase does not read, and another one does."""
    phases = program.phases.values()
    sizes = {slot: num_bytes(node) for each in phases for node, slot in each.slot_of().items() if slot.kind in LASTING}
    return sum(sizes[slot] for slot in sizes.keys() - phase.slot_of().values())


def item_at(cuts: Sequence[int], position: int) -> int:
    """Return the item that runs a compute node."""
    return min(bisect_right(cuts, position) - 1, len(cuts) - 2)


def _owner(node: Node, same: Mapping[Node, Node]) -> Node:
    """Return the value whose memory a value has."""
    owner = base_of(node, lambda each: is_alias(each) or is_part(each) or each.target in (MODEL_WAIT, ARRIVED))
    return same.get(owner, owner)


def workspaces(program: Program, costs: Costs) -> dict[Node, int]:
    """Return by the call of a region the bytes that it allocates beyond its inputs and results.

        %b, %c = region_7([%a, %w])      %a is read by nothing else from here on: it is freed inside the region

    A region is given a list of its inputs, which it empties. So an input that its call is the last to read, such as a
    saved value, makes room for later values inside. Calls of equal regions may differ in that. The allocator of a GPU
    rounds up.
    """
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
    """Return by the call of a region the inputs whose memory nothing reads from there on."""
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
