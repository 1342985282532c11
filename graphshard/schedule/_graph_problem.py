"""The scheduling problem of an external graph: items of compute, transfers between two of them, and its schedules.

    items       0 |   1   |  2  | 3 |  4          compute between positions at which something may start or is needed
    transfer a  [---------> first=0, last=needed=2
    transfer b          [---------------> ...

A transfer is a message of the graph. There are several links, each with a queue: clocks are those of `problem.py`. A
`Writer` puts a schedule into the graph, and counts the memory of an order of nodes.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.fx import Graph, Node

from graphshard.cost.costs import Costs
from graphshard.cost.kernels import kernels_of
from graphshard.ir.graph import is_view, start_together
from graphshard.schedule._reordering_windows import Windows, asked_for, parts, shared
from graphshard.schedule.graph_collectives import GroupCosts, Message, bytes_of
from graphshard.schedule.problem import Clocks
from graphshard.torch_compat.torch_ops import OpOverload, pytree


@dataclass(frozen=True)
class GraphTransfer:
    """A message as the search sees it; positions are those between items."""

    name: str  # of its launch
    group: int  # index of its group among the problem's
    kind: str  # gather, reduce, all_reduce or all_to_all
    key: tuple[Any, ...] | None  # transfers with equal keys may travel together; None travels alone
    num_bytes: int
    num_tensors: int
    first: int  # first and last position at which it may start
    last: int
    needed: int  # position at which it is waited for
    not_before: int  # at which it may be waited for
    after: tuple[int, ...]  # transfers that must have arrived before it starts
    packing: float  # seconds of compute when it starts, for casts and copies
    unpacking: float  # seconds of compute when it has arrived
    start: int  # where the graph has it
    waited: int


# Positions and the transfers that start there as one, in the order in which they start.
GraphSchedule = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class GraphRun:
    """Result of running a schedule."""

    seconds: float
    exposed: float  # seconds in which compute waits
    starts: tuple[tuple[float, float], ...]  # by bucket, when it begins on its link, and when it ends
    reached: tuple[float, ...]  # by position, when compute comes to it
    waits: tuple[tuple[float, float], ...]  # by bucket, when compute comes to its first wait, and how long that is


@dataclass(frozen=True)
class GraphProblem:
    """Items, transfers and their costs."""

    seconds: tuple[float, ...]  # per item
    transfers: tuple[GraphTransfer, ...]  # in the order of the graph
    links: tuple[str, ...]  # by group, the name of its link
    cost: Callable[[int, str, int, int], float]  # seconds of a launch for (group, kind, bytes, tensors)
    contention: float  # share by which compute is slower while a link is busy
    prompt: bool = False  # what only the end needs is waited for once it has started, as its input takes memory

    @property
    def end(self) -> int:
        """The position after the last item."""
        return len(self.seconds)

    def link_of(self, transfer: int) -> str:
        """Return the name of the link that carries a transfer."""
        return self.links[self.transfers[transfer].group]

    def bucket_seconds(self, transfers: Sequence[int]) -> float:
        """Return the seconds of one launch of these."""
        members = [self.transfers[i] for i in transfers]
        num_bytes, num_tensors = sum(m.num_bytes for m in members), sum(m.num_tensors for m in members)
        return self.cost(members[0].group, members[0].kind, num_bytes, num_tensors)

    def window(self, transfers: Sequence[int]) -> tuple[int, int]:
        """Return between which positions a bucket may start; the first is after the last if it cannot be."""
        return max(self.transfers[i].first for i in transfers), min(self.transfers[i].last for i in transfers)

    @cached_property
    def ancestors(self) -> tuple[frozenset[int], ...]:
        """By transfer, the transfers that it follows from without compute in between."""
        found: list[frozenset[int]] = []
        for transfer in self.transfers:
            found.append(frozenset(transfer.after).union(*(found[i] for i in transfer.after)))
        return tuple(found)

    @cached_property
    def classes(self) -> list[list[int]]:
        """Transfers that may travel together as far as their keys say."""
        found: dict[object, list[int]] = {}
        for index, transfer in enumerate(self.transfers):
            found.setdefault(transfer.key if transfer.key is not None else index, []).append(index)
        return list(found.values())

    def may_join(self, transfers: Sequence[int]) -> bool:
        """Return whether transfers may travel as one."""
        keys = {self.transfers[i].key for i in transfers}
        if len(transfers) > 1 and (len(keys) > 1 or None in keys):
            return False
        first, last = self.window(transfers)
        return first <= last and all(self.ancestors[i].isdisjoint(transfers) for i in transfers)

    def as_given(self) -> GraphSchedule:
        """Return the graph's own order."""
        return tuple((transfer.start, (index,)) for index, transfer in enumerate(self.transfers))


