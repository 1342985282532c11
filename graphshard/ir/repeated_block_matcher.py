"""Matcher of repeated blocks: check that the captured groups are equal, so that they determine the missing ones.

Each group has a window: the nodes from its first node to the first node of the next group. If the windows of groups 1,
N-3 and N-2 are equal, the missing groups between them are copies of group 1. Two nodes are equal if their operators and
metadata are, and each argument is either the same value in all windows, or the corresponding value of the same group or
of a neighboring one. Otherwise `BlocksDifferError` is raised.
"""

from __future__ import annotations

import bisect
import difflib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.fx import Node

from graphshard.ir.expand_repeats import Frame
from graphshard.ir.graph import is_backward, is_collective, is_gathered
from graphshard.ir.param_table import ParamTable
from graphshard.ir.program import Phase, Program, Slot
from graphshard.ir.repeats import CAPTURED, TEMPLATE, BlocksDifferError, RepeatedBlocks, Repeats


def flop_of_all(joint: Phase, repeats: Repeats, flop_of: Callable[[Iterable[Node]], dict[str, Any]]) -> dict[str, Any]:
    """Return the FLOPs by dtype of a joint (or the only) graph, extrapolated to all blocks.

    Args:
        flop_of: counts the FLOPs of nodes.

    Raises:
        BlocksDifferError: the groups differ.
    """
    nodes = [node for node in joint.module.graph.nodes if node.op not in ("placeholder", "output")]
    total = flop_of(nodes)
    for descending in (False, True):
        part = [node for node in nodes if is_backward(node) == descending]
        if not part:
            continue
        begins = window_starts(part, repeats)
        order = in_order(begins, repeats, descending=descending)
        counts = [flop_of(part[begins[a] : begins[b]]) for a, b in itertools.pairwise(order[1:])]
        if counts[0] != counts[1] or counts[1] != counts[2]:
            raise BlocksDifferError("blocks have different numbers of FLOPs")
        for dtype, flop in counts[1].items():
            total[dtype] += flop * (repeats.groups - CAPTURED)
    return total


def window_starts(
    nodes: Sequence[Node], repeats: Repeats, counts: Callable[[Node], bool] | None = None
) -> dict[int, int]:
    """Return the position of the first node of each group.

    Args:
        counts: whether a node may be the first; None accepts any.
    """
    begins: dict[int, int] = {}
    for at, node in enumerate(nodes):
        group = group_of(node, repeats) if counts is None or counts(node) else None
        if group is not None:
            begins.setdefault(group, at)
    return begins


