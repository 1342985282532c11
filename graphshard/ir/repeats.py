"""Repeated units of a deep model: equal groups of blocks, of which a few are captured.

    blocks      0 1 2 3 4 5 ...  in groups of two:    0 1 | 2 3 | 4 5 | ...
    captured    0 | 1 |               | N-3 | N-2 | N-1
    all         0 | 1 | 2 ...     N-4 | N-3 | N-2 | N-1         2 ... N-4 are copies of group 1, the template

The way of a deep model:

1. `find_repeats` (`graphshard.repeats`) compares modules, and makes the record that all others read: `Repeats`.
2. The capture traces the captured groups, and checks that all are called alike. `Program.few` holds the record.
3. Passes up to the partition run on the captured groups; `match_blocks` (`instantiate_blocks.py`) checks their graphs.
4. Planners see the problem of all groups, which has few numbers per block (`schedule/template_schedule.py`).
5. The plan is collapsed to the captured groups, and the other passes and the cut into regions run on those.
6. `instantiate_blocks` copies the template's nodes; the plan is the one of all groups.

Whatever is not equal is a `BlocksDifferError`, and every block is captured, or planned, or rewritten.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from graphshard.ir.param_table import ParamTable

# Captured groups: two at the start, three at the end. Backward starts at the end, where one more reduction is in flight
# than later.
CAPTURED = 5
# The group that the missing groups, which follow it, are copies of.
TEMPLATE = 1
# Largest distance to a group that an entry names: backward waits for the reductions of the block before the last.
FAR = 2


class BlocksDifferError(Exception):
    """Blocks that were expected to be equal differ."""


@dataclass(frozen=True)
class Repeats:
    """Run of equal groups of blocks in a list of modules.

    Attributes:
        path: name of the list.
        first: index of the first block.
        period: blocks in a group.
        groups: number of groups.
    """

    path: str
    first: int
    period: int
    groups: int

    @property
    def captured(self) -> tuple[int, ...]:
        """Indices of the captured groups, in order."""
        return 0, 1, self.groups - 3, self.groups - 2, self.groups - 1

    @property
    def missing(self) -> range:
        """Indices of the groups that are not captured."""
        return range(TEMPLATE + 1, self.groups - 3)

    @property
    def left_out(self) -> int:
        """Number of blocks that are not captured."""
        return (self.groups - CAPTURED) * self.period

    def place_of(self, name: str) -> tuple[int, str] | None:
        """Return the group that a name lies in and the name relative to the group; None for a name outside of all."""
        found = re.match(rf"{re.escape(self.path)}\.(\d+)(?=\.|@|$)", name)
        if found is None:
            return None
        group, offset = divmod(int(found[1]) - self.first, self.period)
        return (group, f"{offset}{name[found.end() :]}") if 0 <= group < self.groups else None

    def group_of(self, name: str) -> int | None:
        """Return the group that a name lies in; None for a name outside of all."""
        place = self.place_of(name)
        return None if place is None else place[0]

    def has_left_out(self, name: str) -> bool:
        """Return whether a name lies in a group that is not captured."""
        return self.group_of(name) in self.missing

    def name_at(self, group: int, name: str) -> str:
        """Return the corresponding name in another group; a name outside of all groups stays."""
        here = self.group_of(name)
        everything = range(self.groups)
        return name if here is None else renamed(name, self, everything, here, everything, group)

    def named_groups(self, text: str) -> set[int]:
        """Return the groups that a text names."""
        places = ((int(number) - self.first) // self.period for number in _blocks(self.path).findall(text))
        return {place for place in places if 0 <= place < self.groups}


@functools.cache
def _blocks(path: str) -> re.Pattern[str]:
    """Return the pattern of a block of a list of modules in a text."""
    return re.compile(rf"(?<![\w.]){re.escape(path)}\.(\d+)(?!\w)")


@functools.lru_cache(1 << 16)  # copied nodes name the same modules again and again
def renamed(text: str, repeats: Repeats, source: Sequence[int], at: int, target: Sequence[int], to: int) -> str:
    """Move a text that group `at` of the groups in `source` has to group `to` of those in `target`.

    Each group that it names stays at its distance, counted in `source` and in `target`.

    Raises:
        BlocksDifferError: a named group is far away, or there is none at its distance.
    """
    if repeats.path not in text:
        return text

    def name(found: re.Match[str]) -> str:
        group, offset = divmod(int(found[1]) - repeats.first, repeats.period)
        if not 0 <= group < repeats.groups:
            return found[0]
        distance = source.index(group) - source.index(at) if group in source else FAR + 1
        place = target.index(to) + distance
        if abs(distance) > FAR or not 0 <= place < len(target):
            raise BlocksDifferError(f"{text} names a block that is far away")
        return f"{repeats.path}.{repeats.first + target[place] * repeats.period + offset}"

    return _blocks(repeats.path).sub(name, text)


class Member(NamedTuple):
    """One of the corresponding inputs, nodes or outputs of all groups, which form a family."""

    family: Any
    group: int


@dataclass(frozen=True)
class RepeatedBlocks:
    """All groups of a program whose graphs hold only the captured ones.

    Attributes:
        repeats: the groups.
        params: the parameter table of all groups.
        saved: family and group (`Member`, in files a tuple) of the values that forward saves in a group, by name.
    """

    repeats: Repeats
    params: ParamTable
    saved: Mapping[str, tuple[Any, int]] = field(default_factory=dict)

    def is_of_template(self, name: str, *, saved: bool) -> bool:
        """Return whether a value belongs to the template group.

        Args:
            saved: forward saves it, so its name does not tell the group.
        """
        if saved:
            return name in self.saved and self.saved[name][1] == TEMPLATE
        return self.repeats.group_of(name) == TEMPLATE


def longest_run(keys: Sequence[Hashable], *, longest: int, ends: int = 1) -> tuple[int, int, int]:
    """Return first index, period and number of groups of the longest run of equal groups in a sequence.

    Args:
        longest: the largest period that is looked for.
        ends: number of groups of a run that do not count.
    """
    known: dict[Hashable, int] = {}
    kinds = np.array([known.setdefault(key, len(known)) for key in keys])
    best, most = (0, len(kinds), 1), 0
    for period in range(1, min(longest, len(kinds) // 2) + 1):
        differ = np.flatnonzero(kinds[period:] != kinds[:-period])
        cuts = np.concatenate(([-1], differ, [len(kinds) - period]))
        at = int(np.diff(cuts).argmax())
        first, run = int(cuts[at]) + 1, int(cuts[at + 1] - cuts[at]) - 1
        groups = run // period + 1
        if (groups - ends) * period > most:
            best, most = (first, period, groups), (groups - ends) * period
    return best


def captured_params(params: ParamTable, repeats: Repeats) -> ParamTable:
    """Return the specs of a table, without blocks that are not captured."""
    return ParamTable(tuple(spec for spec in params if not repeats.has_left_out(spec.name)))
