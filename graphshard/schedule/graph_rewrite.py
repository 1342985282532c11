"""From an itinerary to the graph: the order of its nodes, their memory, and messages that travel as one."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch.fx import Graph, Node

from graphshard.ir.graph import is_view, start_together
from graphshard.schedule.foreign_graph import Course, Itinerary, ItineraryRun
from graphshard.schedule.graph_collectives import Message, bytes_of
from graphshard.schedule.reordering_windows import Windows, asked_for, parts, shared
from graphshard.torch_compat.torch_ops import OpOverload


@dataclass(frozen=True)
class Writer:
    """A graph, and its collectives.

    Attributes:
        graph: whose nodes the others name.
        messages: its collectives.
        windows: its nodes by role.
        cuts: the number of compute nodes before each position of the course.
    """

    graph: Graph
    messages: list[Message]
    windows: Windows
    cuts: list[int]

    @cached_property
    def given(self) -> list[Node]:
        """The nodes between inputs and output, as the graph has them."""
        return [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]

    def order(self, course: Course, itinerary: Itinerary, outcome: ItineraryRun) -> list[Node]:
        """Return the nodes between inputs and output in the order of an itinerary; a bucket's side by side."""
        return _Order(self, course, itinerary, outcome).nodes()

    def write(self, order: Sequence[Node], itinerary: Itinerary) -> dict[Node, tuple[str, ...]]:
        """Put the graph's nodes into an order, and join buckets; return former launches by the new ones."""
        assert set(order) == set(self.given), "an order has every node"
        anchor = next(iter(self.graph.find_nodes(op="output")))
        for node in order:
            anchor.prepend(node)
        names = {}
        for _, legs in itinerary:
            members = [self.messages[index] for index in legs]
            held = tuple(member.node.name for member in members)
            names[self._join(members) if len(legs) > 1 else members[0].node] = held
        self.graph.lint()
        return names

    def _join(self, members: list[Message]) -> Node:
        """Replace launches that stand side by side with one, and their results with its parts."""
        first = members[0]
        tensors = [tensor for member in members for tensor in member.tensors]
        vals = [val for m in members for val in _vals(m.node.meta["val"])]
        with self.graph.inserting_before(first.node):
            results = start_together(
                self.graph, first.packet, tensors, *first.node.args[1:], like=first.node, vals=vals
            )
        launch = results[0].all_input_nodes[0]
        launch.meta.update({k: v for k, v in first.node.meta.items() if k != "val"})
        carried = [nodes for member in members for nodes in member.arrivals]
        for nodes, result in zip(carried, results, strict=True):
            for node in nodes:
                node.replace_all_uses_with(result)
        for member in members:
            for node in dict.fromkeys((*(node for nodes in member.arrivals for node in nodes), member.node)):
                self.graph.erase_node(node)
        return launch

    def peak(self, order: Sequence[Node], itinerary: Itinerary = ()) -> int:
        """Return the most bytes alive at once, if nodes run in an order; a bucket's inputs live to its last wait."""
        owner, size, sources, results, always = self._memory
        given: dict[Node, list[Node]] = {}
        for _, legs in itinerary:
            members = [self.messages[index] for index in legs]
            tensors = dict.fromkeys(owner[tensor] for member in members for tensor in member.tensors)
            held = [tensor for tensor in tensors if tensor not in results]
            given.update({wait: held for member in members for wait in member.waits} if len(legs) > 1 else {})
        last: dict[Node, int] = {}
        for index, node in enumerate(order):
            for value in (*sources[node], *given.get(node, ())):
                last[value] = index
        alive = peak = always
        dies: list[list[int]] = [[] for _ in order]
        for value, index in last.items():
            dies[index].append(size[value])
        for index, node in enumerate(order):
            if owner[node] is node:
                alive += size[node]
                if node not in last and node not in results:
                    dies[index].append(size[node])
            peak = max(peak, alive)
            alive -= sum(dies[index])
        return peak

    def earliest(self, limit: float) -> list[int]:
        """Return by message the number of compute nodes that must run before it starts, if all orders keep to a limit.

        Next to a compute node there is in any order what was computed before and is read by it or later, and what has
        arrived and is read before and after it. The results of a message come on top until they are read.
        """
        owner, size, sources, results, always = self._memory
        place = {node: index for index, node in enumerate(self.windows.compute)}
        read: dict[Node, list[int]] = {}
        for node, index in place.items():
            for value in sources[node]:
                read.setdefault(value, []).append(index)
        change = [0] * (len(place) + 1)
        for value in dict.fromkeys((*read, *(node for node in place if owner[node] is node))):
            begin = place.get(value, min(read.get(value, (0,))))
            end = len(place) if value in results else max(read.get(value, ()), default=begin) + 1
            if value in place or value in read:
                change[begin] += size[value]
                change[max(end, begin + 1)] -= size[value]
        least = [always + alive for alive in accumulate(change[:-1])]
        found = []
        for message in self.messages:
            left = dict.fromkeys(owner[node] for nodes in message.arrivals for node in nodes)
            needed = min((min(read[value]) for value in left if value in read), default=len(place))
            num_bytes = sum(size[value] for value in left)
            crowded = (index + 1 for index in range(needed) if least[index] + num_bytes > limit)
            found.append(max(crowded, default=0))
        return found

    @cached_property
    def _memory(self) -> tuple[dict[Node, Node], dict[Node, int], dict[Node, list[Node]], set[Node], int]:
        """By node its owner, bytes, and the owners that it reads; owners of results; bytes of inputs."""
        owner: dict[Node, Node] = {}
        for node in self.graph.nodes:
            tells = is_view(node) if node.target is operator.getitem else isinstance(node.target, OpOverload)
            first = next(iter(shared(node)), None) if tells else None
            owner[node] = node if first is None else owner[first]
        lasting = {owner[node] for node in self.graph.nodes if node.op in ("placeholder", "get_attr")}
        (output,) = self.graph.find_nodes(op="output")
        results = {owner[node] for node in output.all_input_nodes}
        given = {wait: message for message in self.messages for wait in message.waits}
        many = {node.args[0] for node in self.given if node.target is operator.getitem and owner[node] is node}
        without = lasting | many  # the parts of a node have its bytes
        size = {node: 0 if node in without else bytes_of(node.meta.get("val")) for node in set(owner.values())}
        sources: dict[Node, list[Node]] = {}
        for node in self.given:
            inputs = [*node.all_input_nodes, *(given[node].tensors if node in given else ())]
            sources[node] = [value for value in dict.fromkeys(owner[n] for n in inputs) if value not in results]
        always = sum(bytes_of(node.meta.get("val")) for node in lasting)
        return owner, size, sources, results, always


