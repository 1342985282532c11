"""Expand lists of the captured groups to all groups, and back: buckets, events, texts, parts of schedules.

    few     0 | 1 | N-3 | N-2 | N-1             windows of 1, N-3 and N-2 are equal
    all     0 | 1 | 2 ... N-4 | N-3 | N-2 | N-1

A window starts with the first entry of its group. Two windows are equal if their entries differ only in the group. An
entry may name groups up to two away: where the window of 1 names N-3 in the captured list, it names 2 in the full list.
A position may also be the end of the phase. Equal windows determine the windows of all groups; otherwise
`BlocksDifferError` is raised. In backward the order of groups is descending.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from graphshard.ir.repeats import TEMPLATE, BlocksDifferError, Repeats

T = TypeVar("T")

# Fields of entries that hold positions, which shift with the window.
_POSITIONS = ("at", "last", "start")
# Largest distance to a group that an entry names: backward waits for the reductions of the block before the last.
_FAR = 2
# Stands for the end of the phase instead of an offset in the window.
_END = 1 << 60
# Stands for a block in a text: its distance in groups, and its offset in the group.
_MARK = re.compile("\0(-?\\d+):(\\d+)\0")


@dataclass(frozen=True)
class Frame:
    """Positions of groups in a list: of the captured groups, or of all.

    Attributes:
        repeats: the groups.
        groups: the groups in the list, in order.
        begins: first position of each group's window, for entries with positions.
        end: the last position, if entries of any window may have it.
    """

    repeats: Repeats
    groups: Sequence[int]
    begins: Mapping[int, int] = dataclasses.field(default_factory=dict)
    end: int | None = None

    def relative(self, entry: T, window: int) -> T:
        """Return an entry with distances instead of groups; raise `BlocksDifferError` if a named group is far away."""
        begin = self.begins.get(window, 0)
        return moved(entry, lambda text: self._marked(text, window), lambda at: _END if at == self.end else at - begin)

    def absolute(self, entry: T, window: int) -> T:
        """Return the entry of a window, given the entry relative to it."""
        begin = self.begins.get(window, 0)
        return moved(entry, lambda text: self._naming(text)(window), lambda at: self._placed(at, begin))

    def absolutes(self, entry: T) -> Callable[[int], T]:
        """Return a function of the window that does what `absolute` does; for many windows."""
        make = self._made(entry)
        return (lambda _: entry) if make is None else make

    def _made(self, entry: Any) -> Callable[[int], Any] | None:
        """Return `absolutes` of an entry, or None if it is the same in all windows."""
        if isinstance(entry, str):
            return self._naming(entry) if "\0" in entry else None
        if isinstance(entry, tuple):
            parts = [(self._made(each), each) for each in entry]
            if all(make is None for make, _ in parts):
                return None
            return lambda window: tuple(each if make is None else make(window) for make, each in parts)
        if not dataclasses.is_dataclass(entry) or isinstance(entry, type):
            return None
        kind, values = type(entry), {field: getattr(entry, field) for field in _fields(type(entry))}
        at = {name: value for name, value in values.items() if name in _POSITIONS and value is not None and value >= 0}
        found = {name: self._made(value) for name, value in values.items() if name not in at}
        makers = {name: make for name, make in found.items() if make is not None}
        if not makers and not at:
            return None

        def build(window: int) -> Any:
            begin = self.begins.get(window, 0)
            placed = {name: self._placed(value, begin) for name, value in at.items()}
            return kind(**{**values, **placed, **{name: make(window) for name, make in makers.items()}})

        return build

    def _placed(self, at: int, begin: int) -> int:
        return self.end if at == _END and self.end is not None else at + begin

    def _marked(self, text: str, window: int) -> str:
        if self.repeats.path not in text:
            return text
        here = self.groups.index(window)

        def mark(found: re.Match[str]) -> str:
            group, offset = divmod(int(found[1]) - self.repeats.first, self.repeats.period)
            if not 0 <= group < self.repeats.groups:
                return found[0]
            distance = self.groups.index(group) - here if group in self.groups else _FAR + 1
            if abs(distance) > _FAR:
                raise BlocksDifferError(f"{text} names a block that is far away")
            return f"\0{distance}:{offset}\0"

        return _blocks(self.repeats.path).sub(mark, text)

    def _naming(self, text: str) -> Callable[[int], str]:
        """Return a function from a window to the text, given the text relative to it."""
        before, *rest = _MARK.split(text)
        marks = [(int(far), int(of), then) for far, of, then in zip(rest[::3], rest[1::3], rest[2::3])]
        path, first, period = self.repeats.path, self.repeats.first, self.repeats.period

        def name(window: int) -> str:
            here, found = self.groups.index(window), before
            for far, of, then in marks:
                if not 0 <= here + far < len(self.groups):
                    raise BlocksDifferError(f"{text} names no block")
                found += f"{path}.{first + self.groups[here + far] * period + of}{then}"
            return found

        return name

    def named_groups(self, entry: Any) -> set[int]:
        """Return the groups that an entry names."""
        found: set[int] = set()

        def look(text: str) -> str:
            numbers = (int(number) for number in _blocks(self.repeats.path).findall(text))
            places = ((number - self.repeats.first) // self.repeats.period for number in numbers)
            found.update(place for place in places if 0 <= place < self.repeats.groups)
            return text

        moved(entry, look, lambda at: at)
        return found


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
            elif isinstance(part, (str, tuple)) or dataclasses.is_dataclass(part):
                changes[field] = moved(part, name, place)
        value = dataclasses.replace(value, **changes)
    return cast("T", value)


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
        return Frame(self.repeats, self.repeats.captured, self.begins, self.end)

    @functools.cached_property
    def all(self) -> Frame:
        """Frame of all groups."""
        groups = range(self.repeats.groups)
        begins = {group: self.begin(group) for group in groups} if self.begins else {}
        return Frame(self.repeats, groups, begins, None if self.end is None else self.place(self.end))

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
        """The group that follows the missing groups."""
        return self.order[self.order.index(TEMPLATE) + (0 if self.descending else 1)]

    def place(self, at: int) -> int:
        """Return a position outside of the equal windows in the full list."""
        return at + len(self.missing) * self.length if at >= self.begins[self._gap] else at

    def _back(self, at: int) -> int:
        return at - len(self.missing) * self.length if at >= self.begin(self._gap) else at

    def unfold(self, entries: Sequence[T], key: Callable[[T], Any] = lambda entry: entry) -> list[T]:
        """Return the list of all groups.

        Args:
            key: selects the part of an entry that names its group, if entries have no position.
        """
        windows = self._windows(entries, self.few, key)
        inner = {group: [self.few.relative(entry, group) for entry in windows[group]] for group in self.inner}
        template = inner[TEMPLATE]
        if any(window != template for window in inner.values()):
            raise BlocksDifferError(f"blocks differ: {_first_difference(list(inner.values()))}")
        found: list[T] = []
        for group in self.order:
            if group == self._gap:
                makers = [self.all.absolutes(entry) for entry in template]
                found += [make(other) for other in self.missing for make in makers]
            found += self._moved(windows[group], group, self.few, self.all, self.place)
        return found

    def unfold_sums(self, entries: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return the list of all groups for names with numbers that grow by the same amount from group to group.

        Raises:
            BlocksDifferError: the growth is not the same.
        """
        windows = self._windows(entries, self.few, lambda entry: entry)
        numbers = [[number for _, number in windows[group]] for group in self.inner]
        growth = {b - a for one, other in itertools.pairwise(numbers) for a, b in zip(one, other)}
        if len(growth) != 1:
            raise BlocksDifferError("blocks do not add evenly")
        by = growth.pop()
        even = [(name, n - i * by) for i, group in enumerate(self.order) for name, n in windows[group]]
        whole = self._windows(self.unfold(even), self.all, lambda entry: entry)
        return [(name, n + i * by) for i, window in enumerate(whole.values()) for name, n in window]

    def fold(self, entries: Sequence[T], key: Callable[[T], Any] = lambda entry: entry) -> list[T]:
        """Return the captured groups of a full list: the inverse of `unfold` if the groups are equal."""
        windows = self._windows(entries, self.all, key)
        return [e for group in self.order for e in self._moved(windows[group], group, self.all, self.few, self._back)]

    def _moved(
        self, entries: Sequence[T], group: int, one: Frame, other: Frame, place: Callable[[int], int]
    ) -> Iterator[T]:
        """Convert a window to another frame; entries of outer windows may have positions anywhere."""
        if group in self.inner or not self.begins:
            return (other.absolute(one.relative(entry, group), group) for entry in entries)
        names = Frame(self.repeats, one.groups), Frame(self.repeats, other.groups)
        return (moved(names[1].absolute(names[0].relative(entry, group), group), str, place) for entry in entries)

    def spread(self, values: Sequence[T]) -> list[T]:
        """Expand values by position, which are equal in equal windows, to all groups."""
        begins = [self.begins[group] for group in self.inner]
        windows = [list(values[begin : begin + self.length]) for begin in begins]
        if any(window != windows[0] for window in windows):
            raise BlocksDifferError("blocks differ")
        gap = self.begins[self._gap]
        return [*values[:gap], *windows[0] * len(self.missing), *values[gap:]]

    def _windows(self, entries: Sequence[T], frame: Frame, key: Callable[[T], Any]) -> dict[int, Sequence[T]]:
        """Split entries into windows by group; entries before the first window belong to it."""
        order = list(frame.groups)[:: -1 if self.descending else 1]
        if self.begins:
            at = [entry.at for entry in entries]  # type: ignore[attr-defined]
            starts = {group: bisect.bisect_left(at, frame.begins[group]) for group in order}
        else:
            starts = {}
            for index, entry in enumerate(entries):
                named = frame.named_groups(key(entry))
                if named:
                    starts.setdefault(min(named) if self.descending else max(named), index)
        starts[order[0]] = 0
        places = [starts.get(group, -1) for group in order]
        if min(places) < 0 or sorted(places) != places:
            raise BlocksDifferError("blocks do not follow each other")
        ends = [*places[1:], len(entries)]
        return {group: entries[start:end] for group, start, end in zip(order, places, ends)}


def _first_difference(windows: Sequence[Sequence[Any]]) -> str:
    for entries in itertools.zip_longest(*windows):
        if any(entry != entries[0] for entry in entries):
            return " and ".join(map(str, entries))
    return ""


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    """Return the field names of a dataclass."""
    return tuple(field.name for field in dataclasses.fields(kind))


@functools.cache
def _blocks(path: str) -> re.Pattern[str]:
    """Return the pattern of a block of a list of modules in a text."""
    return re.compile(rf"(?<![\w.]){re.escape(path)}\.(\d+)(?!\w)")
