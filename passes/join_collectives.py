"""Let what the model itself communicates at once travel together.

    %a = joined(%k, 4, cp)                    %b = joined_together([%k, %v], 4, cp)
    %b = joined(%v, 4, cp)                    %a = getitem(%b, 0)
    %c = mm(%q, %a)                           %b = getitem(%b, 1)
                                              %c = mm(%q, %a)

Those that `overlap-collectives` found nothing to run beside hold up all compute, one after the other, and a launch
costs some microseconds whatever it carries. Of one operator, axis, reduction and dtype, and of one unit, those travel
together of which none needs another. What was computed of the first meanwhile runs behind them; nothing that multiplies
is put off, or drawn at random. A coalesced launch copies nothing, and each tensor is reduced as it was alone.
All-to-alls know no coalesced launch.

Reductions of parameters' gradients follow as before; the plan, which is made on the new order, places them.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch.fx import Node

from graphshard.cost.multiplications import is_multiplication
from graphshard.ir.graph import OWN, arrange, emit, fake, is_part, is_random, module_of, writes
from graphshard.ir.layout import Layout, with_inputs
from graphshard.ir.operators import TOGETHER
from graphshard.ir.params import ParamTable
from graphshard.ir.program import Phase, Program
from graphshard.ir.units import unit_of
from graphshard.passes.base import Pass, check_partitioned
from graphshard.torch_compat.operators import OpOverload


@dataclass(frozen=True)
class JoinCollectives(Pass):
    """Requires: a partitioned program.  Preserves: every value; random operators keep their order."""

    name: ClassVar[str] = "join-collectives"

    def requires(self, program: Program) -> None:
        check_partitioned(self, program)

    def rewrite(self, program: Program) -> int:
        return sum(_join(phase, program.params) for phase in program.phases.values())


@dataclass(eq=False)
class _Group:
    """Collectives that may travel together where the last of them stands.

    Attributes:
        needing: what needs one of them, as far as it was looked at.
        put_off: of that what computes before the last of them, and is to run behind it.
        behind: of that what computes behind the last of them so far.
    """

    members: list[Node] = field(default_factory=list)
    needing: set[Node] = field(default_factory=set)
    put_off: list[Node] = field(default_factory=list)
    behind: list[Node] = field(default_factory=list)

    def add(self, member: Node) -> None:
        """Let another one travel with them."""
        self.members.append(member)
        self.put_off += self.behind
        self.behind.clear()


def _join(phase: Phase, params: ParamTable) -> int:
    """Rewrite a phase; how many collectives travel with another one now."""
    nodes = [node for node in phase.module.graph.nodes if node.op == "call_function"]
    if not any(node.target in TOGETHER for node in nodes) or any(map(writes, nodes)):
        return 0
    layout = Layout.of(phase)
    groups = [group for group in _groups(nodes, layout, _units(nodes, phase, layout, params)) if len(group.members) > 1]
    if not groups:
        return 0
    arrange(phase, with_inputs(_ordered(layout.compute, groups), nodes))
    for group in groups:
        _launch(group.members)
    return sum(len(group.members) for group in groups)


def _units(nodes: list[Node], phase: Phase, layout: Layout, params: ParamTable) -> dict[Node, str]:
    """The unit of each collective: of the parameter whose gradient it is a step to, or of the module that it is in."""
    found = {node: unit_of(module_of(node), params.units) for node in nodes if node.target in TOGETHER}
    for result, slot in zip(phase.results, phase.outputs, strict=True):
        left = [result] if isinstance(result, Node) and slot.kind == "grad" and slot.of == "param" else []
        while left:
            node = left.pop()
            if node in found:
                found[node] = params[slot.name].unit
            if node not in layout.index:
                left += node.all_input_nodes
    return found


def _groups(nodes: list[Node], layout: Layout, units: dict[Node, str]) -> list[_Group]:
    """Each collective that runs at once in the first group that it fits in."""
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
                group.behind.append(node)
        if node.target in TOGETHER and node in compute:
            key = node.target, str(node.args[1:]), fake(node).dtype, fake(node).device, units[node]
            if key not in open_:
                found.append(open_.setdefault(key, _Group()))
            open_[key].add(node)
    return found


def _ordered(compute: Sequence[Node], groups: Sequence[_Group]) -> Iterator[Node]:
    """Those of a group side by side where the last one stood, and behind them what was put off."""
    ends = {group.members[-1]: group for group in groups}
    moved = {node for group in groups for node in (*group.members[:-1], *group.put_off)}
    waits_for = Counter(node for group in groups for node in group.put_off)
    for node in compute:
        if node in ends:
            yield from _with_given(ends[node].members)
            waits_for.subtract(ends[node].put_off)
            yield from (each for each in ends[node].put_off if not waits_for[each])
        elif node not in moved:
            yield node


def _with_given(members: list[Node]) -> Iterator[Node]:
    """What they are given first, so that they stand side by side."""
    for member in members:
        yield from (node for node in member.all_input_nodes if node.op == "call_function")
    yield from members


def _launch(members: list[Node]) -> None:
    """Replace collectives, which stand side by side, with one."""
    first, graph = members[0], members[0].graph
    assert isinstance(first.target, OpOverload)
    with graph.inserting_before(first):
        tensors = [member.args[0] for member in members]
        together = emit(graph, TOGETHER[first.target], tensors, *first.args[1:], like=first)
        parts = [emit(graph, operator.getitem, together, index, like=member) for index, member in enumerate(members)]
    for node, source in zip((together, *parts), (first, *members)):
        node.meta.update({key: value for key, value in source.meta.items() if key not in node.meta})
    for member, part in zip(members, parts):
        member.replace_all_uses_with(part)
        graph.erase_node(member)
