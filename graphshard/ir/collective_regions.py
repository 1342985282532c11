"""The collectives of a graph, and what around them is compute: the positions that plans count."""

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
from graphshard.ir.program import Phase

# What carries a tensor to a reduce-scatter or from an all-gather without computing anything new.
_MOVEMENT = frozenset(
    {
        operator.getitem,
        aten.cat.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        OWN_CHUNK,
    }
)
# Kinds of the inputs that gathers are made of.
_GATHERED = ("param", "part", "piece")

# Mark of what was compute when the plan was made, though it moves nothing but what travels together now: the model
# joins or splits parameters itself.
COMPUTE = "compute"

_TAKEOFF = _MOVEMENT | {aten._to_copy.default, aten.div.Tensor}


@dataclass(frozen=True)
class Collective:
    """One launch: a single collective, or several coalesced into one.

    Attributes:
        kind: all-gather of parameters, reduce-scatter of gradients, or all-reduce of their shards.
        node: the launch.
        waits: one wait per tensor that travels.
        params: names of the parameters that travel.
    """

    kind: CollectiveKind
    node: Node
    waits: tuple[Node, ...]
    params: tuple[str, ...]

    @property
    def axis(self) -> str:
        """Name of the mesh axis it runs over."""
        return str(self.node.args[-1])


def collectives(phase: Phase) -> list[Collective]:
    """The phase's collectives in launch order, with the parameters they carry.

    A gather carries the parameters whose placeholders it reads, a reduction those whose gradients it returns:
    both are read off the slots.
    """
    names = {node: slot.name for node, slot in phase.slot_of().items() if slot.kind in _GATHERED}
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
    """Names of the ends that are reached from a node, depth first, without going beyond them."""
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
    """A phase's nodes by role; the communication's own casts, copies and views are not compute.

        prologue -> gather -> wait -> landing -> compute -> takeoff -> reduce -> wait -> epilogue

    Attributes:
        compute: compute nodes in order; a plan's positions count these. The results of an operator with several
            stand right behind it and are not counted.
        before: per collective, what must run before it: what a gather is made of (prologue), and what a reduction is
            made of and nothing else needs (takeoff).
        after: per wait, what follows from it alone (landing or epilogue).
    """

    compute: list[Node]
    before: dict[Node, list[Node]]
    after: dict[Node, list[Node]]

    @staticmethod
    def of(phase: Phase) -> CollectiveRegions:
        """Sort the nodes of a phase into roles, by structure alone."""
        nodes = [n for n in phase.module.graph.nodes if n.op == "call_function"]
        owner = _takeoffs(nodes)
        follows = _landings(nodes)
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
        """Position of each compute node; parts of a node have its position."""
        return {n: i for i, node in enumerate(self.compute) for n in with_parts(node)}


def saved_values(forward: Phase) -> list[Node]:
    """The activations among what a forward phase saves."""
    layout = CollectiveRegions.of(forward)
    gathered = {n for wait, after in layout.after.items() for n in (wait, *after)}
    saved = (n for n, slot in zip(forward.results, forward.outputs) if slot.kind == "saved" and isinstance(n, Node))
    return [n for n in saved if (base := base_of(n)).op != "placeholder" and base not in gathered]


def _takeoffs(nodes: list[Node]) -> dict[Node, Node]:
    """Nodes by the collective they serve: a gather's prologue, a reduction's takeoff."""
    owner: dict[Node, Node] = {}
    for node in reversed(nodes):
        if is_communication(node) or is_part(node) or COMPUTE in node.meta:
            continue
        targets = list(dict.fromkeys(user if is_collective(user) else owner.get(user) for user in node.users))
        gathers = [target for target in targets if target is not None and target.target in GATHERS]
        # Made of shards alone, it can run when the gather starts, whatever else needs it later.
        target = gathers[0] if gathers else targets[0] if len(targets) == 1 else None
        if target is None:
            continue
        if gathers or is_view(node) or node.target in _TAKEOFF:
            owner[node] = target
    return owner


def _landings(nodes: list[Node]) -> dict[Node, Node]:
    """Nodes that only follow from one wait, by wait: a gather's landing, a reduction's epilogue."""
    follows: dict[Node, Node] = {}
    reduced: set[Node] = set()
    for node in nodes:
        if node.target is WAIT:
            if is_reduced(node):
                reduced.add(node)
            continue
        if is_communication(node) or COMPUTE in node.meta:
            continue
        # What a reduction made may be added to what an earlier one left.
        inputs = [n for n in node.all_input_nodes if n.op != "placeholder"]
        sources = {n if n.target is WAIT else follows.get(n) for n in inputs}
        source = sources.pop() if len(sources) == 1 else None
        if source is not None and (source in reduced or is_view(node) or node.target in _MOVEMENT):
            follows[node] = source
    return follows


def with_inputs(order: Iterable[Node], nodes: Sequence[Node]) -> list[Node]:
    """All nodes: what those of `order` are made of directly before them, and everything else as early as can be."""
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
    behind: dict[int, list[Node]] = {}
    for node in nodes:
        if node not in found:  # a reduction of gradients, say, and what belongs to it
            place[node] = max((place[each] for each in node.all_input_nodes if each in place), default=-1)
            behind.setdefault(place[node], []).append(node)
    return [*behind.get(-1, []), *(each for i, node in enumerate(found) for each in (node, *behind.get(i, [])))]


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


def last_use(waits: Iterable[Node], layout: CollectiveRegions, position: dict[Node, int]) -> int:
    """The last position at which something reads what was gathered, or a view of it; nodes without one are skipped."""
    landed = {n for wait in waits for n in (wait, *layout.after[wait])}
    users = (n for value in _aliases(landed) for n in (value, *value.users))
    return max((position[n] for n in users if n in position), default=-1)


def _gathered(phase: Phase) -> list[_Gathered]:
    position = {node: i for i, node in enumerate(phase.module.graph.nodes)}
    layout = CollectiveRegions.of(phase)
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
