"""A program of a few blocks as that of many equal ones.

    forward    0  1  2        N-2  N-1          0  1  2  3 ... N-3  N-2  N-1
    backward   N-1  N-2       2  1  0     ->    N-1  N-2  N-3 ... 3  2  1  0

The nodes between the first of a group of blocks and the first of the next one are its window. If those of the groups
1, 2 and N-2 are equal, node by node, those between them are as well, and are copies of that of 2. Equal means: the same
operators and values, and each argument is the same value in all three, or the corresponding one of the same group or of
the one before. Anything else raises `Uneven`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch.fx import Node

from graphshard.ir.params import ParamTable
from graphshard.ir.program import Phase, Program, Slot
from graphshard.ir.repeats import Repeats, Uneven
from graphshard.ir.windows import Member, Of, Ref, Segment, Shared, begins_of, group_of, groups_of, in_order

# What says nothing of what a node computes.
_IGNORED = frozenset({"number", "seq_nr", "stack_trace", "desc", "nn_module_stack", "fwd_nn_module_stack"})

T = TypeVar("T")


def stamp(program: Program, repeats: Repeats, params: ParamTable) -> Program:
    """The partitioned program of all blocks, made of that of those captured, which is used up.

    Raises:
        Uneven: the groups are not equal.
    """
    if any(map(repeats.place_of, program.rewritten)):
        raise Uneven("backward writes buffers of blocks")
    saved: dict[str, Member] = {}
    for name, phase in program.phases.items():
        _Stamp(phase, repeats, saved, descending=name == "backward").run()
    found = {name for name in program.differentiated if (repeats.place_of(name) or (-1, ""))[0] == 2}
    names = program.differentiated.union(repeats.name_at(group, name) for name in found for group in repeats.missing)
    return replace(program, params=params, differentiated=names)


@dataclass
class _Stamp:
    """One phase.

    Attributes:
        saved: what forward saves, by name: filled for backward.
        descending: groups follow each other from the last to the first.
    """

    phase: Phase
    repeats: Repeats
    saved: dict[str, Member]
    descending: bool
    members: dict[Node, Member] = field(default_factory=dict)
    by_member: dict[Member, Node] = field(default_factory=dict)
    _stacks: dict[tuple[int, int], Any] = field(default_factory=dict)

    def run(self) -> None:
        """Rewrite the phase."""
        nodes = [node for node in self.phase.module.graph.nodes if node.op not in ("placeholder", "output")]
        self.segments = self._segments(nodes)
        self.group_at = {node: group for segment in self.segments for node, group in groups_of(segment)}
        for number, segment in enumerate(self.segments):
            for node, group, place in segment.aligned(self._inner(segment)):
                self._enter(node, Member((self.descending, number, place), group))
        for node, slot in self.phase.slot_of().items():
            member = self._input_member(slot)
            if member is not None:
                self._enter(node, member)
        for segment in self.segments:
            segment.refs = self._compare(segment, 1, 2)
            if segment.refs != self._compare(segment, 2, self._last):
                raise Uneven("arguments of blocks differ")
        self._check_readers(nodes)
        outputs = self._outputs()
        self._add_inputs()
        for number, segment in enumerate(self.segments):
            self._copy_nodes(number, segment)
        for segment in self.segments:
            self._connect(segment)
        self._add_outputs(outputs)

    @property
    def _last(self) -> int:
        """The group behind those left out."""
        return self.repeats.captured[3]

    def _enter(self, node: Node, member: Member) -> None:
        self.members[node], self.by_member[member] = member, node

    # --- where groups are ---

    def _segments(self, nodes: list[Node]) -> list[Segment]:
        """One, or two in forward: at its end it may prepare what backward reads, from the last group to the first."""
        begins = begins_of(nodes, self.repeats)
        order = in_order(begins, self.repeats, descending=self.descending)
        end = len(nodes)
        if not self.descending:
            after = range(begins[order[-1]], len(nodes))
            groups = ((at, group_of(nodes[at], self.repeats)) for at in after)
            end = next((at for at, group in groups if group is not None and group != order[-1]), end)
        found = [Segment.of(nodes[:end], begins, order, order[1:4])]
        if end < len(nodes):
            rest = nodes[end:]
            begins, order = begins_of(rest, self.repeats), [self._last, 2, 1, 0]
            starts = [begins.get(group, -1) for group in order]
            if starts[0] != 0 or sorted(set(starts)) != starts:
                raise Uneven("what forward prepares for backward is in no order")
            found.append(Segment.of(rest, begins, order, order[:3]))
        return found

    def _inner(self, segment: Segment) -> list[int]:
        """The groups whose windows must be equal, in their order."""
        return [group for group in segment.order if group in (1, 2, self._last)]

    def _input_member(self, slot: Slot) -> Member | None:
        if slot.kind == "saved" and slot.of is None:
            return self.saved.get(slot.name)
        place = self.repeats.place_of(slot.name)
        return None if place is None else Member(replace(slot, name=place[1]), place[0])

    # --- comparing ---

    def _compare(self, segment: Segment, one: int, other: int) -> list[list[Ref]]:
        """The arguments of the nodes of two windows, which must be the same but for the group."""
        pairs = zip(segment.window(one), segment.window(other), strict=True)
        return [self._same_node(a, b, one, other) for a, b in pairs]

    def _same_node(self, a: Node, b: Node, one: int, other: int) -> list[Ref]:
        if (a.op, a.target) != (b.op, b.target) or self._facts(a) != self._facts(b):
            raise Uneven(f"{a} and {b} differ")
        found: tuple[list[Node], list[Node]] = ([], [])
        texts = [_without_nodes((n.args, n.kwargs), nodes) for n, nodes in zip((a, b), found)]
        if texts[0] != texts[1] or len(found[0]) != len(found[1]):
            raise Uneven(f"{a} and {b} have different arguments")
        return [self._same_ref(x, y, one, other) for x, y in zip(*found)]

    def _same_ref(self, x: Node, y: Node, one: int, other: int) -> Ref:
        if x is y:
            if x in self.group_at and self.members.get(x, Member("", -1)).group in (1, 2, self._last):
                raise Uneven(f"{x} of a block is read by others")
            return Shared(x)
        if x in self.members and y in self.members:
            (family, group), (other_family, other_group) = self.members[x], self.members[y]
            distance = self._distance(group, one)
            if (family, distance) == (other_family, self._distance(other_group, other)) and abs(distance) <= 1:
                return Of(family, distance)
        raise Uneven(f"{x} and {y} do not correspond")

    def _distance(self, group: int, window: int) -> int:
        """How many captured groups lie between."""
        order = self.repeats.captured
        return order.index(group) - order.index(window)

    def _facts(self, node: Node) -> Any:
        """What is known of a node and must be the same in all groups."""
        stacks = []
        for key in ("nn_module_stack", "fwd_nn_module_stack"):
            values = node.meta.get(key) or {}
            stacks.append([(self.repeats.place_of(n) or (None, n))[1] for n, *_ in values.values()])
        marks = sorted(key for key in node.meta if key not in _IGNORED)
        return stacks, marks, str(node.meta.get("sizes")), _described(node.meta.get("val"))

    def _check_readers(self, nodes: Iterable[Node]) -> None:
        """What lies on one side of the groups left out is read on the other by the groups next to them only.

        A value of the group before them stands for those of all groups left out.
        """
        for node in nodes:
            reader = self.group_at[node]
            if node in self.members and reader in (1, 2, self._last):
                continue  # compared
            for source in node.all_input_nodes:
                member = self.members.get(source)
                if member is not None and member.group in (2, self._last) and (member.group <= 2) != (reader <= 2):
                    raise Uneven(f"{source} of a block is read by {node}")

    # --- writing ---

    def _resolved(self, ref: Ref, group: int) -> Node:
        if isinstance(ref, Shared):
            return ref.node
        member = Member(ref.family, group + ref.distance)
        if member not in self.by_member:
            raise Uneven(f"a block needs {ref.family}, which there is not")
        return self.by_member[member]

    def _add_inputs(self) -> None:
        """Inputs of the groups left out, beside those of the captured ones."""
        graph = self.phase.module.graph
        slots = self.phase.slot_of()
        names = {member: name for name, member in self.saved.items()}
        result: list[Slot] = []
        anchor: Node | None = None
        for node, group in _with_copies([(node, self.members.get(node)) for node in slots], self.repeats):
            slot = slots[node]
            if group is not None:
                member = Member(self.members[node].family, group)
                is_saved = slot.kind == "saved" and slot.of is None
                name = names[member] if is_saved else self.repeats.name_at(group, slot.name)
                slot = replace(slot, name=name)
                stem = re.sub(r"\W", "_", slot.name if slot.kind in ("param", "buffer", "saved") else str(slot))
                with graph.inserting_after(anchor) if anchor else graph.inserting_before(next(iter(graph.nodes))):
                    copied = graph.create_node("placeholder", stem, name=stem)
                copied.target = copied.name
                copied.meta = self._meta(node, group)
                self.by_member[member] = node = copied
            result.append(slot)
            anchor = node
        self.phase.inputs = tuple(result)

    def _copy_nodes(self, number: int, segment: Segment) -> None:
        graph = self.phase.module.graph
        is_down = segment.order[0] > segment.order[-1]
        template = segment.window(2)
        with graph.inserting_before(segment.window(2 if is_down else self._last)[0]):
            for group in reversed(self.repeats.missing) if is_down else self.repeats.missing:
                for place, node in enumerate(template):
                    args, kwargs = self._arguments(node, segment.refs[place], group)
                    # A name that others may have who did not ask the graph for one.
                    name = f"{node.name}_of_{group}"
                    copied = graph.create_node(node.op, node.target, args, kwargs, name=name)
                    copied.meta = self._meta(node, group)
                    self.by_member[Member((self.descending, number, place), group)] = copied

    def _connect(self, segment: Segment) -> None:
        """Let the captured groups beside those left out read what these make."""
        for group in (2, self._last):
            for node, refs in zip(segment.window(group), segment.refs, strict=True):
                node.args, node.kwargs = self._arguments(node, refs, group)

    def _arguments(self, node: Node, refs: list[Ref], group: int) -> Any:
        """The arguments of the corresponding node of a group."""
        found = iter([self._resolved(ref, group) for ref in refs])
        return torch.fx.map_arg((node.args, node.kwargs), lambda _: next(found))

    def _meta(self, node: Node, group: int) -> dict[str, Any]:
        meta = {key: value for key, value in node.meta.items() if key not in ("number", "desc")}
        for key in ("nn_module_stack", "fwd_nn_module_stack"):
            if meta.get(key):
                known = (id(meta[key]), group)
                if known not in self._stacks:
                    name_at = self.repeats.name_at
                    self._stacks[known] = {
                        name_at(group, k): (name_at(group, name), *rest) for k, (name, *rest) in meta[key].items()
                    }
                meta[key] = self._stacks[known]
        return meta

    # --- outputs ---

    def _outputs(self) -> list[_Output]:
        """What the phase returns; of groups, as corresponding outputs, with what those of the template return."""
        found = [
            _Output(value, slot, self._output_member(value, slot), None)
            for value, slot in zip(self.phase.results, self.phase.outputs, strict=True)
        ]
        values = {output.member: output.value for output in found if output.member is not None}
        return [output._replace(ref=self._output_ref(output, values)) for output in found]

    def _output_ref(self, output: _Output, values: Mapping[Member, Any]) -> Ref | None:
        groups = (1, 2, self._last)
        if output.member is None or output.member.group not in groups:
            source = self.members.get(output.value)
            if source is not None and output.value in self.group_at and source.group in (2, self._last):
                raise Uneven(f"{output.slot} is made in a block")
            return None
        x, y, z = (values.get(Member(output.member.family, group), _MISSING) for group in groups)
        if not isinstance(x, Node) and x is y is z:
            return None
        if not all(isinstance(value, Node) for value in (x, y, z)):
            raise Uneven(f"only some blocks return {output.slot}")
        ref = self._same_ref(x, y, *groups[:2])
        if ref != self._same_ref(y, z, *groups[1:]):
            raise Uneven(f"blocks return different {output.slot}")
        return ref

    def _output_member(self, value: Any, slot: Slot) -> Member | None:
        if slot.kind == "saved" and slot.of is None:
            member = self.members.get(value) if value in self.group_at else None
            if member is not None:
                self.saved[slot.name] = member
            return member
        place = None if slot.kind == "output" else self.repeats.place_of(slot.name)
        return None if place is None else Member(replace(slot, name=place[1]), place[0])

    def _free(self, name: str) -> str:
        """A name that no saved value has: one may be called as another node of the graph is."""
        while name in self.saved:
            name += "_"
        return name

    def _add_outputs(self, outputs: list[_Output]) -> None:
        results, slots = [], []
        for output, group in _with_copies([(output, output.member) for output in outputs], self.repeats):
            value, slot = output.value, output.slot
            at = output.member.group if output.member and group is None else group
            if output.ref is not None and at is not None and at >= 2:
                value = self._resolved(output.ref, at)
            if group is not None and output.member is not None:
                is_saved = slot.kind == "saved" and slot.of is None
                name = self._free(value.name) if is_saved else self.repeats.name_at(group, slot.name)
                slot = replace(slot, name=name)
                if is_saved:
                    self.saved[name] = Member(output.member.family, group)
            results.append(value)
            slots.append(slot)
        self.phase.set_results(results)
        self.phase.outputs = tuple(slots)


class _Output(NamedTuple):
    """What a phase returns; `ref` is what it is of its group."""

    value: Any
    slot: Slot
    member: Member | None
    ref: Ref | None


_MISSING = object()


def _with_copies(entries: list[tuple[T, Member | None]], repeats: Repeats) -> Iterator[tuple[T, int | None]]:
    """Entries in order, and those of the third group again for each group left out, in their order there."""
    groups = repeats.missing
    index = 0
    while index < len(entries):
        end = index
        while end < len(entries) and _of_template(entries[end][1]):
            end += 1
        run = [entry for entry, _ in entries[index:end]]
        before = entries[index - 1][1] if index else None
        descending = before is not None and before.group == repeats.captured[3]
        if descending:
            yield from ((entry, group) for group in groups[::-1] for entry in run)
        yield from ((entry, None) for entry in run)
        if not descending:
            yield from ((entry, group) for group in groups for entry in run)
        if end == index:
            yield entries[index][0], None
            end += 1
        index = end


def _of_template(member: Member | None) -> bool:
    return member is not None and member.group == 2


def _without_nodes(value: Any, found: list[Node]) -> str:
    """Arguments as text, with the nodes among them taken out in order."""

    def take(node: Node) -> str:
        found.append(node)
        return "%"

    return repr(torch.fx.map_arg(value, take))


def _described(value: Any) -> Any:
    """What a fake value is, as something to compare."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(map(_described, value))
    return repr(value)