def group_of(node: Node, repeats: Repeats) -> int | None:
    """Return the group whose forward or backward made a node; None outside of blocks."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return next((place[0] for name, *_ in stack.values() if (place := repeats.place_of(name))), None)


def in_order(begins: Mapping[int, int], repeats: Repeats, *, descending: bool) -> list[int]:
    """Return the captured groups in the order of the graph.

    Raises:
        BlocksDifferError: a group is missing or out of order.
    """
    order = [*repeats.captured[:: -1 if descending else 1]]
    starts = [begins.get(group, -1) for group in order]
    if min(starts) < 0 or sorted(set(starts)) != starts:
        raise BlocksDifferError("blocks do not follow each other")
    return order


class Member(NamedTuple):
    """One of the corresponding inputs, nodes or outputs of all groups, which form a family."""

    family: Any
    group: int


class Of(NamedTuple):
    """Reference to the member of a family in the group `distance` groups away."""

    family: Any
    distance: int


class Shared(NamedTuple):
    """Reference to a node that is the same for all groups."""

    node: Node


Ref: TypeAlias = Of | Shared


@dataclass
class Segment:
    """Run of nodes with one window for each group, in ascending or descending order of groups.

    Attributes:
        nodes: the run.
        begins: first position of each captured group's window.
        order: the groups in the order of their windows.
        length: number of nodes in a window.
        refs: arguments of each node of a window.
    """

    nodes: list[Node]
    begins: dict[int, int]
    order: list[int]
    length: int
    refs: list[list[Ref]] = field(default_factory=list)

    @classmethod
    def of(cls, nodes: list[Node], begins: dict[int, int], order: list[int], inner: Sequence[int]) -> Segment:
        """Build a segment; find the length of its windows.

        Args:
            inner: groups whose windows must be equal, in order.
        """
        ends = [begins[group] for group in (*inner, order[order.index(inner[-1]) + 1])]
        lengths = {b - a for a, b in itertools.pairwise(ends)}
        if len(lengths) != 1:
            raise BlocksDifferError("blocks have different numbers of operators")
        return cls(nodes, begins, order, lengths.pop())

    def window(self, group: int) -> list[Node]:
        """Return the nodes of a group."""
        return self.nodes[self.begins[group] : self.begins[group] + self.length]

    def aligned(self, inner: Sequence[int], key: Callable[[Node, int], Hashable]) -> Iterator[tuple[Node, int, int]]:
        """Yield nodes with group and index in the window; outer windows are aligned as far as they are equal.

        Args:
            key: equal for corresponding nodes of different groups.
        """
        for group in inner:
            yield from ((node, group, i) for i, node in enumerate(self.window(group)))
        template = [key(node, inner[0]) for node in self.window(inner[0])]
        start, end = self.begins[inner[0]], self.begins[inner[-1]] + self.length
        at = self.order.index(inner[0])
        sides = [(self.order[-1], self.nodes[end : end + self.length])]
        if at > 0:
            first = self.begins[self.order[at - 1]] if at > 1 else max(start - self.length, 0)
            sides.append((self.order[at - 1], self.nodes[first:start]))
        for group, nodes in sides:
            found = difflib.SequenceMatcher(None, template, [key(node, group) for node in nodes], autojunk=False)
            for block in found.get_matching_blocks():
                yield from ((nodes[block.b + i], group, block.a + i) for i in range(block.size))


def groups_of(segment: Segment) -> Iterator[tuple[Node, int]]:
    """Yield every node with the group whose window it is in or next to."""
    ends = [*(segment.begins[group] for group in segment.order[1:]), len(segment.nodes)]
    start = 0
    for group, end in zip(segment.order, ends, strict=True):
        yield from ((node, group) for node in segment.nodes[start:end])
        start = end


# Metadata that does not affect what a node computes.
_IGNORED = frozenset({"number", "seq_nr", "stack_trace", "desc"})
# Metadata that names blocks: module stacks, and texts.
STACKS = ("nn_module_stack", "fwd_nn_module_stack")
TEXTS = ("bucket", "unit", "where")


class Output(NamedTuple):
    """Output of a phase; `ref` is the corresponding value relative to its group."""

    value: Any
    slot: Slot
    member: Member | None
    ref: Ref | None


@dataclass
class BlockMatcher:
    """Matcher of the groups of one phase.

    Attributes:
        saved: members that forward saves, by name; filled for backward.
        descending: the last group comes first.
        scheduled: collectives are scheduled, and windows start where parameters arrive.
    """

    phase: Phase
    repeats: Repeats
    saved: dict[str, Member]
    descending: bool
    scheduled: bool = False
    members: dict[Node, Member] = field(default_factory=dict)
    by_member: dict[Member, Node] = field(default_factory=dict)

    def find(self) -> list[Output]:
        """Compare the groups; return the outputs with their groups.

        Raises:
            BlocksDifferError: the groups differ.
        """
        nodes = [node for node in self.phase.module.graph.nodes if node.op not in ("placeholder", "output")]
        *others, last = self._begins(nodes)
        for begins in others:
            try:
                return self._found(nodes, begins)
            except BlocksDifferError:
                self.members, self.by_member = {}, {}
        return self._found(nodes, last)

    def _found(self, nodes: list[Node], begins: dict[int, int]) -> list[Output]:
        """Compare the groups for given starts of their windows."""
        self.segments = self._segments(nodes, begins)
        self.group_at = {node: group for segment in self.segments for node, group in groups_of(segment)}
        for number, segment in enumerate(self.segments):
            for node, group, place in segment.aligned(self._inner(segment), self._key):
                self._enter(node, Member((self.descending, number, place), group))
        for node, slot in self.phase.slot_of().items():
            member = self._input_member(slot)
            if member is not None:
                self._enter(node, member)
        for segment in self.segments:
            found = [self._compare(segment, a, b) for a, b in itertools.pairwise(self.inner)]
            segment.refs = found[0]
            if any(refs != segment.refs for refs in found):
                raise BlocksDifferError("arguments of blocks differ")
        self._check_readers(nodes)
        return self._outputs()

    @cached_property
    def few(self) -> Frame:
        """Frame of the captured groups."""
        return Frame(self.repeats, self.repeats.captured)

    @property
    def inner(self) -> tuple[int, ...]:
        """Groups whose windows must be equal."""
        return self.repeats.captured[1:-1]

    @property
    def behind(self) -> int:
        """The group that follows the missing groups."""
        return self.repeats.captured[TEMPLATE + 1]

    def _enter(self, node: Node, member: Member) -> None:
        self.members[node], self.by_member[member] = member, node

    # --- where groups are ---

    def _begins(self, nodes: list[Node]) -> list[dict[int, int]]:
        """Return candidate starts of windows. Without gathers, backward is cut at reductions inside of groups."""
        begins = window_starts(nodes, self.repeats, is_gathered if self.scheduled else None)
        if begins or not (self.scheduled and self.descending):
            return [begins]
        return [_calls(nodes, self.repeats, behind=behind) for behind in (False, True)]

    def _segments(self, nodes: list[Node], begins: dict[int, int]) -> list[Segment]:
        """Return one segment, or two: forward may end by preparing inputs of backward, last group first."""
        order = in_order(begins, self.repeats, descending=self.descending)
        end = len(nodes)
        if not self.descending and not self.scheduled:
            after = range(begins[order[-1]], len(nodes))
            groups = ((at, group_of(nodes[at], self.repeats)) for at in after)
            end = next((at for at, group in groups if group is not None and group != order[-1]), end)
        found = [Segment.of(nodes[:end], begins, order, [group for group in order if group in self.inner])]
        if end < len(nodes):
            rest = nodes[end:]
            begins, order = window_starts(rest, self.repeats), list(self.repeats.captured[3::-1])
            starts = [begins.get(group, -1) for group in order]
            if starts[0] != 0 or sorted(set(starts)) != starts:
                raise BlocksDifferError("forward does not prepare inputs of backward group by group")
            found.append(Segment.of(rest, begins, order, order[:3]))
        return found

    def _inner(self, segment: Segment) -> list[int]:
        """Return the groups whose windows must be equal, in the order of the segment."""
        return [group for group in segment.order if group in self.inner]

    def _input_member(self, slot: Slot) -> Member | None:
        if slot.kind == "saved" and slot.of is None:
            return self.saved.get(slot.name)
        place = self.repeats.place_of(slot.name)
        return None if place is None else Member(replace(slot, name=place[1]), place[0])

    # --- comparing ---

    def _compare(self, segment: Segment, one: int, other: int) -> list[list[Ref]]:
        """Return the arguments of the nodes of two windows, which must correspond."""
        pairs = zip(segment.window(one), segment.window(other), strict=True)
        return [self._same_node(a, b, one, other) for a, b in pairs]

    def _same_node(self, a: Node, b: Node, one: int, other: int) -> list[Ref]:
        if (a.op, a.target) != (b.op, b.target) or self._facts(a, one) != self._facts(b, other):
            raise BlocksDifferError(f"{a} and {b} differ")
        found: tuple[list[Node], list[Node]] = ([], [])
        texts = [_without_nodes((n.args, n.kwargs), nodes) for n, nodes in zip((a, b), found)]
        if texts[0] != texts[1] or len(found[0]) != len(found[1]):
            raise BlocksDifferError(f"{a} and {b} have different arguments")
        return [self._same_ref(x, y, one, other) for x, y in zip(*found)]

    def _same_ref(self, x: Node, y: Node, one: int, other: int) -> Ref:
        if x is y:
            if x in self.group_at and self.members.get(x, Member("", -1)).group in self.inner:
                raise BlocksDifferError(f"{x} of a block is read in another block")
            return Shared(x)
        if x in self.members and y in self.members:
            (family, group), (other_family, other_group) = self.members[x], self.members[y]
            distance = self._distance(group, one)
            if (family, distance) == (other_family, self._distance(other_group, other)) and abs(distance) <= self._near:
                return Of(family, distance)
        if self._near > 1 and one == TEMPLATE and y in self.members and self._is_outside(x):
            family, group = self.members[y]
            distance = self._distance(group, other)
            if distance == -2:
                return Of(family, distance)
        raise BlocksDifferError(f"{x} and {y} do not correspond")

    @property
    def _near(self) -> int:
        """Largest distance, in groups, to an argument.

        Where parameters arrive in backward, the next group may already be recomputed, from the output of the group two
        away. The first group has no such predecessor.
        """
        return 2 if self.scheduled and self.descending else 1

    def _is_outside(self, node: Node) -> bool:
        """Return whether a node is an input of the phase outside of groups."""
        return node.op == "placeholder" and node not in self.members

    def _distance(self, group: int, window: int) -> int:
        """Return the distance from `window` to `group` in captured groups."""
        order = self.repeats.captured
        return order.index(group) - order.index(window)

    def _facts(self, node: Node, window: int) -> Any:
        """Return the facts about a node that must be the same in all groups."""
        values = [text for key in STACKS for text, *_ in (node.meta.get(key) or {}).values()]
        texts = self.few.relative((*values, *(str(node.meta[key]) for key in TEXTS if key in node.meta)), window)
        marks = sorted(key for key in node.meta if key not in _IGNORED)
        return texts, marks, str(node.meta.get("sizes")), _described(node.meta.get("val"))

    def _check_readers(self, nodes: Iterable[Node]) -> None:
        """Check that only neighboring groups read across the gap where the missing groups go.

        A value of the group before the gap stands for the values of all missing groups.
        """
        for node in nodes:
            reader = self.group_at[node]
            if node in self.members and reader in self.inner:
                continue  # compared
            for source in node.all_input_nodes:
                member = self.members.get(source)
                if member is None or member.group not in (TEMPLATE, self.behind):
                    continue
                if (member.group <= TEMPLATE) != (reader <= TEMPLATE):
                    raise BlocksDifferError(f"{source} of a block is read by {node}")

    # --- outputs ---

    def _outputs(self) -> list[Output]:
        """Return the outputs of the phase, each with its reference relative to its group."""
        found = [
            Output(value, slot, self._output_member(value, slot), None)
            for value, slot in zip(self.phase.results, self.phase.outputs, strict=True)
        ]
        values = {output.member: output.value for output in found if output.member is not None}
        return [output._replace(ref=self._output_ref(output, values)) for output in found]

    def _output_ref(self, output: Output, values: Mapping[Member, Any]) -> Ref | None:
        if output.member is None:
            source = self.members.get(output.value)
            if source is not None and output.value in self.group_at and source.group in (TEMPLATE, self.behind):
                raise BlocksDifferError(f"{output.slot} is made in a block")
            return None
        groups = self.repeats.captured[1:4]
        given = [values.get(Member(output.member.family, group), _MISSING) for group in groups]
        if not any(isinstance(value, Node) for value in given) and all(value is given[0] for value in given):
            return None
        if not all(isinstance(value, Node) for value in given):
            raise BlocksDifferError(f"only some blocks return {output.slot}")
        first, *refs = [self._ref(value, group) for value, group in zip(given, groups)]
        if first is None or any(ref != first for ref in refs):
            raise BlocksDifferError(f"blocks return different {output.slot}")
        return first if self._ref(output.value, output.member.group) == first else None

    def _ref(self, value: Node, group: int) -> Ref | None:
        """Return a value's reference relative to a group; None for a value outside of groups, or far away."""
        member = self.members.get(value)
        if member is None:
            return None if value in self.group_at else Shared(value)
        distance = self._distance(member.group, group)
        return Of(member.family, distance) if abs(distance) <= 2 else None

    def _key(self, node: Node, group: int) -> Hashable:
        """Return a key that is equal for corresponding nodes of different groups."""
        try:
            return node.op, str(node.target), *self._facts(node, group)[:1]
        except BlocksDifferError:
            return node

    def _output_member(self, value: Any, slot: Slot) -> Member | None:
        if slot.kind == "saved" and slot.of is None:
            if slot.name not in self.saved and value in self.group_at and value in self.members:
                self.saved[slot.name] = self.members[value]
            return self.saved.get(slot.name)
        place = None if slot.kind == "output" else self.repeats.place_of(slot.name)
        return None if place is None else Member(replace(slot, name=place[1]), place[0])


