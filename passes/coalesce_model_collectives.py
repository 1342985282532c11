"""Coalesce the model's own collectives that run at once.

    %a = all_gather(%k, 4, cp)                    %b = all_gather_coalesced([%k, %v], 4, cp)
    %b = all_gather(%v, 4, cp)                    %a = getitem(%b, 0)
    %c = mm(%q, %a)                               %b = getitem(%b, 1)
                                                  %c = mm(%q, %a)

Collectives for which `overlap-model-collectives` found nothing to overlap stop all compute, one after the other, and
each launch costs some microseconds. The pass coalesces collectives of one operator, axis, reduction, dtype and unit
that do not need each other. Compute that needs the first of them moves after the launch; multiplications and random
operators are not moved. A coalesced launch copies nothing, and each tensor is reduced as it was alone. All-to-alls
have no coalesced launch.

Reductions of gradients follow as before; the plan, which is made on the new order, places them.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch.fx import Node

from graphshard.cost.flops import is_multiplication
from graphshard.ir.collective_regions import CollectiveRegions, with_inputs
from graphshard.ir.graph import OWN, arrange, emit, fake, is_part, is_random, module_of, writes
from graphshard.ir.operators import COALESCED_FORMS
from graphshard.ir.program import Phase, Program
from graphshard.ir.units import unit_of
from graphshard.passes.base import Pass, gradients_of
from graphshard.torch_compat.torch_ops import OpOverload


@dataclass(frozen=True)
class CoalesceModelCollectives(Pass):
    """Requires: a partitioned program.  Preserves: every value; random operators keep their order."""

    name: ClassVar[str] = "coalesce-model-collectives"
    runs: ClassVar = "partitioned"

    def rewrite_phase(self, phase: Phase, program: Program) -> int:
        nodes = [node for node in phase.module.graph.nodes if node.op == "call_function"]
        if not any(node.target in COALESCED_FORMS for node in nodes) or any(map(writes, nodes)):
            return 0
        layout = CollectiveRegions.of(phase)
        groups = [group for group in _groups(nodes, layout, _units(nodes, phase, layout, program)) if group.members[1:]]
        if not groups:
            return 0
        arrange(phase, with_inputs(_ordered(layout.compute, groups), nodes))
        for group in groups:
            _launch(group.members)
        return sum(len(group.members) for group in groups)


@dataclass(eq=False)
class _Group:
    """Collectives that may be launched together where the last of them is.

    Attributes:
        needing: nodes seen so far that need one of them.
        put_off: compute among these before the last member, which moves after it.
        after: compute among these after the last member so far.
    """

    members: list[Node] = field(default_factory=list)
    needing: set[Node] = field(default_factory=set)
    put_off: list[Node] = field(default_factory=list)
    after: list[Node] = field(default_factory=list)


def _units(nodes: list[Node], phase: Phase, layout: CollectiveRegions, program: Program) -> dict[Node, str]:
    """Return the unit of each collective: of the parameter whose gradient it is a part of, or else of its module."""
    found = {node: unit_of(module_of(node), program.params.units) for node in nodes if node.target in COALESCED_FORMS}
    for grad, spec in gradients_of(phase, program):
        left = [grad]
        while left:
            node = left.pop()
            if node in found:
                found[node] = spec.unit
            if node not in layout.index:
                left += node.all_input_nodes
    return found


def _groups(nodes: list[Node], layout: CollectiveRegions, units: dict[Node, str]) -> list[_Group]:
    """Put each synchronous collective into the first group that it fits in."""
    compute = layout.index
    found: list[_Group] = []
    open_: dict[object, _Group] = {}
    for node in nodes:
        for key, group in [*open_.items()]:
            if not any(each in group.needing or each in group.members for each in node.all_input_nodes):
                continue
            group.needing.add(node)
            if node in compute and (node.target in OWN or is_random(node) or is_multiplication(node)):
                del open_[key]
            elif node in compute and not is_part(node):
                group.after.append(node)
        if node.target in COALESCED_FORMS and node in compute:
            key = node.target, str(node.args[1:]), fake(node).dtype, fake(node).device, units[node]
            if key not in open_:
                found.append(open_.setdefault(key, _Group()))
            group = open_[key]
            group.members.append(node)
            group.put_off += group.after
            group.after.clear()
    return found


def _ordered(compute: Sequence[Node], groups: Sequence[_Group]) -> Iterator[Node]:
    """Yield compute with the members of a group next to each other, and then the compute that was put off."""
    ends = {group.members[-1]: group for group in groups}
    moved = {node for group in groups for node in (*group.members[:-1], *group.put_off)}
    waits_for = Counter(node for group in groups for node in group.put_off)
    for node in compute:
        if node in ends:
            for member in ends[node].members:
                yield from (source for source in member.all_input_nodes if source.op == "call_function")
            yield from ends[node].members
            waits_for.subtract(ends[node].put_off)
            yield from (each for each in ends[node].put_off if not waits_for[each])
        elif node not in moved:
            yield node


def _launch(members: list[Node]) -> None:
    """Replace collectives, which are next to each other, with one."""
    first, graph = members[0], members[0].graph
    assert isinstance(first.target, OpOverload)
    with graph.inserting_before(first):
        tensors = [member.args[0] for member in members]
        together = emit(graph, COALESCED_FORMS[first.target], tensors, *first.args[1:], like=first)
        parts = [emit(graph, operator.getitem, together, index, like=member) for index, member in enumerate(members)]
    together.meta = {**first.meta, **together.meta}
    for member, part in zip(members, parts):
        part.meta = {**member.meta, **part.meta}
        member.replace_all_uses_with(part)
        graph.erase_node(member)
