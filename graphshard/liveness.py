"""Which gathered parameters are alive at the same time, read off a scheduled graph."""

from __future__ import annotations

from torch.fx import Node

from graphshard.graph import Layout, base_of, collectives, is_communication
from graphshard.params import ParamTable
from graphshard.program import Phase


def peak_gathered(phase: Phase, params: ParamTable) -> tuple[str, ...]:
    """Units whose gathered parameters are alive at once, at the point where they are most.

    A unit is alive from the start of its gather to the last use of what was gathered, its copies and its views.
    """
    position = {node: i for i, node in enumerate(phase.module.graph.nodes)}
    layout = Layout.of(phase)
    intervals = []
    for collective in collectives(phase):
        if collective.kind == "gather":
            landed = {n for wait in collective.waits for n in (wait, *layout.after[wait])}
            end = max(position[n] for value in _aliases(landed) for n in (value, *value.users))
            intervals.append((position[collective.node], end, params[collective.params[0]].unit))
    alive = [
        tuple(dict.fromkeys(unit for start, end, unit in intervals if start <= point <= end))
        for point, _, _ in intervals
    ]
    return max(alive, key=len, default=())


def _aliases(values: set[Node]) -> set[Node]:
    """The values and all views of them."""
    found, stack = set(values), list(values)
    while stack:
        for user in stack.pop().users:
            if user not in found and not is_communication(user) and base_of(user) is not user:
                found.add(user)
                stack.append(user)
    return found
