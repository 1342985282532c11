"""Instantiate the missing blocks of a program that holds only the captured ones.

    forward    0  1       N-3  N-2  N-1          0  1  2 ... N-4  N-3  N-2  N-1
    backward   N-1  N-2  N-3       1  0    ->    N-1  N-2  N-3  N-4 ... 2  1  0

Each group has a window: the nodes from its first node to the first node of the next group. If the windows of groups 1,
N-3 and N-2 are equal, the missing groups between them become copies of group 1. Nodes are equal if their operators and
metadata are, and each argument is either the same value in all windows, or the corresponding value of the same group or
of a neighboring one. Otherwise `BlocksDifferError` is raised.

This works on graphs of operators, and on the much shorter graphs of region calls and collectives.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch.fx import Node

from graphshard.ir.graph import is_gathered
from graphshard.ir.program import Phase, Program, Slot
from graphshard.ir.repeat_windows import Of, Segment, calls_at_reductions, group_of, in_order, window_starts
from graphshard.ir.repeats import FAR, TEMPLATE, BlocksDifferError, Member, Repeats, renamed

T = TypeVar("T")

# Metadata that does not affect what a node computes.
_IGNORED = frozenset({"number", "seq_nr", "stack_trace", "desc"})
# Metadata that names blocks: module stacks, and texts.
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_TEXTS = ("bucket", "unit", "where")
_MISSING = object()
# Module stacks as (key, (name, class)), and texts, by the key of the metadata; the same by window and group.
_Naming: TypeAlias = tuple[tuple[str, Any], ...]
_Renamed: TypeAlias = dict[tuple[int, int], dict[str, Any]]


def match_blocks(program: Program) -> None:
    """Check that the captured groups of a partitioned program are equal, and enter what forward saves in them.

    Raises:
        BlocksDifferError: the groups differ.
    """
    assert program.few is not None
    saved: dict[str, Member] = {}
    for blocks in _phases_of(program, saved):
        blocks.find()
    program.few = replace(program.few, saved=saved)


def instantiate_blocks(program: Program, *, scheduled: bool = False) -> Program:
    """Return the program of all blocks; `program`, which has the captured ones, is consumed.

    Args:
        scheduled: collectives are scheduled, not only partitioned.

    Raises:
        BlocksDifferError: the groups differ.
    """
    assert program.few is not None
    repeats, params = program.few.repeats, program.few.params
    saved = {name: Member(*each) for name, each in program.few.saved.items()} if scheduled else {}
    for blocks in _phases_of(program, saved, scheduled=scheduled):
        blocks.run()
    found = {name for name in program.differentiated if repeats.group_of(name) == TEMPLATE}
    names = program.differentiated.union(repeats.name_at(group, name) for name in found for group in repeats.missing)
    return replace(program, params=params, differentiated=names, few=None)


def instantiate_all_blocks(program: Program) -> Program:
    """Return the program of all blocks for a partitioned one of captured blocks, which stays unchanged."""
    return instantiate_blocks(program.clone())


def _phases_of(program: Program, saved: dict[str, Member], *, scheduled: bool = False) -> list[_PhaseBlocks]:
    assert program.few is not None
    repeats = program.few.repeats
    if any(map(repeats.place_of, program.rewritten)):
        raise BlocksDifferError("backward writes buffers of blocks")
    return [
        _PhaseBlocks(phase, repeats, saved, name == "backward", scheduled) for name, phase in program.phases.items()
    ]


class Output(NamedTuple):
    """Output of a phase; `ref` is the corresponding value relative to the group, or one node for all groups."""

    value: Any
    slot: Slot
    member: Member | None
    ref: Of | Node | None


@dataclass
class _PhaseBlocks:
    """The groups of one phase: compared, and instantiated.

    Attributes:
        saved: members that forward saves, by name; filled for backward.
        descending: the last group comes first.
        scheduled: collectives are scheduled, and windows start where parameters arrive.
    """

    phase: Phase
    repeats: Repeats
    saved: dict[str, Member]
    descending: bool
    scheduled: bool
    members: dict[Node, Member] = field(default_factory=dict)
    by_member: dict[Member, Node] = field(default_factory=dict)
    # Metadata that copies of a node share; and metadata that names blocks, which most nodes have in common: as it is,
    # and by window and group.
    _metas: dict[Node, dict[str, Any]] = field(default_factory=dict)
    _naming: dict[Node, tuple[_Naming, _Renamed]] = field(default_factory=dict)
    _distinct: dict[_Naming, tuple[_Naming, _Renamed]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Groups whose windows must be equal, and of these the one that follows the missing groups.
        self.inner = self.repeats.captured[1:-1]
        self.behind = self.inner[1]

    # --- comparing -----------------------------------------------------------------------------------------------

    def find(self) -> list[Output]:
        """Compare the groups; return the outputs with their groups.

        Raises:
            BlocksDifferError: the groups differ.
        """
        nodes = [node for node in self.phase.module.graph.nodes if node.op not in ("placeholder", "output")]
        begins = window_starts(nodes, self.repeats, is_gathered if self.scheduled else None)
        if begins or not (self.scheduled and self.descending):
            return self._found(nodes, begins)
        try:  # without gathers, backward is cut at reductions inside of groups
            return self._found(nodes, calls_at_reductions(nodes, self.repeats, behind=False))
        except BlocksDifferError:
            self.members, self.by_member = {}, {}
            return self._found(nodes, calls_at_reductions(nodes, self.repeats, behind=True))

    def _found(self, nodes: list[Node], begins: dict[int, int]) -> list[Output]:
        """Compare the groups for given starts of their windows."""
        self.segments = self._segments(nodes, begins)
        self.group_at = {node: group for segment in self.segments for node, group in segment.groups()}
        for number, segment in enumerate(self.segments):
            for node, group, place in self._aligned(segment):
                self._enter(node, Member((self.descending, number, place), group))
        for node, slot in self.phase.slot_of().items():
            member = self.saved.get(slot.name) if slot.is_saved else self._member_of(slot)
            if member is not None:
                self._enter(node, member)
        for segment in self.segments:
            segment.refs = [self._compare(each) for each in zip(*map(segment.window, self.inner), strict=True)]
        self._check_readers(nodes)
        return self._outputs()

    def _enter(self, node: Node, member: Member) -> None:
        self.members[node], self.by_member[member] = member, node

    def _member_of(self, slot: Slot) -> Member | None:
        """Return the group of a slot that is named as a parameter or buffer."""
        place = self.repeats.place_of(slot.name)
        return None if place is None else Member(replace(slot, name=place[1]), place[0])

    def _segments(self, nodes: list[Node], begins: dict[int, int]) -> list[Segment]:
        """Return one segment, or two: forward may end by preparing inputs of backward, last group first."""
        order = in_order(begins, self.repeats, descending=self.descending)
        end = len(nodes)
        if not self.descending and not self.scheduled:
            after = range(begins[order[-1]], len(nodes))
            groups = ((at, group_of(nodes[at], self.repeats)) for at in after)
            end = next((at for at, group in groups if group is not None and group != order[-1]), end)
        found = [Segment(nodes[:end], begins, order, order[1:-1])]
        if end < len(nodes):
            rest = nodes[end:]
            begins, order = window_starts(rest, self.repeats), order[3::-1]
            starts = [begins.get(group, -1) for group in order]
            if starts[0] != 0 or sorted(set(starts)) != starts:
                raise BlocksDifferError("forward does not prepare inputs of backward group by group")
            found.append(Segment(rest, begins, order, order[:3]))
        return found

    def _aligned(self, segment: Segment) -> Iterator[tuple[Node, int, int]]:
        """Yield nodes with group and index in the window; outer windows are aligned as far as they are equal."""
        for group in segment.inner:
            yield from ((node, group, index) for index, node in enumerate(segment.window(group)))

        def key(node: Node, group: int) -> Any:
            try:
                return node.op, str(node.target), self._names(node, group)
            except BlocksDifferError:
                return node

        template = [key(node, TEMPLATE) for node in segment.window(TEMPLATE)]
        start, end = segment.begins[segment.inner[0]], segment.begins[segment.inner[-1]] + segment.length
        before = segment.nodes[max(start - segment.length, 0) : start]
        after = segment.nodes[end : end + segment.length]
        for group, nodes in ((segment.order[0], before), (segment.order[-1], after)):
            keys = [key(node, group) for node in nodes]
            for block in difflib.SequenceMatcher(None, template, keys, autojunk=False).get_matching_blocks():
                yield from ((nodes[block.b + i], group, block.a + i) for i in range(block.size))

    def _names(self, node: Node, group: int) -> tuple[str, ...]:
        """Return the texts of a node that name blocks, as if it were of the group in the middle."""
        stacks = (text for key in _STACKS for text, *_ in (node.meta.get(key) or {}).values())
        texts = (str(node.meta[key]) for key in _TEXTS if key in node.meta)
        few = self.repeats.captured
        return tuple(renamed(text, self.repeats, few, group, few, self.behind) for text in (*stacks, *texts))

    def _compare(self, nodes: tuple[Node, ...]) -> list[Of | Node]:
        """Return the arguments of corresponding nodes of the equal windows, relative to the group."""
        facts, arguments = [], []
        for node, group in zip(nodes, self.inner, strict=True):
            names, marks = self._names(node, group), sorted(key for key in node.meta if key not in _IGNORED)
            given: list[Node] = []
            text = _without_nodes((node.args, node.kwargs), given)
            about = str(node.meta.get("sizes")), _described(node.meta.get("val")), text, len(given)
            facts.append((node.op, node.target, names, marks, *about))
            arguments.append(given)
        if any(fact != facts[0] for fact in facts):
            raise BlocksDifferError(f"{', '.join(map(str, nodes))} differ")
        return [self._ref(values) for values in zip(*arguments)]

    def _ref(self, values: Sequence[Node]) -> Of | Node:
        """Return the value that the equal windows share, or its family and a distance.

        Where parameters arrive in backward, the next group may already be recomputed, from the output of the group two
        away. The first group has no such predecessor.
        """
        first = values[0]
        if all(value is first for value in values):
            if first in self.group_at and self.members.get(first, Member("", -1)).group in self.inner:
                raise BlocksDifferError(f"{first} of a block is read in another block")
            return first
        members = [(place, self.members.get(value)) for place, value in enumerate(values, TEMPLATE)]
        places = self.repeats.captured
        refs = [member and Of(member.family, places.index(member.group) - place) for place, member in members]
        if refs[0] is None and first.op == "placeholder" and refs[1] is not None and refs[1].distance == -2:
            del refs[0]  # an input from before all groups
        ref = refs[0]
        if ref is None or abs(ref.distance) > FAR or any(other != ref for other in refs):
            raise BlocksDifferError(f"{', '.join(map(str, values))} do not correspond")
        return ref

    def _check_readers(self, nodes: Iterable[Node]) -> None:
        """Check that only neighboring groups read across the gap where the missing groups go.

        A value of the group before the gap stands for the values of all missing groups.
        """
        for node in nodes:
            reader = self.group_at[node]
            if node in self.members and reader in self.inner:
                continue  # compared
            for source in node.all_input_nodes:
                group = self._group_next_to_gap(source)
                if group is not None and (group <= TEMPLATE) != (reader <= TEMPLATE):
                    raise BlocksDifferError(f"{source} of a block is read by {node}")

    def _group_next_to_gap(self, value: Any) -> int | None:
        """Return the group of a value before or after the missing groups; None for others."""
        member = self.members.get(value)
        return member.group if member is not None and member.group in (TEMPLATE, self.behind) else None

    def _outputs(self) -> list[Output]:
        """Return the outputs of the phase, each with its reference relative to its group."""
        results = zip(self.phase.results, self.phase.outputs, strict=True)
        found = [(value, slot, self._output_member(value, slot)) for value, slot in results]
        values = {member: value for value, _, member in found if member is not None}
        return [Output(*output, self._output_ref(*output, values)) for output in found]

    def _output_member(self, value: Any, slot: Slot) -> Member | None:
        if slot.is_saved:
            if slot.name not in self.saved and value in self.group_at and value in self.members:
                self.saved[slot.name] = self.members[value]
            return self.saved.get(slot.name)
        return None if slot.kind == "output" else self._member_of(slot)

    def _output_ref(
        self, value: Any, slot: Slot, member: Member | None, values: Mapping[Member, Any]
    ) -> Of | Node | None:
        if member is None:
            if value in self.group_at and self._group_next_to_gap(value) is not None:
                raise BlocksDifferError(f"{slot} is made in a block")
            return None
        given = [values.get(Member(member.family, group), _MISSING) for group in self.inner]
        nodes = [value for value in given if isinstance(value, Node)]
        if not nodes and all(value is given[0] for value in given):
            return None
        if len(nodes) < len(given):
            raise BlocksDifferError(f"only some blocks return {slot}")
        return self._ref(nodes) if member.group in self.inner else None

    # --- instantiating -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Add the missing groups to the phase."""
        outputs = self.find()
        self._add_inputs()
        for number, segment in enumerate(self.segments):
            self._copy_nodes(number, segment)
        for segment in self.segments:
            self._connect(segment)
        results, slots = [], []
        for output, group, slot in self._named_outputs(outputs):
            at = output.member.group if output.member and group is None else group
            if output.ref is None or at is None or at <= TEMPLATE:
                results.append(output.value)
            else:
                results.append(self._resolved(output.ref, at))
            slots.append(slot)
        self.phase.set_results(results)
        self.phase.outputs = tuple(slots)

    def _resolved(self, ref: Of | Node, group: int) -> Node:
        if isinstance(ref, Node):
            return ref
        member = Member(ref.family, group + ref.distance)
        if member not in self.by_member:
            raise BlocksDifferError(f"a block reads {ref.family}, which does not exist")
        return self.by_member[member]

    def _add_inputs(self) -> None:
        """Add the inputs of the missing groups next to the template's."""
        graph = self.phase.module.graph
        slots = self.phase.slot_of()
        names = {member: name for name, member in self.saved.items()}
        result: list[Slot] = []
        anchor: Node | None = None
        for node, group in _with_copies([(node, self.members.get(node)) for node in slots], self.repeats):
            slot = slots[node]
            if group is not None:
                member = Member(self.members[node].family, group)
                slot = slot.named(names[member] if slot.is_saved else self.repeats.name_at(group, slot.name))
                stem = re.sub(r"\W", "_", slot.name if slot.kind in ("param", "buffer", "saved") else str(slot))
                with graph.inserting_after(anchor) if anchor else graph.inserting_before(next(iter(graph.nodes))):
                    copied = graph.create_node("placeholder", stem, name=stem)
                if copied.target != copied.name:
                    copied.target = copied.name
                self._describe(copied, node, group)
                self.by_member[member] = node = copied
            result.append(slot)
            anchor = node
        self.phase.inputs = tuple(result)

    def _copy_nodes(self, number: int, segment: Segment) -> None:
        graph = self.phase.module.graph
        is_down = segment.order[0] > segment.order[-1]
        template = segment.window(TEMPLATE)
        with graph.inserting_before(segment.window(TEMPLATE if is_down else self.behind)[0]):
            for group in reversed(self.repeats.missing) if is_down else self.repeats.missing:
                for place, node in enumerate(template):
                    args, kwargs = self._arguments(node, segment.refs[place], group)
                    # Not necessarily unique: it is not requested from the graph.
                    copied = graph.create_node(node.op, node.target, name=f"{node.name}_of_{group}")
                    # Node.__setattr__ would look up each argument and enter the node in its graph's table again.
                    object.__setattr__(copied, "args", args)
                    if kwargs:
                        copied.kwargs = kwargs
                    self._describe(copied, node, group)
                    self.by_member[Member((self.descending, number, place), group)] = copied

    def _connect(self, segment: Segment) -> None:
        """Connect the captured groups to the new ones, and rename blocks in metadata."""
        for group in self.inner:
            for node, refs in zip(segment.window(group), segment.refs, strict=True):
                node.args, node.kwargs = self._arguments(node, refs, group)
        for node, group in segment.groups():
            node.meta.update(self._named(node, group, group))

    def _arguments(self, node: Node, refs: list[Of | Node], group: int) -> Any:
        """Return the arguments of a group's corresponding node; the first group keeps inputs from before all groups."""
        left = iter(refs)

        def argument(own: Node) -> Node:
            ref = next(left)
            outside = isinstance(ref, Of) and group + ref.distance < 0
            return own if outside else self._resolved(ref, group)

        return torch.fx.map_arg((node.args, node.kwargs), argument)

    def _describe(self, copied: Node, node: Node, group: int) -> None:
        """Copy the metadata of a template node to its copy in a group."""
        if node not in self._metas:
            self._metas[node] = {key: value for key, value in node.meta.items() if key not in ("number", "desc")}
        copied.meta.update(self._metas[node])
        copied.meta.update(self._named(node, TEMPLATE, group))

    def _named(self, node: Node, window: int, group: int) -> dict[str, Any]:
        """Return the metadata that names blocks, renamed from the captured group `window` to `group`."""
        if node not in self._naming:
            texts = ((key, node.meta[key]) for key in _TEXTS if key in node.meta)
            stacks = ((key, tuple(node.meta[key].items())) for key in _STACKS if node.meta.get(key))
            found = *texts, *stacks
            self._naming[node] = self._distinct.setdefault(found, (found, {}))
        naming, known = self._naming[node]
        if (window, group) not in known:
            known[window, group] = {key: self._renamed(value, window, group) for key, value in naming}
        return known[window, group]

    def _renamed(self, value: Any, window: int, group: int) -> Any:
        if not isinstance(value, str):
            items = [(self._renamed(key, window, group), name, rest) for key, (name, *rest) in value]
            return {key: (self._renamed(name, window, group), *rest) for key, name, rest in items}
        try:
            return renamed(value, self.repeats, self.repeats.captured, window, range(self.repeats.groups), group)
        except BlocksDifferError:  # compared windows do not name blocks that are far away
            return value

    def _named_outputs(self, outputs: list[Output]) -> Iterator[tuple[Output, int | None, Slot]]:
        """Yield outputs with their slots, and the template's again for each missing group; enter what is saved."""
        for output, group in _with_copies([(output, output.member) for output in outputs], self.repeats):
            slot = output.slot
            if group is not None and output.member is not None:
                name = self.repeats.name_at(group, slot.name)
                if slot.is_saved:
                    name = f"{slot.name}_of_{group}"
                    while name in self.saved:  # a node of the graph may have it
                        name += "_"
                    self.saved[name] = Member(output.member.family, group)
                slot = slot.named(name)
            yield output, group, slot


def _with_copies(entries: list[tuple[T, Member | None]], repeats: Repeats) -> Iterator[tuple[T, int | None]]:
    """Yield entries in order, and the template's again for each missing group, in the order of groups."""
    before: int | None = None
    for group, run in itertools.groupby(entries, lambda entry: entry[1].group if entry[1] else None):
        found = [entry for entry, _ in run]
        own = [(entry, None) for entry in found]
        descending = before == repeats.captured[TEMPLATE + 1]
        missing = repeats.missing[:: -1 if descending else 1] if group == TEMPLATE else ()
        copies = [(entry, other) for other in missing for entry in found]
        yield from (*copies, *own) if descending else (*own, *copies)
        before = group


def _without_nodes(value: Any, found: list[Node]) -> str:
    """Return arguments as text without nodes, which are appended to `found` in order."""

    def take(node: Node) -> str:
        found.append(node)
        return "%"

    return repr(torch.fx.map_arg(value, take))


def _described(value: Any) -> Any:
    """Return the properties of a fake value as a comparable object."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(map(_described, value))
    return repr(value)
