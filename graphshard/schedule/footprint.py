"""Bytes that are alive during a phase whatever the schedule: all but gathered parameters and unreduced gradients."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType

from torch.fx import Node

from graphshard.cost.kernels import num_bytes
from graphshard.ir.collective_regions import Collective, CollectiveRegions
from graphshard.ir.graph import base_of, is_alias, is_on_host, is_part
from graphshard.ir.operators import ARRIVED, DOWNLOAD, OWN_CHUNK, SETTLED
from graphshard.ir.program import LASTING, Phase, Program, Slot
from graphshard.schedule.shared import Saved, first_of


def base_bytes(
    phase: Phase,
    layout: CollectiveRegions,
    cuts: Sequence[int],
    reductions: Sequence[Collective],
    ready: Mapping[Node, int],
    sent: Mapping[Node, int],
    until: Mapping[Node, int] = MappingProxyType({}),
    saved: Mapping[Slot, Saved] = MappingProxyType({}),
) -> list[int]:
    """Most bytes alive during each item, less those of the gradients that the schedule holds from its begin.

    Shards, inputs and results live to the end; other values from their operator to their last use. A gradient counts up
    to the item before the last that its reduction waits for: from there on it is the schedule's. The schedule has it
    for the whole of the item that makes it. What is alive there only before it is made is less beside it by so much:
    the gradient of the last layer comes when those of the logits, in float32 the largest of a step, are gone.

    Args:
        cuts: positions at which items begin, and the end of the phase.
        ready: per launch of a reduction, the index of the item after which its bucket can start.
        sent: per launch of a reduction, the bytes of its gradient for the schedule.
        until: by node the last position at which it has what it is given, where that is behind its own.
        saved: by slot the memory of what forward has saved, which several of them may have.
    """
    end = len(layout.compute)
    index = {**layout.index, phase.module.graph.output_node(): end}
    change = [0] * (end + 2)

    def alive(start: int, last: int, size: int) -> None:
        if last >= start:
            change[start] += size
            change[last + 1] -= size

    for wait, following in layout.after.items():
        for piece in (node for node in following if node.target is OWN_CHUNK):  # what backward gathers again
            users = (user for node in (wait, *following) for user in node.users)
            first = min((index[user] for user in users if user in layout.index), default=end)
            alive(first, end, num_bytes(piece))
    ours = {node for nodes in (*layout.before.values(), *layout.after.values()) for node in nodes}
    slots = phase.slot_of()
    same = first_of(slots, saved)
    spans: dict[Node, list[int]] = {}
    for node in layout.compute:
        if node.target is not DOWNLOAD:
            spans.setdefault(_owner(node, same), [index[node], index[node]])
    for node, slot in slots.items():
        if slot.kind != "saved" or not is_on_host(node):
            spans[same.get(node, node)] = [0, end if slot.kind in LASTING else 0]
    for node in phase.module.graph.nodes:
        for source in () if node in ours or node not in index else node.all_input_nodes:
            # What a collective of the model is given is held until it is settled.
            for held in (source, *source.all_input_nodes) if node.target is SETTLED else (source,):
                owner = _owner(held, same)
                if owner in spans:
                    spans[owner][1] = max(spans[owner][1], index[node], until.get(node, 0))
    made, held = [0] * (end + 2), [0] * len(cuts)
    for reduction in reductions:
        item = ready[reduction.node] - 1
        first = begin = cuts[item]
        for node in (*layout.before[reduction.node], reduction.node):
            for owner in (_owner(source, same) for source in node.all_input_nodes):
                if owner in spans:
                    spans[owner][1] = max(spans[owner][1], begin - 1)
                    first = max(first, spans[owner][0])
        shards = sum(num_bytes(wait) for wait in reduction.waits)
        alive(cuts[item + 1], end, shards)
        held[item] += sent[reduction.node]
        made[first] += sent[reduction.node]
        made[cuts[item + 1]] -= sent[reduction.node]
    for owner, (start, last) in spans.items():
        alive(start, last, saved[slots[owner]].num_bytes if owner in same else num_bytes(owner))
    total = list(accumulate(change))
    peaks = [a + b for a, b in zip(total, accumulate(made))]
    # Between two items the smaller one counts, so that it must not be less than what is alive at its begin.
    return [max(*peaks[a:b], total[a] + n) - n for (a, b), n in zip(pairwise(cuts), held)]


def lasting_beside(program: Program, phase: Phase) -> int:
    """Bytes of shards, buffers and inputs that this phase does not read, and another one does."""
    phases = program.phases.values()
    sizes = {slot: num_bytes(node) for each in phases for node, slot in each.slot_of().items() if slot.kind in LASTING}
    return sum(sizes[slot] for slot in sizes.keys() - phase.slot_of().values())


def item_at(cuts: Sequence[int], position: int) -> int:
    """The item that runs a compute node."""
    return min(bisect_right(cuts, position) - 1, len(cuts) - 2)


def _owner(node: Node, same: Mapping[Node, Node]) -> Node:
    """The value whose memory a value has."""
    owner = base_of(node, lambda each: is_alias(each) or is_part(each) or each.target in (SETTLED, ARRIVED))
    return same.get(owner, owner)