def run(problem: GraphProblem, schedule: GraphSchedule, *, as_given: bool = False) -> GraphRun | None:
    """Run a schedule; return None if a transfer would start before one that it is made of.

    `as_given` waits where the graph does, not where something needs it.
    """
    channels = {link: channel for channel, link in enumerate(dict.fromkeys(problem.links))}
    clocks = Clocks(channels=[0.0] * max(len(channels), 1))
    bucket_of: dict[int, int] = {}  # of transfers that have started
    waited: set[int] = set()
    starts: list[tuple[float, float]] = []
    waits: dict[int, tuple[float, float]] = {}
    due: dict[int, list[int]] = {}
    for index, transfer in enumerate(problem.transfers):
        due.setdefault(transfer.waited if as_given else transfer.needed, []).append(index)
    exposed = 0.0

    def wait(index: int) -> bool:
        nonlocal exposed
        if index in bucket_of and index not in waited:
            waited.add(index)
            number, begin = bucket_of[index], clocks.compute
            clocks.wait(starts[number][1])
            held = clocks.compute - begin
            exposed += held
            if number not in waits or held > 0:
                waits[number] = begin, held
            clocks.advance(problem.transfers[index].unpacking, problem.contention)
        return index in bucket_of

    def launch(position: int, members: tuple[int, ...]) -> bool:
        if not all(wait(earlier) for index in members for earlier in problem.transfers[index].after):
            return False
        clocks.advance(sum(problem.transfers[index].packing for index in members), problem.contention)
        bucket_of.update(dict.fromkeys(members, len(starts)))
        starts.append(clocks.launch(channels[problem.link_of(members[0])], problem.bucket_seconds(members)))
        for index in members if problem.prompt else ():
            if problem.transfers[index].needed == problem.end and position >= problem.transfers[index].not_before:
                wait(index)
        return True

    reached = []
    for position in range(problem.end + 1):
        reached.append(clocks.compute)
        while len(starts) < len(schedule) and schedule[len(starts)][0] <= position:
            if not launch(*schedule[len(starts)]):
                return None
        if not all(map(wait, due.get(position, ()))):
            return None
        if position < problem.end:
            clocks.advance(problem.seconds[position], problem.contention)
    return GraphRun(
        clocks.compute, exposed, tuple(starts), tuple(reached), tuple(waits[number] for number in range(len(schedule)))
    )


def cuts_of(found: Windows) -> list[int]:
    """Return the positions at which something may start, is needed, or stands in the graph, and both ends."""
    cuts = {0, len(found.compute)}
    for window in found.of:
        cuts |= {window.first, window.last, window.start, *window.due.values()}
        cuts |= {*window.waited.values(), *window.not_before.values()}
    return sorted(cuts)