def _calls(nodes: list[Node], repeats: Repeats, *, behind: bool) -> dict[int, int]:
    """By group, the last region that is called before its first reduction, or the first one after the group before.

    The latter computes the end of that group and its own begin, of which the last group or the first one may be others.
    """
    launches: dict[int, list[int]] = {}
    for at, node in enumerate(nodes):
        place = repeats.place_of(str(node.meta.get("unit", ""))) if is_collective(node) else None
        if place is not None:
            launches.setdefault(place[0], []).append(at)
    calls = [at for at, node in enumerate(nodes) if node.op == "call_module"]
    begins, last = {}, -1
    for group in sorted(launches, reverse=True):
        before = bisect.bisect_left(calls, launches[group][0]) - 1
        index = bisect.bisect_right(calls, last) if behind else before
        if 0 <= index < len(calls):
            begins[group] = calls[index]
        last = launches[group][-1]
    return begins


def match_blocks(program: Program, repeats: Repeats, params: ParamTable) -> RepeatedBlocks:
    """Check that the captured groups of a partitioned program are equal; return the description of all groups.

    Args:
        params: the parameters of all groups.

    Raises:
        BlocksDifferError: the groups differ.
    """
    if any(map(repeats.place_of, program.rewritten)):
        raise BlocksDifferError("backward writes buffers of blocks")
    saved: dict[str, Member] = {}
    for name, phase in program.phases.items():
        BlockMatcher(phase, repeats, saved, descending=name == "backward").find()
    return RepeatedBlocks(repeats, params, saved)


_MISSING = object()


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
