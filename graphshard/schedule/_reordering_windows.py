"""Positions between which each collective of an external graph may start, and at which it must have arrived.

    %c = _to_copy(%p)                light: made of inputs alone, it runs when it is first needed
    %g = all_gather(%c)              ready at 0, as no compute comes before it
    %y = mm(%x, %x)                  compute, position 0
    %w = wait_tensor(%g)
    %v = view(%w)                    light: it follows from a wait
    %z = mm(%y, %v)                  compute, position 1: %g must have arrived here

Compute keeps its order, so a position is a number of compute nodes that have run. Nodes that move values and make
nothing new (views, casts, copies, sizes) are light: they run when something first asks for them. So are nodes that
follow from waits and inputs and go to outputs alone, such as the scaling of a gradient.

Effects stay in place:

    %v = view(%x)          shares the memory of %x
    %a = add_(%v, 1)       writes it: earlier readers of %x or %v stay before it, and later ones after it
    %p = print(...)        no collective crosses it
    %r = rand(...)         stays in its place among compute, which keeps its order
"""

from __future__ import annotations

import bisect
import builtins
import itertools
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from graphshard.cost.flops import is_multiplication
from graphshard.ir.graph import WAIT, aten, is_random, is_view
from graphshard.ir.sizes import is_size
from graphshard.schedule.graph_collectives import Message
from graphshard.torch_compat.fake_tensors import FakeTensor
from graphshard.torch_compat.torch_ops import HigherOrderOperator, OpOverload

# Shares its input's memory, though its schema does not say so.
_SHARES = frozenset({aten._unsafe_view.default, WAIT})
# Modules whose functions compute numbers, and functions in them that do something else.
_NUMBERS = {module.__name__.lstrip("_") for module in (operator, math, builtins)}
_DOING = {"print", "setitem", "delitem", "setattr", "delattr", "exec", "eval", "open", "input"}
_IN_PLACE = {name for name in vars(operator) if name.startswith("i") and name[1:] in {*vars(operator), "concat"}}


def is_pure(node: Node) -> bool:
    """Return whether a call makes a value and does nothing else, so that it may run elsewhere."""
    return node.op == "call_function" and not (is_barrier(node) or written(node) or is_random(node))


def written(node: Node) -> list[Node]:
    """Return the arguments that a call writes."""
    if not isinstance(node.target, OpOverload):
        return []
    found: list[Node] = []
    for argument, given in _arguments(node, node.target):
        if argument.alias_info is not None and argument.alias_info.is_write:
            torch.fx.map_arg(given, found.append)
    return found


def is_barrier(node: Node) -> bool:
    """Return whether a call's effect is not known from its schema: a print, an assertion, a module or a method."""
    if node.op in ("call_module", "call_method"):
        return True
    if node.op != "call_function":
        return False
    target: Any = node.target
    if isinstance(target, OpOverload):
        effect = not target._schema.returns or node.is_impure(impure_random=False)
        return effect and not written(node)
    if isinstance(target, HigherOrderOperator):
        return node.is_impure(impure_random=False) or target.name() == "with_effects"
    name, module = str(getattr(target, "__name__", "")), str(getattr(target, "__module__", "")).lstrip("_")
    number = module in _NUMBERS and name not in _DOING | _IN_PLACE
    return not (number or name.startswith("sym_"))


class SharedMemory:
    """Values that may share memory.

    Two inputs may be the same memory. Fake tensors of one mode tell; where each has a separate mode (`make_fx` of real
    tensors), all inputs are taken for one memory.
    """

    def __init__(self, graph: Graph) -> None:
        self._up: dict[Node, Node] = {}
        inputs = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
        tensors = [node for node in inputs if isinstance(node.meta.get("val"), torch.Tensor)]
        vals = [node.meta["val"] for node in tensors]
        modes = {id(val.fake_mode) for val in vals if isinstance(val, FakeTensor)}
        told = len(modes) == 1 and all(isinstance(val, FakeTensor) for val in vals)
        first: dict[Any, Node] = {}
        for node in inputs:
            val = node.meta.get("val")
            memory = val.untyped_storage()._cdata if told and isinstance(val, torch.Tensor) else None
            self._join(node, first.setdefault(memory, node))
        for node in graph.nodes:
            for source in shared(node):
                self._join(node, source)

    def of(self, node: Node) -> Node:
        """Return the same node for all values that may share memory."""
        while (up := self._up.get(node, node)) is not node:
            node = up
        return node

    def _join(self, one: Node, other: Node) -> None:
        one, other = self.of(one), self.of(other)
        if one is not other:
            self._up[one] = other