def graph_problem_of(
    graph: Graph,
    messages: Sequence[Message],
    found: Windows,
    cuts: Sequence[int],
    costs: Costs,
    group_costs: Mapping[str, GroupCosts],
) -> GraphProblem:
    """Return the problem of a graph. Items are the compute between two cuts.

    Light nodes take the time of the transfer, or of the compute, that asks for them first.
    """
    seconds = _seconds(graph, found, costs)
    packing, unpacking, beside = _light_seconds(graph, messages, found, seconds)
    items = [
        sum(seconds.get(n, 0.0) + beside.get(n, 0.0) for n in found.compute[a:b]) for a, b in itertools.pairwise(cuts)
    ]
    place = {cut: i for i, cut in enumerate(cuts)}
    names, every = list(group_costs), list(group_costs.values())
    transfers = tuple(
        GraphTransfer(
            name=message.node.name,
            group=names.index(message.group),
            kind=message.kind,
            key=message.key,
            num_bytes=message.num_bytes,
            num_tensors=len(message.tensors),
            first=place[window.first],
            last=place[window.last],
            needed=place[window.needed],
            not_before=place[max(window.not_before.values())],
            after=window.after,
            packing=packing.get(message.index, 0.0),
            unpacking=unpacking.get(message.index, 0.0),
            start=place[window.start],
            waited=place[min(window.waited.values())],
        )
        for message, window in zip(messages, found.of, strict=True)
    )

    @functools.cache
    def cost(group: int, kind: str, num_bytes: int, num_tensors: int) -> float:
        return every[group].seconds(kind, num_bytes, num_tensors)

    return GraphProblem(tuple(items), transfers, tuple(group.link for group in every), cost, costs.profile.contention)


def _seconds(graph: Graph, found: Windows, costs: Costs) -> dict[Node, float]:
    """Return seconds of each kernel by its last computing node; they do not depend on where light nodes run."""
    places = {node: i for i, node in enumerate(found.compute)}
    known = [n for n in graph.nodes if "val" in n.meta and (n in places or n in found.light)]
    seconds: dict[Node, float] = {}
    for group, work in kernels_of(known, fused=costs.fused):
        last = max(group, key=lambda node: places.get(node, -1))
        seconds[last] = seconds.get(last, 0.0) + float(costs.kernel(work))
    return seconds


def _light_seconds(
    graph: Graph, messages: Sequence[Message], found: Windows, seconds: Mapping[Node, float]
) -> tuple[dict[int, float], dict[int, float], dict[Node, float]]:
    """Return seconds of light nodes: by the message they pack, by the message they unpack, and by compute that asks."""
    of_wait = {wait: m.index for m in messages for wait in m.waits}
    of_launch = {m.node: m.index for m in messages}
    follows: dict[Node, int] = {}
    for node in graph.nodes:
        if node in found.light:
            sources = [of_wait.get(source, follows.get(source, -1)) for source in node.all_input_nodes]
            if (source := max(sources, default=-1)) >= 0:
                follows[node] = source
    part_of = {part: node for node in found.compute for part in parts(node)}
    asks: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op != "output" and node not in found.light:
            for light in asked_for(node.all_input_nodes, lambda each: each in found.light and each not in asks):
                asks[light] = part_of.get(node, node)
    closing = {m.index for m, window in zip(messages, found.of, strict=True) if window.needed == len(found.compute)}
    packing, unpacking = defaultdict[int, float](float), defaultdict[int, float](float)
    beside = defaultdict[Node, float](float)
    last = found.compute[-1:]
    for node in graph.nodes:
        taken = seconds.get(node, 0.0) if node in found.light else 0.0
        asking = asks.get(node)
        if asking in of_launch:
            packing[of_launch[asking]] += taken
        elif asking is not None:
            beside[asking] += taken
        elif taken and (follows.get(node, -1) in closing or not last):
            unpacking[follows.get(node, 0)] += taken
        elif taken:
            beside[last[0]] += taken
    return packing, unpacking, beside


