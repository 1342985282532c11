"""Which gathered parameters are alive at the same time, read off a scheduled graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Node

from graphshard.ir.graph import base_of, fake, is_communication
from graphshard.ir.layout import Collective, Layout, collectives
from graphshard.ir.params import ParamTable
from graphshard.ir.program import Phase


@dataclass(frozen=True)
class _Gathered:
    """A gather, the position at which it starts, and the last use and the bytes of each tensor it brings."""

    collective: Collective
    start: int
    tensors: list[tuple[int, int]]

    @property
    def end(self) -> int:
        return max(end for end, _ in self.tensors)


def units_gathered(phase: Phase, params: ParamTable) -> list[tuple[str, tuple[str, ...]]]:
    """The unit of each gather, and those whose gathered parameters are alive at once where it starts.

    A unit is alive from the start of its gather to the last use of what was gathered, its copies and its views.
    """
    found = [(params[gathered.collective.params[0]].unit, gathered) for gathered in _gathered(phase)]
    return [
        (unit, tuple(dict.fromkeys(other for other, g in found if g.start <= at.start <= g.end))) for unit, at in found
    ]


def peak_gathered_bytes(phase: Phase) -> tuple[Node | None, int]:
    """Bytes of gathered tensors that are alive at once, where they are most, and the gather that starts there.

    A tensor of a coalesced gather is alive to its own last use, a packed buffer to that of any of its parts.
    """
    found = _gathered(phase)
    alive = [
        (at.collective.node, sum(size for g in found for end, size in g.tensors if g.start <= at.start <= end))
        for at in found
    ]
    return max(alive, key=lambda pair: pair[1], default=(None, 0))


def last_use(waits: Iterable[Node], layout: Layout, position: dict[Node, int]) -> int:
    """The last position at which something reads what was gathered, or a view of it; nodes without one are skipped."""
    landed = {n for wait in waits for n in (wait, *layout.after[wait])}
    users = (n for value in _aliases(landed) for n in (value, *value.users))
    return max((position[n] for n in users if n in position), default=-1)


def _gathered(phase: Phase) -> list[_Gathered]:
    position = {node: i for i, node in enumerate(phase.module.graph.nodes)}
    layout = Layout.of(phase)
    gathers = [c for c in collectives(phase) if c.kind == "gather"]
    return [
        _Gathered(c, position[c.node], [(last_use([w], layout, position), fake(w).nbytes) for w in c.waits])
        for c in gathers
    ]


def _aliases(values: set[Node]) -> set[Node]:
    """The values and all views of them."""
    found, stack = set(values), list(values)
    while stack:
        for user in stack.pop().users:
            if user not in found and not is_communication(user) and base_of(user) is not user:
                found.add(user)
                stack.append(user)
    return found
