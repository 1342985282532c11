"""Runs of equal blocks, of which only a few groups are captured.

blocks 0 1 2 3 4 5 ... in groups of two:    0 1 | 2 3 | 4 5 | ...
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphshard.ir.param_table import ParamTable

# Captured groups: two at the start, three at the end. Backward starts at the end, where one more reduction is in flight
# than later.
CAPTURED = 5
# The group that the missing groups, which follow it, are copies of.
TEMPLATE = 1


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

    def is_captured(self, group: int) -> bool:
        """Return whether a group is captured."""
        return group not in self.missing

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

    def name_at(self, group: int, name: str) -> str:
        """Return the corresponding name in another group; a name outside of all groups stays."""
        return _name_at(self, group, name)

    def has_left_out(self, name: str) -> bool:
        """Return whether a name lies in a group that is not captured."""
        place = self.place_of(name)
        return place is not None and not self.is_captured(place[0])


@functools.lru_cache(1 << 16)  # copied nodes name the same modules again and again
def _name_at(repeats: Repeats, group: int, name: str) -> str:
    place = repeats.place_of(name)
    if place is None:
        return name
    offset, rest = re.match(r"(\d+)(.*)", place[1]).groups()  # type: ignore[union-attr]
    return f"{repeats.path}.{repeats.first + group * repeats.period + int(offset)}{rest}"


@dataclass(frozen=True)
class RepeatedBlocks:
    """All groups of a program whose graphs hold only the captured ones.

    Attributes:
        repeats: the groups.
        params: the parameter table of all groups.
        saved: values that forward saves in a group, by name: their family and group.
    """

    repeats: Repeats
    params: ParamTable
    saved: Mapping[str, tuple[Any, int]]

    def is_of_template(self, name: str, *, saved: bool) -> bool:
        """Return whether a value belongs to the template group.

        Args:
            saved: forward saves it, so its name does not tell the group.
        """
        found = self.saved.get(name, ("", -1))[::-1] if saved else self.repeats.place_of(name)
        return found is not None and found[0] == TEMPLATE


def captured_params(params: ParamTable, repeats: Repeats) -> ParamTable:
    """Return the specs of a table, without blocks that are not captured."""
    return ParamTable(tuple(spec for spec in params if not repeats.has_left_out(spec.name)))