@dataclass(frozen=True)
class Writer:
    """A graph, and its collectives."""

    graph: Graph  # whose nodes the others name
    messages: list[Message]  # its collectives
    windows: Windows  # its nodes by role
    cuts: list[int]  # the number of compute nodes before each position of the problem

    @cached_property
    def given(self) -> list[Node]:
        """The nodes between inputs and output, as the graph has them."""
        return [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]

    def order(self, problem: GraphProblem, schedule: GraphSchedule, outcome: GraphRun) -> list[Node]:
        """Return the nodes between inputs and output in the order of a schedule; a bucket's side by side."""
        return _Order(self, problem, schedule, outcome).nodes()

    def write(self, order: Sequence[Node], schedule: GraphSchedule) -> dict[Node, tuple[str, ...]]:
        """Put the graph's nodes into an order, and join buckets; return former launches by the new ones."""
        assert set(order) == set(self.given), "an order has every node"
        anchor = next(iter(self.graph.find_nodes(op="output")))
        for node in order:
            anchor.prepend(node)
        names = {}
        for _, transfers in schedule:
            members = [self.messages[index] for index in transfers]
            held = tuple(member.node.name for member in members)
            names[self._join(members) if len(transfers) > 1 else members[0].node] = held
        self.graph.lint()
        return names

    def _join(self, members: list[Message]) -> Node:
        """Replace launches that stand side by side with one, and their results with its parts."""
        first = members[0]
        tensors = [tensor for member in members for tensor in member.tensors]
        vals = [val for m in members for val in pytree.tree_leaves(m.node.meta["val"])]
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

    def peak_of(self, problem: GraphProblem, schedule: GraphSchedule, outcome: GraphRun) -> int:
        """Return the most bytes alive at once in a schedule."""
        return self.peak(self.order(problem, schedule, outcome), schedule)

    def peak(self, order: Sequence[Node], schedule: GraphSchedule = ()) -> int:
        """Return the most bytes alive at once, if nodes run in an order; a bucket's inputs live to its last wait."""
        owner, size, sources, results, always = self._memory
        given: dict[Node, list[Node]] = {}
        for _, transfers in schedule:
            members = [self.messages[index] for index in transfers]
            tensors = dict.fromkeys(owner[tensor] for member in members for tensor in member.tensors)
            held = [tensor for tensor in tensors if tensor not in results]
            given.update({wait: held for member in members for wait in member.waits} if len(transfers) > 1 else {})
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
        least = [always + alive for alive in itertools.accumulate(change[:-1])]
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


class _Order:
    def __init__(self, writer: Writer, problem: GraphProblem, schedule: GraphSchedule, outcome: GraphRun) -> None:
        self.writer, self.problem, self.schedule = writer, problem, schedule
        self.waits = {wait for message in writer.messages for wait in message.waits}
        self.placed: dict[Node, None] = {}
        self.due: dict[int, list[Node]] = {}
        place = {transfer: number for number, (_, transfers) in enumerate(schedule) for transfer in transfers}
        for message, window in zip(writer.messages, writer.windows.of):
            number = place[message.index]
            ended = self._ended(number, outcome)
            closing = window.needed == len(writer.windows.compute)
            for wait in message.waits:
                due = max(ended, window.not_before[wait]) if closing else window.due[wait]
                self.due.setdefault(min(due, window.due[wait]), []).append(wait)

    def _ended(self, number: int, outcome: GraphRun) -> int:
        """Return the number of compute nodes after which a bucket has ended, with some time to spare."""
        position, _ = self.schedule[number]
        if self.problem.prompt:
            return self.writer.cuts[position]
        start, end = outcome.starts[number]
        reached = bisect.bisect_left(outcome.reached, end + (end - start))
        return self.writer.cuts[max(position, min(reached, self.problem.end))]

    def nodes(self) -> list[Node]:
        """Return buckets and waits where they are due, and compute in its order."""
        compute, upcoming = self.writer.windows.compute, 0
        starts = [self.writer.cuts[position] for position, _ in self.schedule]
        for position in range(len(compute) + 1):
            while upcoming < len(starts) and starts[upcoming] <= position:
                self._start(self.schedule[upcoming][1])
                upcoming += 1
            for wait in self.due.get(position, ()):
                if position < len(compute) or self.problem.prompt:
                    self._place(wait)
            for node in compute[position : position + 1]:
                self._place(node)
        for node in self.writer.given:
            self._place(node)
        return list(self.placed)

    def _start(self, transfers: tuple[int, ...]) -> None:
        """Place the inputs of a bucket's messages, then all of these."""
        members = [self.writer.messages[index] for index in transfers]
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