def shared(node: Node) -> list[Node]:
    """Return the inputs whose memory the results of a call may have."""
    if node.op in ("call_module", "call_method") or isinstance(node.target, HigherOrderOperator):
        return node.all_input_nodes
    if node.op != "call_function":
        return []
    if not isinstance(node.target, OpOverload) or node.target in _SHARES:
        return node.all_input_nodes
    if is_view(node) or written(node):
        found: list[Node] = []
        for argument, given in _arguments(node, node.target):
            if argument.alias_info is not None:
                torch.fx.map_arg(given, found.append)
        return found
    return []


def _arguments(node: Node, target: OpOverload) -> list[tuple[Any, Any]]:
    """Return the schema's arguments of a call, with their values."""
    found = []
    for index, argument in enumerate(target._schema.arguments):
        if argument.name in node.kwargs:
            found.append((argument, node.kwargs[argument.name]))
        elif index < len(node.args):
            found.append((argument, node.args[index]))
    return found


_MOVEMENT = frozenset(
    {
        operator.getitem,
        aten._to_copy.default,
        aten._unsafe_view.default,
        aten.cat.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.div.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        torch.ops.prims.convert_element_type.default,
    }
)


@dataclass(frozen=True)
class Window:
    """Positions at which a message may start and must be there."""

    first: int  # between which it may start
    last: int
    # By wait, the position at which it must be waited for; the number of compute nodes for the end.
    due: dict[Node, int]
    not_before: dict[Node, int]  # by wait, the position before which it must not be
    after: tuple[int, ...]  # indices of messages that it is made of
    start: int  # position in the graph
    waited: dict[Node, int]  # by wait, its position in the graph

    @property
    def needed(self) -> int:
        """The first position at which something waits."""
        return min(self.due.values())


@dataclass(frozen=True)
class Windows:
    """A graph's nodes by role, and the windows of its messages."""

    compute: list[Node]  # in order; positions count these. Parts of a node's result come right after it.
    light: set[Node]  # nodes that run when they are first asked for
    of: list[Window]  # by message


def parts(node: Node) -> list[Node]:
    """Return the selections of a node's results, and theirs, which come right after it."""
    picked = [user for user in node.users if user.target is operator.getitem and user.args[0] is node]
    return [part for user in picked for part in (user, *parts(user))]


def windows(graph: Graph, found: list[Message]) -> Windows:
    """Return the windows of all messages; each holds the position in the graph."""
    return _Finder(graph, found).find()


