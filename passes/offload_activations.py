"""Copy what forward saves for backward to the host, and back before backward reads it.

    forward    %a = mm(%x, %w)        # layers.0            %a = mm(%x, %w)
               %b = relu(%a)                                %b = relu(%a)
               %c = mm(%b, %v)        # layers.1            %h = download(%a)                  layers.0 is done
               return %c as output:0, %a as saved:a         %c = mm(%b, %v)
                                                            return %c as output:0, %h as saved:a   (host)
    backward   %a = saved:a                                 %h = saved:a                           (host)
               %d = mm(%dc, %v)       # layers.1            %u = reload(%h, cuda)              layers.1 begins
               %e = threshold(%d, %a) # layers.0            %d = mm(%dc, %v)
                                                            %a = arrived(%u)
                                                            %e = threshold(%d, %a)

The copies run beside the compute. Those of a unit go together, where it ends in forward, and come back together, one
unit ahead: regions are cut only where units meet, so equal blocks have equal regions. What is made first is read last:
it stays away the longest and has most time to travel, so that goes first. Of values that share memory all go, or none;
what forward returns to others as well stays. So do parameters, which are gathered again.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from graphshard.cost.kernels import num_bytes
from graphshard.errors import PassError
from graphshard.ir.graph import base_of, emit, fake, module_of
from graphshard.ir.layout import Layout, saved_values
from graphshard.ir.operators import ARRIVED, DOWNLOAD, RELOAD
from graphshard.ir.program import Phase, Program
from graphshard.ir.units import unit_of
from graphshard.passes.base import Pass


@dataclass(frozen=True)
class OffloadActivations(Pass):
    """Requires: a partitioned program without a plan.  Preserves: every value; some of what is saved lives on the host.

    Attributes:
        share: of the bytes of all values that can be offloaded, from 0 to 1; those that are made first.
        least: bytes of values that are not worth a copy; smaller ones stay.
    """

    name: ClassVar[str] = "offload-activations"
    share: float = 1.0
    least: int = 1 << 20

    def requires(self, program: Program) -> None:
        if "joint" in program.phases or program.plan is not None:
            raise PassError(f"{self.name}: insert this pass after 'partition' and before 'plan'")
        if not 0 <= self.share <= 1:
            raise PassError(f"{self.name}: share must be a number from 0 to 1, got {self.share!r}")

    def rewrite(self, program: Program) -> int:
        backward = program.phases.get("backward")
        if backward is None or program.on_host:
            return self._reload(backward, program) if backward is not None and "forward" not in program.phases else 0
        forward = program.phases["forward"]
        values = _within(self.share, _candidates(forward, self.least, program.device.type))
        names = dict(zip(forward.results, forward.outputs))
        program.on_host = frozenset(names[value].name for value in values)
        _download(forward, values, program)
        return len(values) + self._reload(backward, program)

    def _reload(self, backward: Phase, program: Program) -> int:
        """Let backward, that of other tangents, too, get back what forward has sent away."""
        slots = backward.slot_of().items()
        away = [node for node, slot in slots if slot.kind == "saved" and slot.name in program.on_host]
        _upload(backward, [node for node in away if node.users], program)
        for node in away:
            node.meta["val"] = torch.empty_like(fake(node), device="cpu")
        return len(away)


def _candidates(forward: Phase, least: int, device: str) -> list[list[Node]]:
    """Values that can be offloaded, those together that share memory, in the order in which they are made."""
    groups: dict[Node, list[Node]] = {}
    for node in dict.fromkeys(saved_values(forward)):
        groups.setdefault(base_of(node), []).append(node)
    saved = {node for group in groups.values() for node in group}
    kinds = {fake(node).device.type for node in saved if isinstance(node.meta["val"], torch.Tensor)}
    home = device if len(kinds) > 1 else next(iter(kinds), device)  # predictions are made of values without a device
    results = zip(forward.results, forward.outputs)
    others = {base_of(n) for n, s in results if isinstance(n, Node) and (n not in saved or s.kind != "saved")}
    return [
        groups[base]
        for base in sorted(groups)
        if base not in others
        and all(_is_plain(node, home) for node in groups[base])
        and least <= _size(groups[base]) <= num_bytes(base)
    ]


def _is_plain(node: Node, device: str) -> bool:
    """Whether a copy of a value on the device has its sizes and strides, and those are known."""
    value = node.meta["val"]
    sizes = isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in (*value.shape, *value.stride()))
    return sizes and value.device.type == device and torch.empty_like(value).stride() == value.stride()


def _size(group: list[Node]) -> int:
    return sum(int(num_bytes(node)) for node in group)


def _within(share: float, groups: list[list[Node]]) -> list[Node]:
    """The first groups that fit in a share of the bytes of all."""
    room = int(share * sum(map(_size, groups)) + 0.01)
    found: list[Node] = []
    for group in groups:
        room -= _size(group)
        if room < 0:
            break
        found += group
    return found


def _download(forward: Phase, values: list[Node], program: Program) -> None:
    """Start copies where the unit of a value is done, and return them in its place."""
    compute = Layout.of(forward).compute
    graph, begins = forward.module.graph, _runs(compute, program)
    copies: dict[Node, Node] = {}
    for value in values:
        with graph.inserting_before(next((first for first in begins if first > value), graph.output_node())):
            copies[value] = emit(graph, DOWNLOAD, value, like=value)
    slots = zip(forward.results, forward.outputs)
    forward.set_results([copies.get(n, n) if s.kind == "saved" and isinstance(n, Node) else n for n, s in slots])


def _upload(backward: Phase, away: list[Node], program: Program) -> None:
    """Get values back where the unit before theirs begins, to be there where their own does."""
    graph, compute = backward.module.graph, Layout.of(backward).compute
    place = {node: index for index, node in enumerate(compute)}
    begins = [place[first] for first in _runs(compute, program)]
    firsts = {node: min((place[user] for user in node.users if user in place), default=0) for node in away}

    def run_of(node: Node) -> int:
        return sum(begin <= firsts[node] for begin in begins)

    behind: Node | None = None  # the last arrival so far
    for run, group in itertools.groupby(sorted(away, key=lambda node: (run_of(node), firsts[node])), run_of):
        nodes = list(group)
        arrives = compute[min(firsts[node] for node in nodes)]
        starts = compute[begins[run - 2]] if run > 1 else compute[0]
        # An arrival waits for all copies that were started before it: those for later start behind it.
        users = [list(node.users) for node in nodes]
        with graph.inserting_before(behind.next if behind is not None and behind > starts else starts):
            copies = [emit(graph, RELOAD, node, fake(node).device.type, like=node) for node in nodes]
        with graph.inserting_before(arrives):
            for node, copy, readers in zip(nodes, copies, users):
                behind = emit(graph, ARRIVED, copy, like=readers[0])
                for user in readers:
                    user.replace_input_with(node, behind)


def _runs(compute: list[Node], program: Program) -> list[Node]:
    """The first operator of each unit's run; what the root computes between two is no run of its own."""
    units = program.params.units
    found: list[Node] = []
    last = ""
    for node in compute:
        unit = unit_of(module_of(node), units)
        if unit and unit != last:
            found.append(node)
            last = unit
    return found
