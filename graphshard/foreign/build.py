"""From the windows of a foreign graph to the course that is searched."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

from torch.fx import Graph, Node

from graphshard.cost.costs import Costs
from graphshard.cost.kernels import kernels_of
from graphshard.foreign.course import Course, Leg
from graphshard.foreign.groups import Wire
from graphshard.foreign.messages import Message
from graphshard.foreign.windows import Windows, parts


def cuts_of(found: Windows) -> list[int]:
    """The positions at which something may start, is needed, or stands in the graph, and both ends."""
    cuts = {0, len(found.compute)}
    for window in found.of:
        cuts |= {window.first, window.last, window.start, *window.due.values()}
        cuts |= {*window.waited.values(), *window.not_before.values()}
    return sorted(cuts)


def course_of(
    graph: Graph,
    messages: Sequence[Message],
    found: Windows,
    cuts: Sequence[int],
    costs: Costs,
    wires: Mapping[str, Wire],
) -> Course:
    """Items are the compute between two cuts; light nodes take the time of the leg, or of the compute, that asks."""
    seconds = _seconds(graph, found, costs)
    packing, unpacking, beside = _owners(graph, messages, found, seconds)
    names = list(wires)
    items = [
        sum(seconds.get(n, 0.0) + beside.get(n, 0.0) for n in found.compute[a:b]) for a, b in itertools.pairwise(cuts)
    ]
    place = {cut: i for i, cut in enumerate(cuts)}
    legs = []
    for message, window in zip(messages, found.of, strict=True):
        legs.append(
            Leg(
                name=message.node.name,
                wire=names.index(message.group),
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
        )
    every = list(wires.values())

    @functools.cache
    def cost(wire: int, kind: str, num_bytes: int, num_tensors: int) -> float:
        return every[wire].seconds(kind, num_bytes, num_tensors)

    links = tuple(wire.link for wire in every)
    return Course(tuple(items), tuple(legs), links, cost, costs.profile.contention)


def _seconds(graph: Graph, found: Windows, costs: Costs) -> dict[Node, float]:
    """Seconds of each kernel, by the last node of it that computes; they do not depend on where light nodes run."""
    places = {node: i for i, node in enumerate(found.compute)}
    known = [n for n in graph.nodes if "val" in n.meta and (n in places or n in found.light)]
    seconds: dict[Node, float] = {}
    for group, work in kernels_of(known, fused=costs.fused):
        last = max(group, key=lambda node: places.get(node, -1))
        seconds[last] = seconds.get(last, 0.0) + float(costs.kernel(work))
    return seconds


def _owners(
    graph: Graph, messages: Sequence[Message], found: Windows, seconds: Mapping[Node, float]
) -> tuple[dict[int, float], dict[int, float], dict[Node, float]]:
    """Seconds of light nodes by what asks first: a launch, or compute; at the end, by the message that they follow."""
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
            stack = [source for source in node.all_input_nodes if source in found.light]
            while stack:
                light = stack.pop()
                if light not in asks:
                    asks[light] = part_of.get(node, node)
                    stack += [source for source in light.all_input_nodes if source in found.light]
    closing = {m.index for m, window in zip(messages, found.of, strict=True) if window.needed == len(found.compute)}
    packing: dict[int, float] = {}
    unpacking: dict[int, float] = {}
    beside: dict[Node, float] = {}
    last = found.compute[-1:]
    for node in graph.nodes:
        taken = seconds.get(node, 0.0) if node in found.light else 0.0
        asking = asks.get(node)
        if asking in of_launch:
            packing[of_launch[asking]] = packing.get(of_launch[asking], 0.0) + taken
        elif asking is not None:
            beside[asking] = beside.get(asking, 0.0) + taken
        elif taken and (follows.get(node, -1) in closing or not last):
            unpacking[follows.get(node, 0)] = unpacking.get(follows.get(node, 0), 0.0) + taken
        elif taken:
            beside[last[0]] = beside.get(last[0], 0.0) + taken
    return packing, unpacking, beside