class _Finder:
    def __init__(self, graph: Graph, found: list[Message]) -> None:
        self.messages = found
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self.message_of = {wait: m for m in found for wait in m.waits}
        ours = {m.node for m in found} | {node for m in found for arrived in m.arrivals for node in arrived}
        self.ours = ours | self.message_of.keys()
        self.memory = SharedMemory(graph)
        self.attached: set[Node] = set()
        self.light: set[Node] = set()

    def find(self) -> Windows:
        self._find_light()
        while True:
            apart = self.light | self.ours | self.attached
            heavy = self._misplaced()
            if not heavy:
                compute = [node for node in self.nodes if node not in apart]
                return Windows(compute, self.light, self._windows(compute))
            self.light -= heavy
            self._settle()

    def _find_light(self) -> None:
        """Find nodes that are made of inputs and waits, or go to collectives or outputs alone."""
        launches = {m.node for m in self.messages}
        pure = {node for node in self.nodes if node not in self.ours and is_pure(node)}
        free = {node for node in self.nodes if node.op == "get_attr"}
        movement = {node for node in pure if is_view(node) or node.target in _MOVEMENT or is_size(node)}
        for node in self.nodes:
            if node in movement and all(self._given(source, free) for source in node.all_input_nodes):
                free.add(node)
        takeoff: set[Node] = set()
        tail: set[Node] = set()
        for node in reversed(self.nodes):
            users = list(node.users)
            if node in movement and users and all(user in launches or user in takeoff for user in users):
                takeoff.add(node)
            if node in pure and users and all(user.op == "output" or user in tail for user in users):
                tail.add(node)
        self.light = free | takeoff
        following: set[Node] = set(self.message_of)
        for node in self.nodes:
            sources = node.all_input_nodes
            if following.isdisjoint(sources):
                continue
            known = all(self._given(source, self.light) for source in sources)
            if known and (node in free or (node in tail and not is_multiplication(node))):
                following.add(node)
                self.light.add(node)
        self._settle()

    def _given(self, source: Node, light: set[Node]) -> bool:
        return source.op == "placeholder" or source in light or source in self.message_of

    def _settle(self) -> None:
        """Attach selections to the node whose results they are; they are light only if that is."""
        self.attached = set()
        for node in self.nodes:
            if node.target is not operator.getitem or node in self.ours:
                continue
            source = node.args[0]
            if isinstance(source, Node) and not self._given(source, self.light):
                self.attached.add(node)
                self.light.discard(node)

    def _misplaced(self) -> set[Node]:
        """Return light nodes that read memory which is written before all that asks for them has run."""
        place = {node: i for i, node in enumerate(self.nodes)}
        writes = self._writes(place)
        last: dict[Node, int] = {}
        found = set()
        for node in reversed(self.nodes) if writes else ():
            if node not in self.light:
                continue
            asked = [last[user] if user in self.light else place.get(user, len(place)) for user in node.users]
            last[node] = max(asked, default=len(place))
            touched = {self.memory.of(value) for value in (node, *node.all_input_nodes)}
            if any(place[node] < at <= last[node] for memory in touched for at in writes.get(memory, ())):
                found.add(node)
        return found

    def _writes(self, place: dict[Node, int]) -> dict[Node, list[int]]:
        """Return by memory the places of the calls that write it, in order."""
        found: dict[Node, list[int]] = {}
        for node in self.nodes:
            for memory in dict.fromkeys(map(self.memory.of, written(node))):
                found.setdefault(memory, []).append(place[node])
        return found

    def _windows(self, compute: list[Node]) -> list[Window]:
        end = len(compute)
        index = {n: i for i, node in enumerate(compute) for n in (node, *parts(node))}
        # By node, how much compute the graph has before it.
        counts = itertools.accumulate((node in index and node not in self.attached for node in self.nodes), initial=0)
        before = dict(zip(self.nodes, counts))
        asked = self._asked(index, end)
        barriers = [index[node] for node in compute if is_barrier(node)]
        writes = self._writes(index)
        found: list[Window] = []
        for message in self.messages:
            reach = asked_for(message.node.all_input_nodes, self.light.__contains__)
            sources = [source for node in (message.node, *reach) for source in node.all_input_nodes]
            touched = {self.memory.of(node) for node in (*sources, *reach, *message.waits)}
            fences = sorted({*barriers, *(at for memory in touched for at in writes.get(memory, ()))})
            after = sorted({self.message_of[node].index for node in sources if node in self.message_of})
            waited = {wait: before[wait] for wait in message.waits}
            fenced = {wait: _between(fences, at) for wait, at in waited.items()}
            first, last = _between(fences, before[message.node])
            first = max([first, *(index[node] + 1 for node in sources if node in index)])
            for node in sources:  # of what must not be waited for earlier, nothing can be made earlier
                if node in self.message_of:
                    earlier = found[self.message_of[node].index]
                    first = max(first, earlier.first, earlier.not_before[node])
            due = {wait: min(asked.get(wait, end), fenced[wait][1]) for wait in message.waits}
            not_before = {wait: fence[0] for wait, fence in fenced.items()}
            last = min(last, *due.values())
            found.append(Window(first, last, due, not_before, tuple(after), before[message.node], waited))
        # What others are made of must be there when these must start.
        for number in reversed(range(len(found))):
            for source in found[number].after:
                found[source] = replace(found[source], last=min(found[source].last, found[number].last))
        return found

    def _asked(self, index: dict[Node, int], end: int) -> dict[Node, int]:
        """Return by wait and light node the first position of compute that asks for it, also through light nodes."""
        found: dict[Node, int] = {}
        for node in reversed(self.nodes):
            if node in self.light or node in self.message_of:
                found[node] = min((index.get(user, found.get(user, end)) for user in node.users), default=end)
        return found


def asked_for(nodes: Iterable[Node], known: Callable[[Node], bool]) -> list[Node]:
    """Return the known ones among these nodes and their transitive inputs, each after its inputs."""
    found: dict[Node, None] = {}
    stack = [(node, False) for node in nodes if known(node)][::-1]
    while stack:
        node, done = stack.pop()
        if done:
            found[node] = None
        elif node not in found:
            stack.append((node, True))
            stack += [(source, False) for source in node.all_input_nodes if known(source) and source not in found]
    return list(found)


def _between(fences: list[int], at: int) -> tuple[int, int]:
    """Return the positions between the fences around one; fences are sorted indices of compute."""
    place = bisect.bisect_left(fences, at)
    return fences[place - 1] + 1 if place else 0, fences[place] if place < len(fences) else 1 << 60
