"""Lists of a program of few blocks as those of all blocks, and back: buckets, events, texts, parts of schedules.

    few     head | 0 | 1 | 2 | N-2 | N-1 | tail          the windows of 1, 2 and N-2 are equal
    all     head | 0 | 1 | 2 | 3 ... N-3 | N-2 | N-1 | tail

A window begins with the first entry of its group. Two are equal if their entries are the same but for the group, where
an entry may name its own group and those next to it: what names N-2 in the window of 2 names 3 in the list of all. So
the windows of all groups are known. Anything else raises `Uneven`. Of a backward groups follow each other downwards.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from graphshard.ir.repeats import Repeats, Uneven

T = TypeVar("T")

# Fields of entries that are positions, and shift with their window.
_POSITIONS = ("at", "last", "start")
# What stands for a block in a text: how many groups away it is, and which of the group.
_MARK = re.compile("\0(-?\\d+):(\\d+)\0")


@dataclass(frozen=True)
class Frame:
    """Where groups are: in a list of few, or of all.

    Attributes:
        repeats: the groups.
        groups: those that are there, in order.
        begins: by group, the position at which its window begins; for entries that have positions.
    """

    repeats: Repeats
    groups: Sequence[int]
    begins: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def relative(self, entry: T, window: int) -> T:
        """An entry of a window with distances in the place of groups; raises `Uneven` if one is far away."""
        begin = self.begins.get(window, 0)
        return moved(entry, lambda text: self._marked(text, window), lambda at: at - begin)

    def absolute(self, entry: T, window: int) -> T:
        """The entry of a window that is relative to it."""
        begin = self.begins.get(window, 0)
        return moved(entry, lambda text: self._named(text, window), lambda at: at + begin)

    def _marked(self, text: str, window: int) -> str:
        here = self.groups.index(window)

        def mark(found: re.Match[str]) -> str:
            group, offset = divmod(int(found[1]) - self.repeats.first, self.repeats.period)
            if not 0 <= group < self.repeats.groups:
                return found[0]
            distance = self.groups.index(group) - here if group in self.groups else 2
            if abs(distance) > 1:
                raise Uneven(f"{text} is far from its block")
            return f"\0{distance}:{offset}\0"

        return _blocks(self.repeats.path).sub(mark, text)

    def _named(self, text: str, window: int) -> str:
        here = self.groups.index(window)

        def name(found: re.Match[str]) -> str:
            group = self.groups[here + int(found[1])]
            return f"{self.repeats.path}.{self.repeats.first + group * self.repeats.period + int(found[2])}"

        return _MARK.sub(name, text) if "\0" in text else text

    def named_groups(self, entry: Any) -> set[int]:
        """The groups that an entry names."""
        found: set[int] = set()

        def look(text: str) -> str:
            numbers = (int(number) for number in _blocks(self.repeats.path).findall(text))
            places = ((number - self.repeats.first) // self.repeats.period for number in numbers)
            found.update(place for place in places if 0 <= place < self.repeats.groups)
            return text

        moved(entry, look, lambda at: at)
        return found


def moved(entry: T, name: Callable[[str], str], place: Callable[[int], int]) -> T:
    """An entry with other texts and positions: a text, a tuple, or a dataclass of such."""
    value: Any = entry
    if isinstance(value, str):
        value = name(value)
    elif isinstance(value, tuple):
        value = tuple(moved(each, name, place) for each in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            if field.name in _POSITIONS and part is not None and part >= 0:
                changes[field.name] = place(part)
            elif isinstance(part, (str, tuple)) or dataclasses.is_dataclass(part):
                changes[field.name] = moved(part, name, place)
        value = dataclasses.replace(value, **changes)
    return cast("T", value)


@dataclass(frozen=True)
class Unfolding:
    """From the lists of few groups to those of all, and back.

    Attributes:
        repeats: the groups.
        descending: they follow each other from the last to the first.
        begins: of the captured groups, the position of each; empty where entries have no positions.
    """

    repeats: Repeats
    descending: bool
    begins: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def few(self) -> Frame:
        """The captured groups."""
        return Frame(self.repeats, self.repeats.captured, self.begins)

    @functools.cached_property
    def all(self) -> Frame:
        """All groups."""
        groups = range(self.repeats.groups)
        return Frame(self.repeats, groups, {group: self.begin(group) for group in groups} if self.begins else {})

    @property
    def inner(self) -> tuple[int, ...]:
        """The groups whose windows are equal, in order."""
        groups = self.repeats.captured[1:4]
        return groups[::-1] if self.descending else groups

    @property
    def length(self) -> int:
        """Positions of a window.

        Raises:
            Uneven: windows are not equally long.
        """
        order = [*self.inner, 0 if self.descending else self.repeats.captured[4]]
        found = {self.begins[b] - self.begins[a] for a, b in itertools.pairwise(order)}
        if len(found) != 1:
            raise Uneven("blocks are not equally long")
        return found.pop()

    def begin(self, group: int) -> int:
        """Where the window of any group begins in the list of all."""
        first = self.inner[0]
        before = first - group if self.descending else group - first
        if before < 0 or group in (0, self.repeats.groups - 1):
            return self.place(self.begins[group])
        return self.begins[first] + before * self.length

    def place(self, at: int) -> int:
        """A position outside of the equal windows in the list of all."""
        behind = at >= self.begins[self.inner[-1]]
        return at + len(self.repeats.missing) * self.length if behind else at

    def unfold(self, entries: Sequence[T], owner: Callable[[T], int | None]) -> list[T]:
        """The list of all groups.

        Args:
            owner: the group of an entry; None for what may be in any window.
        """
        head, windows, tail = self._cut(entries, owner, self.few)
        found = [[self.few.relative(entry, group) for entry in window] for group, window in windows.items()]
        if any(window != found[0] for window in found):
            raise Uneven(f"blocks differ: {_first_difference(found)}")
        groups: Sequence[int] = range(1, self.repeats.groups - 1)
        copies = [self.all.absolute(e, g) for g in (reversed(groups) if self.descending else groups) for e in found[0]]
        return [*map(self._outer, head), *copies, *map(self._outer, tail)]

    def spread(self, values: Sequence[T]) -> list[T]:
        """Values by position, those of equal windows equal, of all groups."""
        begins = [self.begins[group] for group in self.inner]
        windows = [list(values[begin : begin + self.length]) for begin in begins]
        if any(window != windows[0] for window in windows):
            raise Uneven("blocks differ")
        return [*values[: begins[0]], *windows[0] * (self.repeats.groups - 2), *values[begins[-1] + self.length :]]

    def fold(self, entries: Sequence[T], owner: Callable[[T], int | None]) -> list[T]:
        """The list of few groups of one of all, which `unfold` makes of it again."""
        head, windows, tail = self._cut(entries, owner, self.all)
        inner = [
            self.few.absolute(self.all.relative(entry, group), group)
            for group, window in windows.items()
            for entry in window
        ]
        back = self._back if self.begins else lambda at: at
        before, behind = ([moved(entry, str, back) for entry in part] for part in (head, tail))
        return [*before, *inner, *behind]

    def _back(self, at: int) -> int:
        behind = at >= self.begin(self.inner[-1])
        return at - len(self.repeats.missing) * self.length if behind else at

    def _outer(self, entry: T) -> T:
        return moved(entry, str, self.place) if self.begins else entry

    def _cut(
        self, entries: Sequence[T], owner: Callable[[T], int | None], frame: Frame
    ) -> tuple[Sequence[T], dict[int, Sequence[T]], Sequence[T]]:
        """What is before the equal windows, these, and what is behind them."""
        starts: dict[int, int] = {}
        for index, entry in enumerate(entries):
            group = owner(entry)
            if group is not None:
                starts.setdefault(group, index)
        order = list(frame.groups)[:: -1 if self.descending else 1]
        places = [starts.get(group, -1) for group in order]
        if min(places) < 0 or sorted(set(places)) != places:
            raise Uneven("blocks do not follow each other")
        ends = dict(zip(order, places[1:]))
        windows = {group: entries[starts[group] : ends[group]] for group in self.inner}
        head, tail = entries[: places[1]], entries[places[-1] :]
        near = self.repeats.captured[3:] if self.descending else self.repeats.captured[:3]
        far = self.repeats.captured[:3] if self.descending else self.repeats.captured[3:]
        for part, allowed in ((head, near), (tail, far)):
            for entry in part:
                if not frame.named_groups(entry) <= set(allowed):
                    raise Uneven(f"{entry} names blocks elsewhere")
        return head, windows, tail


def owner_by_name(frame: Frame, *, descending: bool) -> Callable[[Any], int | None]:
    """The group that an entry names; of several the one whose window is the last to begin."""

    def owner(entry: Any) -> int | None:
        found = frame.named_groups(entry)
        return (min(found) if descending else max(found)) if found else None

    return owner


def owner_by_place(frame: Frame) -> Callable[[Any], int | None]:
    """The group in whose window an entry is that has a position `at`; None for what comes before them all."""
    begins, groups = zip(*sorted((begin, group) for group, begin in frame.begins.items()))

    def owner(entry: Any) -> int | None:
        index = bisect.bisect_right(begins, entry.at) - 1
        return groups[index] if index >= 0 else None

    return owner


def _first_difference(windows: Sequence[Sequence[Any]]) -> str:
    for entries in itertools.zip_longest(*windows):
        if any(entry != entries[0] for entry in entries):
            return " and ".join(map(str, entries))
    return ""


@functools.cache
def _blocks(path: str) -> re.Pattern[str]:
    """Blocks of a list of modules in a text."""
    return re.compile(rf"(?<![\w.]){re.escape(path)}\.(\d+)(?!\w)")
