"""Windows of the groups of repeated blocks, in graphs and in lists, and the expansion of lists to all groups.

    few     0 | 1 | N-3 | N-2 | N-1             windows of 1, N-3 and N-2 are equal
    all     0 | 1 | 2 ... N-4 | N-3 | N-2 | N-1

A window starts with the first node or entry of its group; in backward the order of groups is descending. Lists are
buckets, events, transfers, or lines of text. Two of their windows are equal if entries differ only in the group. An
entry may name groups up to two away: where the window of 1 names N-3 in the captured list, it names 2 in the full list.
A position may also be the end of the phase.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from torch.fx import Node

from graphshard.ir.graph import is_collective
from graphshard.ir.repeats import TEMPLATE, BlocksDifferError, Repeats, renamed

T = TypeVar("T")

# Fields of entries that hold positions, which shift with the window.
_POSITIONS = ("at", "last", "start")


# --- graphs ------------------------------------------------------------------------------------------------------


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
    return next((group for name, *_ in stack.values() if (group := repeats.group_of(name)) is not None), None)


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


class Of(NamedTuple):
    """Reference to the member of a family in the group `distance` groups away."""

    family: Any
    distance: int


@dataclass
class Segment:
    """Run of nodes with one window for each group, in ascending or descending order of groups.

    Attributes:
        nodes: the run.
        begins: first position of each captured group's window.
        order: the groups in the order of their windows.
        inner: the groups of these whose windows must be equal.
        refs: arguments of each node of a window.
    """

    nodes: list[Node]
    begins: dict[int, int]
    order: list[int]
    inner: list[int]
    refs: list[list[Of | Node]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        ends = [self.begins[group] for group in (*self.inner, self.order[self.order.index(self.inner[-1]) + 1])]
        lengths = {b - a for a, b in itertools.pairwise(ends)}
        if len(lengths) != 1:
            raise BlocksDifferError("blocks have different numbers of operators")
        self.length = lengths.pop()

    def window(self, group: int) -> list[Node]:
        """Return the nodes of a group."""
        return self.nodes[self.begins[group] : self.begins[group] + self.length]

    def groups(self) -> Iterator[tuple[Node, int]]:
        """Yield every node with the group whose window it is in or next to."""
        ends = [*(self.begins[group] for group in self.order[1:]), len(self.nodes)]
        start = 0
        for group, end in zip(self.order, ends, strict=True):
            yield from ((node, group) for node in self.nodes[start:end])
            start = end


def calls_at_reductions(nodes: list[Node], repeats: Repeats, *, behind: bool) -> dict[int, int]:
    """By group, the last region that is called before its first reduction, or the first one after the group before.

    The latter computes the end of that group and its own begin, of which the last group or the first one may be others.
    """
    launches: dict[int, list[int]] = {}
    for at, node in enumerate(nodes):
        group = repeats.group_of(str(node.meta.get("unit", ""))) if is_collective(node) else None
        if group is not None:
            launches.setdefault(group, []).append(at)
    calls = [at for at, node in enumerate(nodes) if node.op == "call_module"]
    begins, last = {}, -1
    for group in sorted(launches, reverse=True):
        before = bisect.bisect_left(calls, launches[group][0]) - 1
        index = bisect.bisect_right(calls, last) if behind else before
        if 0 <= index < len(calls):
            begins[group] = calls[index]
        last = launches[group][-1]
    return begins


# --- lists -------------------------------------------------------------------------------------------------------


def moved(entry: T, name: Callable[[str], str], place: Callable[[int], int]) -> T:
    """Map the texts and positions in an entry, which is a text, a tuple, or a dataclass of those."""
    value: Any = entry
    if isinstance(value, str):
        value = name(value)
    elif isinstance(value, tuple):
        value = tuple(moved(each, name, place) for each in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes: dict[str, Any] = {}
        for field in _fields(type(value)):
            part = getattr(value, field)
            if field in _POSITIONS and part is not None and part >= 0:
                changes[field] = place(part)
            elif isinstance(part, (str, tuple)):
                changes[field] = moved(part, name, place)
        value = dataclasses.replace(value, **changes)
    return cast("T", value)


def named_groups(entry: Any, repeats: Repeats) -> set[int]:
    """Return the groups that an entry names."""
    found: set[int] = set()

    def look(text: str) -> str:
        found.update(repeats.named_groups(text))
        return text

    moved(entry, look, int)
    return found


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    """Return the field names of a dataclass."""
    return tuple(field.name for field in dataclasses.fields(kind))


class Frame(NamedTuple):
    """Groups of a list in ascending order, the first position of each one's window, and the last position of all."""

    groups: Sequence[int]
    begins: Mapping[int, int]
    end: int | None


