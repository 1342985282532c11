"""Where the nodes of equal groups of blocks stand in a graph: each group has a window, and they follow each other."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torch.fx import Node

from graphshard.ir.graph import is_backward
from graphshard.ir.program import Phase
from graphshard.ir.repeats import CAPTURED, Repeats, Uneven


def flop_of_all(joint: Phase, repeats: Repeats, flop_of: Callable[[Iterable[Node]], dict[str, Any]]) -> dict[str, Any]:
    """FLOPs by dtype of the joint graph, or the only one, of all blocks.

    Args:
        flop_of: counts those of some nodes.

    Raises:
        Uneven: the groups are not equal.
    """
    nodes = [node for node in joint.module.graph.nodes if node.op not in ("placeholder", "output")]
    total = flop_of(nodes)
    for descending in (False, True):
        part = [node for node in nodes if is_backward(node) == descending]
        if not part:
            continue
        begins = begins_of(part, repeats)
        order = in_order(begins, repeats, descending=descending)
        counts = [flop_of(part[begins[a] : begins[b]]) for a, b in itertools.pairwise(order[1:])]
        if counts[0] != counts[1] or counts[1] != counts[2]:
            raise Uneven("blocks multiply differently")
        for dtype, flop in counts[1].items():
            total[dtype] += flop * (repeats.groups - CAPTURED)
    return total


def begins_of(nodes: Sequence[Node], repeats: Repeats, counts: Callable[[Node], bool] | None = None) -> dict[int, int]:
    """Where the first node of each group stands.

    Args:
        counts: whether a node may be the first one; None is for any.
    """
    begins: dict[int, int] = {}
    for at, node in enumerate(nodes):
        group = group_of(node, repeats) if counts is None or counts(node) else None
        if group is not None:
            begins.setdefault(group, at)
    return begins


def group_of(node: Node, repeats: Repeats) -> int | None:
    """The group whose forward or backward made a node; None for what is in no block."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return next((place[0] for name, *_ in stack.values() if (place := repeats.place_of(name))), None)


def in_order(begins: Mapping[int, int], repeats: Repeats, *, descending: bool) -> list[int]:
    """The captured groups in the order in which they stand.

    Raises:
        Uneven: one is not there, or elsewhere.
    """
    order = [*repeats.captured[:: -1 if descending else 1]]
    starts = [begins.get(group, -1) for group in order]
    if min(starts) < 0 or sorted(set(starts)) != starts:
        raise Uneven("blocks do not follow each other")
    return order


class Member(NamedTuple):
    """One of corresponding inputs, nodes or outputs: of which they are, and of which group."""

    family: Any
    group: int


class Of(NamedTuple):
    """An argument: that of a family, of the group at a distance."""

    family: Any
    distance: int


class Shared(NamedTuple):
    """An argument that is the same in all groups."""

    node: Node


Ref: TypeAlias = Of | Shared


@dataclass
class Segment:
    """Nodes in which each group has one window; the groups follow each other up or down.

    Attributes:
        nodes: in order.
        begins: where the window of each captured group begins among them.
        order: of the groups.
        length: of a window.
        refs: arguments of the nodes of a window.
    """

    nodes: list[Node]
    begins: dict[int, int]
    order: list[int]
    length: int
    refs: list[list[Ref]] = field(default_factory=list)

    @classmethod
    def of(cls, nodes: list[Node], begins: dict[int, int], order: list[int], inner: Sequence[int]) -> Segment:
        """Find the length of windows.

        Args:
            inner: the groups whose windows must be equal, in their order.
        """
        ends = [begins[group] for group in (*inner, order[order.index(inner[-1]) + 1])]
        lengths = {b - a for a, b in itertools.pairwise(ends)}
        if len(lengths) != 1:
            raise Uneven("blocks have different numbers of operators")
        return cls(nodes, begins, order, lengths.pop())

    def window(self, group: int) -> list[Node]:
        """The nodes of a group."""
        return self.nodes[self.begins[group] : self.begins[group] + self.length]

    def aligned(self, inner: Sequence[int], key: Callable[[Node, int], Hashable]) -> Iterator[tuple[Node, int, int]]:
        """Nodes with their groups and places in the window; of the windows beside them those that would be equal.

        Args:
            key: equal for nodes of different groups that correspond.
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
    """Every node with the group in whose window it is, or next to which."""
    ends = [*(segment.begins[group] for group in segment.order[1:]), len(segment.nodes)]
    start = 0
    for group, end in zip(segment.order, ends, strict=True):
        yield from ((node, group) for node in segment.nodes[start:end])
        start = end
