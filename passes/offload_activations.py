"""Copy the values that forward saves for backward to the host, and back before backward reads them.

    forward    %a = mm(%x, %w)        # layers.0            %a = mm(%x, %w)
               %b = relu(%a)                                %b = relu(%a)
               %c = mm(%b, %v)        # layers.1            %h = download(%a)                  layers.0 ends
               return %c as output:0, %a as saved:a         %c = mm(%b, %v)
                                                            return %c as output:0, %h as saved:a   (host)
    backward   %a = saved:a                                 %h = saved:a                           (host)
               %d = mm(%dc, %v)       # layers.1            %u = reload(%h, cuda)              layers.1 begins
               %e = threshold(%d, %a) # layers.0            %d = mm(%dc, %v)
                                                            %a = arrived(%u)
                                                            %e = threshold(%d, %a)

The copies overlap the compute. Copies of a unit start together at its end in forward, and come back together, one unit
ahead: regions are cut only between units, so equal blocks have equal regions. The values made first go first: they are
read last, so they free memory longest and have most time to travel. Values that share memory are offloaded together or
not at all. Values that forward also returns otherwise stay, and so do parameters, which are gathered again.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from graphshard.cost.kernels import num_bytes
from graphshard.errors import PassError
from graphshard.ir.collective_regions import CollectiveRegions, saved_values
from graphshard.ir.graph import base_of, fake, module_of, trace
from graphshard.ir.operators import ARRIVED, DOWNLOAD, RELOAD
from graphshard.ir.program import Phase, Program
from graphshard.ir.units import unit_of
from graphshard.passes.base import Pass


@dataclass(frozen=True)
class OffloadActivations(Pass):
    """Requires: a partitioned program without a plan.  Preserves: every value; some saved values live on the host.

    Attributes:
        share: from 0 to 1, of the bytes of all values that can be offloaded; the values made first are offloaded.
        least: bytes below which a value is not worth a copy.
    """

    name: ClassVar[str] = "offload-activations"
    runs: ClassVar = "before plan"
    share: float = 1.0
    least: int = 1 << 20

    def requires(self, program: Program) -> None:
        super().requires(program)
        if not 0 <= self.share <= 1:
            raise PassError(f"{self.name}: share must be a number from 0 to 1, got {self.share!r}")

    def rewrite(self, program: Program) -> int:
        backward = program.phases.get("backward")
        if backward is None or program.on_host:
            return _reload(backward, program) if backward is not None and "forward" not in program.phases else 0
        forward = program.phases["forward"]
        values = _within(self.share, _candidates(forward, self.least, program.device.type))
        names = dict(zip(forward.results, forward.outputs))
        program.on_host = frozenset(names[value].name for value in values)
        _download(forward, values, program)
        return len(values) + _reload(backward, program)


def _candidates(forward: Phase, least: int, device: str) -> list[list[Node]]:
    """Return the values that can be offloaded, in groups that share memory, in the order in which they are made."""
    groups: dict[Node, list[Node]] = {}
    for node in dict.fromkeys(saved_values(forward)):
        groups.setdefault(base_of(node), []).append(node)
    saved = {node for group in groups.values() for node in group}
    kinds = {fake(node).device.type for node in saved if isinstance(node.meta["val"], torch.Tensor)}
    home = device if len(kinds) > 1 else next(iter(kinds), device)  # predictions are of programs on the meta device
    results = zip(forward.results, forward.outputs)
    others = {base_of(n) for n, s in results if isinstance(n, Node) and (n not in saved or s.kind != "saved")}

    def is_plain(node: Node) -> bool:
        """Return whether a value on the device has static sizes, and strides that a copy keeps."""
        value = node.meta["val"]
        static = isinstance(value, torch.Tensor) and all(isinstance(n, int) for n in (*value.shape, *value.stride()))
        return static and value.device.type == home and torch.empty_like(value).stride() == value.stride()

    plain = [base for base in sorted(groups) if base not in others and all(map(is_plain, groups[base]))]
    return [groups[base] for base in plain if least <= _size(groups[base]) <= num_bytes(base)]


def _size(group: list[Node]) -> int:
    return sum(int(num_bytes(node)) for node in group)


def _within(share: float, groups: list[list[Node]]) -> list[Node]:
    """Return the values of the first groups that fit in a share of the bytes of all."""
    ends = list(itertools.accumulate(map(_size, groups), initial=0))
    room = int(share * ends[-1] + 0.01)
    return [node for group, end in zip(groups, ends[1:]) if end <= room for node in group]


def _download(forward: Phase, values: list[Node], program: Program) -> None:
    """Start copies at the end of the unit of a value, and return the copies instead."""
    graph, starts = forward.module.graph, _unit_starts(CollectiveRegions.of(forward).compute, program)
    copies: dict[Node, Node] = {}
    for value in values:
        place = next((first for first in starts if first > value), graph.output_node())
        copies[value] = trace(place, DOWNLOAD, value, like=value)
    slots = zip(forward.results, forward.outputs)
    forward.set_results([copies.get(n, n) if s.kind == "saved" and isinstance(n, Node) else n for n, s in slots])


def _reload(backward: Phase, program: Program) -> int:
    """Let backward, also of other tangents, reload the values that forward has offloaded; return how many."""
    slots = backward.slot_of().items()
    away = [node for node, slot in slots if slot.kind == "saved" and slot.name in program.on_host]
    _upload(backward, [node for node in away if node.users], program)
    for node in away:
        node.meta["val"] = torch.empty_like(fake(node), device="cpu")
    return len(away)


def _upload(backward: Phase, away: list[Node], program: Program) -> None:
    """Start copies at the start of the unit before the one that reads them; they arrive when that one starts."""
    compute = CollectiveRegions.of(backward).compute
    place = {node: index for index, node in enumerate(compute)}
    starts = [place[first] for first in _unit_starts(compute, program)]
    firsts = {node: min((place[user] for user in node.users if user in place), default=0) for node in away}

    def run_of(node: Node) -> int:
        return sum(start <= firsts[node] for start in starts)

    last: Node | None = None  # the last arrival so far
    for run, group in itertools.groupby(sorted(away, key=lambda node: (run_of(node), firsts[node])), run_of):
        nodes = list(group)
        arrives = compute[min(firsts[node] for node in nodes)]
        begins = compute[starts[run - 2]] if run > 1 else compute[0]
        # An arrival waits for all copies that were started before it: copies for later units start after it.
        users = [list(node.users) for node in nodes]
        start = last.next if last is not None and last > begins else begins
        copies = [trace(start, RELOAD, node, fake(node).device.type, like=node) for node in nodes]
        for node, copy, readers in zip(nodes, copies, users):
            last = trace(arrives, ARRIVED, copy, like=readers[0])
            for user in readers:
                user.replace_input_with(node, last)


def _unit_starts(compute: list[Node], program: Program) -> list[Node]:
    """Return the first node of each unit's run; compute of the root between two units belongs to the first."""
    units = program.params.units
    found: list[Node] = []
    last = ""
    for node in compute:
        unit = unit_of(module_of(node), units)
        if unit and unit != last:
            found.append(node)
            last = unit
    return found