@dataclass(frozen=True)
class RepeatExpansion:
    """Conversion between lists of the captured groups and lists of all groups.

    Attributes:
        repeats: the groups.
        descending: the last group comes first.
        begins: first position of each captured group; empty if entries have no positions.
        ends: number of groups at the end whose windows differ from the others.
        end: the last position of the captured list, if entries of any window may have it.
    """

    repeats: Repeats
    descending: bool
    begins: Mapping[int, int] = dataclasses.field(default_factory=dict)
    ends: int = 1
    end: int | None = None

    @functools.cached_property
    def few(self) -> Frame:
        """Frame of the captured groups."""
        return Frame(self.repeats.captured, self.begins, self.end)

    @functools.cached_property
    def all(self) -> Frame:
        """Frame of all groups."""
        groups = range(self.repeats.groups)
        begins = {group: self.begin(group) for group in groups} if self.begins else {}
        return Frame(groups, begins, None if self.end is None else self.place(self.end))

    @property
    def order(self) -> tuple[int, ...]:
        """Captured groups in the order of the list."""
        return self.repeats.captured[:: -1 if self.descending else 1]

    @property
    def missing(self) -> Sequence[int]:
        """Missing groups in the order of the list."""
        return self.repeats.missing[:: -1 if self.descending else 1]

    @property
    def inner(self) -> tuple[int, ...]:
        """Groups whose windows must be equal, in order."""
        return tuple(group for group in self.order if group in self.repeats.captured[1 : -self.ends])

    @functools.cached_property
    def length(self) -> int:
        """Number of positions in a window.

        Raises:
            BlocksDifferError: windows differ in length.
        """
        found = {self.begins[b] - self.begins[a] for a, b in itertools.pairwise(self.order[1:])}
        if len(found) != 1:
            raise BlocksDifferError("blocks differ in length")
        return found.pop()

    def begin(self, group: int) -> int:
        """Return the first position of any group's window in the full list."""
        if group in (0, self.repeats.groups - 1):
            return self.place(self.begins[group])
        first = self.order[1]
        return self.begins[first] + abs(group - first) * self.length

    @property
    def _gap(self) -> int:
        """The captured group that follows the missing groups."""
        return self.order[self.order.index(TEMPLATE) + (0 if self.descending else 1)]

    def place(self, at: int) -> int:
        """Return a position outside of the equal windows in the full list."""
        return at + len(self.missing) * self.length if at >= self.begins[self._gap] else at

    def unfold(self, entries: Sequence[T], key: Callable[[T], Any] = lambda entry: entry) -> list[T]:
        """Return the list of all groups.

        Args:
            key: selects the part of an entry that has its position, or names its group if entries have no position.
        """
        windows = self._windows(entries, self.few, key)
        template = self._template(windows)
        found: list[T] = []
        for group in self.order:
            if group == self._gap:
                for other in self.missing:
                    found += self._moved(template, self.few, TEMPLATE, self.all, other)
            found += self._moved(windows[group], self.few, group, self.all, group)
        return found

    def fold(self, entries: Sequence[T], key: Callable[[T], Any] = lambda entry: entry) -> list[T]:
        """Return the captured groups of a full list: the inverse of `unfold` if the groups are equal."""
        windows = self._windows(entries, self.all, key)
        return [e for group in self.order for e in self._moved(windows[group], self.all, group, self.few, group)]

    def spread(self, values: Sequence[T]) -> list[T]:
        """Expand values by position, which are equal in equal windows, to all groups."""
        begins = [self.begins[group] for group in self.inner]
        windows = [list(values[begin : begin + self.length]) for begin in begins]
        if any(window != windows[0] for window in windows):
            raise BlocksDifferError("blocks differ")
        gap = self.begins[self._gap]
        return [*values[:gap], *windows[0] * len(self.missing), *values[gap:]]

    def _template(self, windows: Mapping[int, Sequence[T]]) -> Sequence[T]:
        """Return the window of the template, which those of the inner groups must equal."""
        template = list(windows[TEMPLATE])
        for group in self.inner:
            window = self._moved(windows[group], self.few, group, self.few, TEMPLATE)
            if window != template:
                different = next(pair for pair in itertools.zip_longest(template, window) if pair[0] != pair[1])
                raise BlocksDifferError("blocks differ: {} and {}".format(*different))
        return template

    def _moved(self, entries: Sequence[T], source: Frame, at: int, target: Frame, to: int) -> list[T]:
        """Move a window to a group of another frame; entries of outer windows may have positions anywhere."""
        is_inner, gap = at in self.inner, self._gap

        def name(text: str) -> str:
            return renamed(text, self.repeats, source.groups, at, target.groups, to)

        def place(position: int) -> int:
            if not source.begins:
                return position
            if not is_inner:
                return position if position < source.begins[gap] else position - source.begins[gap] + target.begins[gap]
            if position == source.end and target.end is not None:
                return target.end
            return position - source.begins[at] + target.begins[to]

        return [moved(entry, name, place) for entry in entries]

    def _windows(self, entries: Sequence[T], frame: Frame, key: Callable[[T], Any]) -> dict[int, Sequence[T]]:
        """Split entries into windows by group; entries before the first window belong to it."""
        order = frame.groups[:: -1 if self.descending else 1]
        starts: dict[int, int] = {}
        if self.begins:
            at = [key(entry).at for entry in entries]
            starts = {group: bisect.bisect_left(at, frame.begins[group]) for group in order}
        else:
            for index, entry in enumerate(entries):
                named = named_groups(key(entry), self.repeats)
                if named:
                    starts.setdefault(min(named) if self.descending else max(named), index)
        starts[order[0]] = 0
        places = [starts.get(group, -1) for group in order]
        if min(places) < 0 or sorted(places) != places:
            raise BlocksDifferError("blocks do not follow each other")
        ends = [*places[1:], len(entries)]
        return {group: entries[start:end] for group, start, end in zip(order, places, ends)}