def _vals(val: object) -> list[object]:
    return list(val) if isinstance(val, (list, tuple)) else [val]


class _Order:
    def __init__(self, writer: Writer, course: Course, itinerary: Itinerary, outcome: ItineraryRun) -> None:
        self.writer, self.course, self.itinerary = writer, course, itinerary
        self.waits = {wait for message in writer.messages for wait in message.waits}
        self.placed: dict[Node, None] = {}
        self.due: dict[int, list[Node]] = {}
        place = {leg: number for number, (_, legs) in enumerate(itinerary) for leg in legs}
        for message, window in zip(writer.messages, writer.windows.of):
            number = place[message.index]
            ended = self._ended(number, outcome)
            closing = window.needed == len(writer.windows.compute)
            for wait in message.waits:
                due = max(ended, window.not_before[wait]) if closing else window.due[wait]
                self.due.setdefault(min(due, window.due[wait]), []).append(wait)

    def _ended(self, number: int, outcome: ItineraryRun) -> int:
        """Return the number of compute nodes after which a bucket has ended, with some time to spare."""
        position, _ = self.itinerary[number]
        if self.course.prompt:
            return self.writer.cuts[position]
        start, end = outcome.starts[number]
        reached = bisect_left(outcome.reached, end + (end - start))
        return self.writer.cuts[max(position, min(reached, self.course.end))]

    def nodes(self) -> list[Node]:
        """Return buckets and waits where they are due, and compute in its order."""
        compute, upcoming = self.writer.windows.compute, 0
        starts = [self.writer.cuts[position] for position, _ in self.itinerary]
        for position in range(len(compute) + 1):
            while upcoming < len(starts) and starts[upcoming] <= position:
                self._start(self.itinerary[upcoming][1])
                upcoming += 1
            for wait in self.due.get(position, ()):
                if position < len(compute) or self.course.prompt:
                    self._place(wait)
            for node in compute[position : position + 1]:
                self._place(node)
        for node in self.writer.given:
            self._place(node)
        return list(self.placed)

    def _start(self, legs: tuple[int, ...]) -> None:
        """Place the inputs of a bucket's messages, then all of these."""
        members = [self.writer.messages[index] for index in legs]
        for member in members:
            self._ask(member.node)
        for member in members:
            self.placed[member.node] = None
        for member in members:
            self.placed.update(dict.fromkeys(node for nodes in member.arrivals for node in nodes))

    def _place(self, node: Node) -> None:
        if node not in self.placed:
            self._ask(node)
            for placed in (node, *parts(node)):
                self.placed.setdefault(placed, None)

    def _ask(self, node: Node) -> None:
        """Place the light nodes and waits that a node asks for."""

        def asked(source: Node) -> bool:
            return source not in self.placed and (source in self.writer.windows.light or source in self.waits)

        for source in asked_for(node.all_input_nodes, asked):
            self.placed[source] = None
