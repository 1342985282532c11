"""Collectives of a graph, and the compute between them, whose positions plans count."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.fx import Node

from graphshard.ir.graph import (
    GATHERS,
    WAIT,
    aten,
    base_of,
    fake,
    is_alias,
    is_collective,
    is_communication,
    is_part,
    is_reduced,
    is_view,
    kind_of,
    with_parts,
)
from graphshard.ir.operators import OWN_CHUNK
from graphshard.ir.param_table import ParamTable
from graphshard.ir.plan import CollectiveKind
from graphshard.ir.program import Phase, Program, Region

# Operators that move data to a reduce-scatter or from an all-gather without computing.
_MOVEMENT = frozenset(
    {
        *(operator.getitem, aten.cat.default, aten.clone.default, aten.constant_pad_nd.default),
        *(aten.split.Tensor, aten.split_with_sizes.default, OWN_CHUNK),
    }
)

# Mark of nodes that were compute when the plan was made, but look like data movement after bucketing: the model itself
# concatenates or splits parameters.
COMPUTE = "compute"

_REDUCTION_PROLOGUE = _MOVEMENT | {aten._to_copy.default, aten.div.Tensor}


@dataclass(frozen=True)
class Collective:
    """One launch: a collective, or several coalesced into one.

    Attributes:
        kind: all-gather of parameters, reduce-scatter of gradients, or all-reduce of their shards.
        node: the launch.
        waits: one wait for each tensor.
        params: names of the parameters.
    """

    kind: CollectiveKind
    node: Node
    waits: tuple[Node, ...]
    params: tuple[str, ...]

    @property
    def axis(self) -> str:
        """Name of its mesh axis."""
        return str(self.node.args[-1])


def moves_data(region: Region) -> bool:
    """Return whether a region only casts, copies, scales or sums for collectives, and computes nothing of the model."""
    known = _REDUCTION_PROLOGUE | {aten.add.Tensor, aten.mul.Tensor}
    calls = (node for node in region.module.graph.nodes if node.op == "call_function")
    return all(node.target in known or is_alias(node) for node in calls)


def is_scalar(program: Program, collective: Collective) -> bool:
    """Return whether it all-reduces gradients that are whole on every rank, next to others that are scattered."""
    whole = program.params[collective.params[0]].num_shards == 1 and program.mesh.shard.size > 1
    return whole and collective.kind == "all_reduce"


def collectives(phase: Phase) -> list[Collective]:
    """Return the phase's collectives in launch order, with their parameters.

    The parameters of a gather are the placeholders that it depends on; the parameters of a reduction are the gradient
    outputs that depend on it.
    """
    names = {node: slot.name for node, slot in phase.slot_of().items() if slot.is_of_shard}
    grads = {n: s.name for n, s in zip(phase.results, phase.outputs, strict=True) if isinstance(n, Node)}
    found = []
    for node in phase.module.graph.nodes:
        if not is_collective(node):
            continue
        waits = tuple(w for user in node.users for w in ([user] if user.target is WAIT else user.users))
        if node.target in GATHERS:
            params = _reach(node, lambda n: n.all_input_nodes, names)
        else:
            params = _reach(node, lambda n: list(n.users), grads)
        found.append(Collective(kind_of(node), node, waits, params))
    return found


def _reach(node: Node, step: Callable[[Node], list[Node]], ends: dict[Node, str]) -> tuple[str, ...]:
    """Return the names of the ends that are reachable from a node, depth first; the search stops at an end."""
    reached: dict[str, None] = {}
    seen: set[Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current in ends and current is not node:
            reached[ends[current]] = None
        elif current not in seen:
            seen.add(current)
            stack.extend(reversed(step(current)))
    return tuple(reached)


@dataclass(frozen=True)
class CollectiveRegions:
    """Nodes of a phase by role; the casts, copies and views of collectives are not compute.

        prologue -> gather -> wait -> epilogue -> compute -> prologue -> reduce -> wait -> epilogue

    Attributes:
        compute: compute nodes in order; a plan's positions count these. The `getitem`s of an operator with several
            results follow it and are not counted.
        before: prologue of each collective: everything that a gather depends on, and the nodes that only serve a
            reduction.
        after: epilogue of each wait: the nodes that depend on nothing else.
    """

    compute: list[Node]
    before: dict[Node, list[Node]]
    after: dict[Node, list[Node]]

    @staticmethod
    def of(phase: Phase) -> CollectiveRegions:
        """Sort the nodes of a phase into roles by the structure of the graph."""
        nodes = [n for n in phase.module.graph.nodes if n.op == "call_function"]
        owner = _prologues(nodes)
        follows = _epilogues(nodes)
        before: dict[Node, list[Node]] = {n: [] for n in nodes if is_collective(n)}
        after: dict[Node, list[Node]] = {n: [] for n in nodes if n.target is WAIT}
        compute = []
        for node in nodes:
            if is_communication(node) or is_part(node):
                continue
            if node in owner:
                before[owner[node]].append(node)
            elif node in follows:
                after[follows[node]].append(node)
            else:
                compute.append(node)
        return CollectiveRegions(compute, before, after)

    @cached_property
    def index(self) -> dict[Node, int]:
        """Positions of compute nodes; `getitem`s have the position of their operator."""
        return {n: i for i, node in enumerate(self.compute) for n in with_parts(node)}


def saved_values(forward: Phase) -> list[Node]:
    """Return the activations among the values that a forward phase saves."""
    layout = CollectiveRegions.of(forward)
    gathered = {n for wait, after in layout.after.items() for n in (wait, *after)}
    saved = (n for n, slot in zip(forward.results, forward.outputs) if slot.kind == "saved" and isinstance(n, Node))
    return [n for n in saved if (base := base_of(n)).op != "placeholder" and base not in gathered]


def _prologues(nodes: list[Node]) -> dict[Node, Node]:
    """Return the collective that each prologue node serves."""
    owner: dict[Node, Node] = {}
    for node in reversed(nodes):
        if is_communication(node) or is_part(node) or COMPUTE in node.meta:
            continue
        targets = list(dict.fromkeys(user if is_collective(user) else owner.get(user) for user in node.users))
        gathers = [target for target in targets if target is not None and target.target in GATHERS]
        # It depends on shards only, so it can run when the gather starts even if other nodes read it.
        target = gathers[0] if gathers else targets[0] if len(targets) == 1 else None
        if target is None:
            continue
        if gathers or is_view(node) or node.target in _REDUCTION_PROLOGUE:
            owner[node] = target
    return owner


def _epilogues(nodes: list[Node]) -> dict[Node, Node]:
    """Return the wait that each epilogue node depends on."""
    follows: dict[Node, Node] = {}
    reduced: set[Node] = set()
    for node in nodes:
        if node.target is WAIT:
            if is_reduced(node):
                reduced.add(node)
            continue
        if is_communication(node) or COMPUTE in node.meta:
            continue
        # A reduced gradient may be added to one of an earlier microbatch, which is a placeholder.
        inputs = [n for n in node.all_input_nodes if n.op != "placeholder"]
        sources = {n if n.target is WAIT else follows.get(n) for n in inputs}
        source = sources.pop() if len(sources) == 1 else None
        if source is not None and (source in reduced or is_view(node) or node.target in _MOVEMENT):
            follows[node] = source
    return follows


def with_inputs(order: Iterable[Node], nodes: Sequence[Node]) -> list[Node]:
    """Return all nodes: inputs of the nodes in `order` directly before them, all others as early as possible."""
    found: dict[Node, None] = {}
    for node in order:
        left = [node]
        while left:
            missing = [each for each in left[-1].all_input_nodes if each.op == "call_function" and each not in found]
            if missing:
                left.append(missing[0])
            else:
                found.setdefault(left.pop())
    place = {node: index for index, node in enumerate(found)}
    following: dict[int, list[Node]] = {}
    for node in nodes:
        if node not in found:  # for example a gradient reduction with its prologue and epilogue
            place[node] = max((place[each] for each in node.all_input_nodes if each in place), default=-1)
            following.setdefault(place[node], []).append(node)
    return [*following.get(-1, []), *(each for i, node in enumerate(found) for each in (node, *following.get(i, [])))]


def units_gathered(phase: Phase, params: ParamTable) -> list[tuple[str, tuple[str, ...]]]:
    """Return the unit of each gather, and the units whose gathered parameters are alive where it starts.

    A unit is alive from the start of its gather to the last use of its gathered parameters, their copies and views.
    """
    found = [(params[c.params[0]].unit, start, max(end for end, _ in uses)) for c, start, uses in _gathered(phase)]
    return [
        (unit, tuple(dict.fromkeys(other for other, start, end in found if start <= at <= end)))
        for unit, at, _ in found
    ]


def peak_gathered_bytes(phase: Phase) -> tuple[Node | None, int]:
    """Return the gather at which the most gathered bytes are alive, and these bytes.

    A tensor of a coalesced gather is alive until its last use, a packed buffer until the last use of any part.
    """
    found = _gathered(phase)
    alive = [
        (gather.node, sum(size for _, start, uses in found for end, size in uses if start <= at <= end))
        for gather, at, _ in found
    ]
    return max(alive, key=lambda pair: pair[1], default=(None, 0))


def last_use(waits: Iterable[Node], layout: CollectiveRegions, position: dict[Node, int]) -> int:
    """Return the last position that reads a gathered tensor or a view of it; nodes without a position are skipped."""
    gathered = {n for wait in waits for n in (wait, *layout.after[wait])}
    users = (n for value in _aliases(gathered) for n in (value, *value.users))
    return max((position[n] for n in users if n in position), default=-1)


def _gathered(phase: Phase) -> list[tuple[Collective, int, list[tuple[int, int]]]]:
    """Return each gather with its start position, and last use and bytes of each gathered tensor."""
    position = {node: i for i, node in enumerate(phase.module.graph.nodes)}
    layout = CollectiveRegions.of(phase)
    gathers = [c for c in collectives(phase) if c.kind == "gather"]
    uses = ([(last_use([w], layout, position), fake(w).nbytes) for w in gather.waits] for gather in gathers)
    return [(gather, position[gather.node], used) for gather, used in zip(gathers, uses)]


def _aliases(values: set[Node]) -> set[Node]:
    """Return the values and all views of them."""
    found, stack = set(values), list(values)
    while stack:
        for user in stack.pop().users:
            if user not in found and not is_communication(user) and base_of(user) is not user:
                found.add(user)
                stack.append(user)
    return found
