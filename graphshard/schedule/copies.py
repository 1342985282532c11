"""When values that forward saves are copied to the host and back, beside the compute of a phase.

    to the host     a0..a0 a1..a1         launched where a unit ends; the value is held until its copy has ended
    compute         item | item | wait item
    from the host          a1..a1         launched where the unit before begins, behind all copies to the host

Collectives that hold compute up give copies more time, and are not counted: waits are no shorter than predicted here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from graphshard.cost.costs import Costs
from graphshard.cost.kernels import num_bytes
from graphshard.ir.collective_regions import CollectiveRegions
from graphshard.ir.operators import ARRIVED, COPIES, DOWNLOAD, RELOAD


@dataclass(frozen=True)
class Copied:
    """What the copies of a phase cost.

    Attributes:
        waits: by item the seconds that compute waits for copies from the host before it.
        beside: by item the bytes of what an earlier phase has left.
        until: by the node that starts a copy to the host, the last position at which the value is held for it.
        left: copies that have not ended when the phase has: bytes, and seconds from then on.
    """

    waits: tuple[float, ...]
    beside: tuple[int, ...]
    until: Mapping[Node, int] = field(default_factory=dict)
    left: tuple[tuple[int, float], ...] = ()


def copy_positions(layout: CollectiveRegions) -> list[int]:
    """Where copies are launched or waited for, the first of those that stand together."""
    compute = layout.compute
    return [at for at in _copies(compute) if at == 0 or compute[at - 1].target not in COPIES]


def copied(
    layout: CollectiveRegions,
    cuts: Sequence[int],
    seconds: Sequence[float],
    costs: Costs,
    left: Sequence[tuple[int, float]] = (),
) -> Copied:
    """Run the copies of a phase beside its compute.

    Args:
        cuts: positions at which items begin, those of `copy_positions` among them, and the end of the phase.
        seconds: of the items.
        left: copies that an earlier phase has left, see `Copied`.
    """
    if not _copies(layout.compute) and not left:
        return Copied((0.0,) * len(seconds), (0,) * len(seconds))
    now, up = 0.0, 0.0
    down = max((end for _, end in left), default=0.0)
    ends: dict[Node, float] = {}
    waits, begins = [], []
    for (start, end), taken in zip(itertools.pairwise(cuts), seconds):
        wait = 0.0
        for node in layout.compute[start:end]:
            if node.target is DOWNLOAD:
                ends[node] = down = max(now + wait, down) + float(costs.host_copy(num_bytes(node)))
            elif node.target is RELOAD:
                ends[node] = up = max(now + wait, up, down) + float(costs.host_copy(num_bytes(node)))
            elif node.target is ARRIVED and node.all_input_nodes[0] in ends:
                wait = max(wait, ends[node.all_input_nodes[0]] - now)
        waits.append(wait)
        begins.append(now + wait)
        now += wait + taken
    begins.append(now)
    until = {}
    for node in (node for node in ends if node.target is DOWNLOAD):
        item = sum(begin < ends[node] for begin in begins[:-1]) - 1
        until[node] = cuts[max(item, 0) + 1] - 1
    rest = tuple((int(num_bytes(n)), end - now) for n, end in ends.items() if n.target is DOWNLOAD and end > now)
    beside = tuple(sum(size for size, end in left if end > begin) for begin in begins[:-1])
    return Copied(tuple(waits), beside, until, rest)


def _copies(compute: Sequence[Node]) -> list[int]:
    """Positions of copies of values that forward saves; those of parameters have an upload of their own."""
    return [
        at
        for at, node in enumerate(compute)
        if node.target in (DOWNLOAD, RELOAD) or (node.target is ARRIVED and node.all_input_nodes[0].target is RELOAD)
    ]
