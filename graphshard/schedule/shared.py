"""Which values have the memory of others, in a phase and between phases.

    forward      %out = attention(...)   %a = transpose(%out)   %b = detach(%out)   return %a, %b
    backward     %a, %b                                         one memory, until the last of both is read

Two slots say nothing of that, and backward's placeholders are two nodes. A view holds all of what it is a view of. A
region may return what it was given, too, seen in another shape.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from graphshard.cost.kernels import num_bytes
from graphshard.cost.scalars import Scalar
from graphshard.ir.graph import WAIT, base_of, is_alias
from graphshard.ir.operators import ARRIVED, SETTLED
from graphshard.ir.program import LASTING, Phase, Program, Region, Slot


@dataclass(frozen=True)
class Saved:
    """Memory of values that forward saves; they go by the first of their slots.

    Attributes:
        slot: the first.
        num_bytes: of the whole memory, 0 if an input of forward has it, which is there anyway.
    """

    slot: Slot
    num_bytes: Scalar


def saved_memory(program: Program) -> dict[Slot, Saved]:
    """By the slot of what is saved, unless it is a full parameter; empty without a backward, or of a backward alone."""
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


def first_of(slots: Mapping[Node, Slot], saved: Mapping[Slot, Saved]) -> dict[Node, Node]:
    """By each placeholder of a value that is saved, the first one that has the same memory."""
    first: dict[Slot, Node] = {}
    return {node: first.setdefault(saved[slot].slot, node) for node, slot in slots.items() if slot in saved}


def owners(program: Program, phase: Phase, saved: Mapping[Slot, Saved] | None = None) -> dict[Node, Node]:
    """By each node the one whose memory its value has: a view's, a wait's, and what a region was given and returns.

    Args:
        saved: what forward has saved, of which several have one memory.
    """
    first = first_of(phase.slot_of(), saved or {})
    shown: dict[str, list[Node | int]] = {}
    returned: dict[tuple[Node, Node], Node] = {}
    found: dict[Node, Node] = {}
    for node in phase.module.graph.nodes:
        found[node] = first.get(node, node)
        if node.op != "call_function" or not node.all_input_nodes:
            continue
        source = node.all_input_nodes[0]
        if node.target in (WAIT, ARRIVED, SETTLED) or is_alias(node):
            found[node] = found[source]
        elif node.target is operator.getitem and source.op == "call_module":
            key = program.region_names[str(source.target)]
            if key not in shown:
                shown[key] = _aliases(program.regions[key])
            of = shown[key][node.args[1]]
            if isinstance(of, int):
                found[node] = found[source.args[0][of]]
            else:
                found[node] = returned.setdefault((source, of), node)
    return found


def _aliases(region: Region) -> list[Node | int]:
    """By the results of a region: the number of the input whose memory each has, or the node inside that made it."""
    nodes = region.module.graph.nodes
    inputs = {node: index for index, node in enumerate(n for n in nodes if n.op == "placeholder")}
    (output,) = (node for node in nodes if node.op == "output")
    owner = (base_of(node, is_alias) for node in output.args[0])
    return [inputs.get(node, node) for node in owner]
