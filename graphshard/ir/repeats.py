"""Equal groups of blocks that follow each other, of which a few are captured.

blocks 0 1 2 3 4 5 ... in groups of two:    0 1 | 2 3 | 4 5 | ...
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphshard.ir.param_table import ParamTable

# Groups that are captured: two at the begin, three at the end. Backward begins with those at the end, and of what it
# reduces there one more is under way than later.
CAPTURED = 5
# The group that those left out are copies of, which is in front of them.
TEMPLATE = 1


class BlocksDifferError(Exception):
    """A program whose blocks are not equal."""


@dataclass(frozen=True)
class Repeats:
    """Equal groups of blocks in a list of modules.

    Attributes:
        path: name of the list.
        first: index of the first block.
        period: blocks in a group.
        groups: how many groups follow each other.
    """

    path: str
    first: int
    period: int
    groups: int

    @property
    def captured(self) -> tuple[int, ...]:
        """The groups that are captured, in order."""
        return 0, 1, self.groups - 3, self.groups - 2, self.groups - 1

    @property
    def missing(self) -> range:
        """The groups that are not."""
        return range(TEMPLATE + 1, self.groups - 3)

    def is_captured(self, group: int) -> bool:
        """Whether a group is among those that are captured."""
        return group not in self.missing

    @property
    def left_out(self) -> int:
        """Blocks that need not be captured."""
        return (self.groups - CAPTURED) * self.period

    def place_of(self, name: str) -> tuple[int, str] | None:
        """The group of what is in a block, and its name relative to the group; None for what is in none."""
        found = re.match(rf"{re.escape(self.path)}\.(\d+)(?=\.|@|$)", name)
        if found is None:
            return None
        group, offset = divmod(int(found[1]) - self.first, self.period)
        return (group, f"{offset}{name[found.end() :]}") if 0 <= group < self.groups else None

    def name_at(self, group: int, name: str) -> str:
        """What is in another group where `name` is in its own; what is in none keeps its name."""
        return _name_at(self, group, name)

    def has_left_out(self, name: str) -> bool:
        """Whether it is in a group that is not captured."""
        place = self.place_of(name)
        return place is not None and not self.is_captured(place[0])


@functools.lru_cache(1 << 16)  # copies of nodes are in the same modules again and again
def _name_at(repeats: Repeats, group: int, name: str) -> str:
    place = repeats.place_of(name)
    if place is None:
        return name
    offset, rest = re.match(r"(\d+)(.*)", place[1]).groups()  # type: ignore[union-attr]
    return f"{repeats.path}.{repeats.first + group * repeats.period + int(offset)}{rest}"


@dataclass(frozen=True)
class RepeatedBlocks:
    """What a program whose graphs have few of many equal groups says of all of them.

    Attributes:
        repeats: the groups.
        params: the parameter table of all.
        saved: what forward saves of groups, by name: what it is, and of which group.
    """

    repeats: Repeats
    params: ParamTable
    saved: Mapping[str, tuple[Any, int]]

    def is_of_template(self, name: str, *, saved: bool) -> bool:
        """Whether a value is of the group that the others are copies of.

        Args:
            saved: it is what forward saves, and its name says of no group.
        """
        found = self.saved.get(name, ("", -1))[::-1] if saved else self.repeats.place_of(name)
        return found is not None and found[0] == TEMPLATE


def captured_params(params: ParamTable, repeats: Repeats) -> ParamTable:
    """The rows of a table that are not of blocks that were left out."""
    return ParamTable(tuple(row for row in params if not repeats.has_left_out(row.name)))
