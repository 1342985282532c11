"""The scheduling problem of an external graph: items of compute, and legs that travel between two of them; its clock.

    items       0 |   1   |  2  | 3 |  4          compute between positions at which something may start or is needed
    leg a       [---------> first=0, last=needed=2
    leg b               [---------------> ...

Several links, each with a queue. A leg is a message of the graph; a bucket is several legs that start as one. Events
run through `clock.py`, as the steps of programs do.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.fx import Graph, Node

from graphshard.cost.costs import Costs
from graphshard.cost.kernels import kernels_of
from graphshard.schedule import clock
from graphshard.schedule.graph_collectives import Message, Wire
from graphshard.schedule.reordering_windows import Windows, parts


@dataclass(frozen=True)
class Leg:
    """A message as the search sees it; positions are those between items.

    Attributes:
        name: of its launch.
        wire: index of its group among the course's.
        kind: gather, reduce, all_reduce or all_to_all.
        key: legs with equal keys may travel together; None travels alone.
        num_bytes, num_tensors: that it costs.
        first, last: between which it may start.
        needed: at which it is waited for.
        not_before: at which it may be waited for.
        after: legs that must have arrived before it starts.
        packing: seconds of compute when it starts, for casts and copies.
        unpacking: seconds of compute when it has arrived.
        start, waited: where the graph has it.
    """

    name: str
    wire: int
    kind: str
    key: tuple[Any, ...] | None
    num_bytes: int
    num_tensors: int
    first: int
    last: int
    needed: int
    not_before: int
    after: tuple[int, ...]
    packing: float
    unpacking: float
    start: int
    waited: int


# Position, and legs that start as one there.
Bucket = tuple[int, tuple[int, ...]]
# Buckets in the order in which they start, which is the order of their positions.
Itinerary = tuple[Bucket, ...]


@dataclass(frozen=True)
class ItineraryRun:
    """Result of running an itinerary.

    Attributes:
        seconds: of all.
        exposed: seconds in which compute waits.
        starts: by bucket, when it begins on its link, and when it ends.
        reached: by position, when compute comes to it.
        waits: by bucket, when compute comes to its first wait, and how long it waits there.
    """

    seconds: float
    exposed: float
    starts: tuple[tuple[float, float], ...]
    reached: tuple[float, ...]
    waits: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Course:
    """Items and legs, and costs of legs.

    Attributes:
        seconds: per item.
        legs: in the order of the graph.
        links: by wire, the name of its link.
        cost: seconds of a launch for (wire, kind, bytes, tensors).
        contention: share by which compute is slower while a link is busy.
        prompt: what is needed at the end alone is waited for as soon as it has started, as its input takes memory.
    """

    seconds: tuple[float, ...]
    legs: tuple[Leg, ...]
    links: tuple[str, ...]
    cost: Callable[[int, str, int, int], float]
    contention: float
    prompt: bool = False

    @property
    def end(self) -> int:
        """The position after the last item."""
        return len(self.seconds)

    def link_of(self, leg: int) -> str:
        """Return the name of the link that carries a leg."""
        return self.links[self.legs[leg].wire]

    def bucket_seconds(self, legs: Sequence[int]) -> float:
        """Return the seconds of one launch of these."""
        first = self.legs[legs[0]]
        num_bytes = sum(self.legs[i].num_bytes for i in legs)
        return self.cost(first.wire, first.kind, num_bytes, sum(self.legs[i].num_tensors for i in legs))

    def window(self, legs: Sequence[int]) -> tuple[int, int]:
        """Return between which positions a bucket may start; the first is after the last if it cannot be."""
        return max(self.legs[i].first for i in legs), min(self.legs[i].last for i in legs)

    @cached_property
    def ancestors(self) -> tuple[frozenset[int], ...]:
        """By leg, the legs that it follows from without compute in between."""
        found: list[frozenset[int]] = []
        for leg in self.legs:
            found.append(frozenset(leg.after).union(*(found[i] for i in leg.after)))
        return tuple(found)

    @cached_property
    def classes(self) -> list[list[int]]:
        """Legs that may travel together as far as their keys say."""
        found: dict[object, list[int]] = {}
        for index, leg in enumerate(self.legs):
            found.setdefault(leg.key if leg.key is not None else index, []).append(index)
        return list(found.values())

    def may_join(self, legs: Sequence[int]) -> bool:
        """Return whether legs may travel as one."""
        keys = {self.legs[i].key for i in legs}
        if len(legs) > 1 and (len(keys) > 1 or None in keys):
            return False
        first, last = self.window(legs)
        return first <= last and all(self.ancestors[i].isdisjoint(legs) for i in legs)

    def as_given(self) -> Itinerary:
        """Return the graph's own order."""
        return tuple((leg.start, (index,)) for index, leg in enumerate(self.legs))


def run(course: Course, itinerary: Itinerary, *, as_given: bool = False) -> ItineraryRun | None:
    """Run an itinerary through the clock; return None if a leg would start before one that it is made of.

    Args:
        as_given: wait where the graph does, not where something needs it.
    """
    events: list[clock.TimedEvent] = []
    launched: dict[int, int] = {}  # event by leg
    bucket_of: dict[int, int] = {}
    waited: set[int] = set()
    due: dict[int, list[int]] = {}
    for index, leg in enumerate(course.legs):
        due.setdefault(leg.waited if as_given else leg.needed, []).append(index)

    def compute(seconds: float) -> None:
        if seconds > 0:
            events.append(clock.TimedCall("", "", 0, None, "", seconds, True))

    def wait(leg: int) -> bool:
        if leg not in launched:
            return False
        if leg not in waited:
            waited.add(leg)
            events.append(clock.TimedWait(str(bucket_of[leg]), "", 0, None, launched[leg]))
            compute(course.legs[leg].unpacking)
        return True

    def launch(number: int) -> bool:
        position, legs = itinerary[number]
        if not all(wait(earlier) for leg in legs for earlier in course.legs[leg].after):
            return False
        compute(sum(course.legs[leg].packing for leg in legs))
        for leg in legs:
            launched[leg], bucket_of[leg] = len(events), number
        seconds, link = course.bucket_seconds(legs), course.link_of(legs[0])
        events.append(clock.Launch(str(number), "", 0, None, "gather", link, 0, seconds))
        for leg in legs if course.prompt else ():
            if course.legs[leg].needed == course.end and position >= course.legs[leg].not_before:
                wait(leg)
        return True

    upcoming, reached = 0, []  # number of events before each position
    for position in range(course.end + 1):
        reached.append(len(events))
        while upcoming < len(itinerary) and itinerary[upcoming][0] <= position:
            if not launch(upcoming):
                return None
            upcoming += 1
        if not all(map(wait, due.get(position, ()))):
            return None
        if position < course.end:
            compute(course.seconds[position])
    return _outcome(events, clock.run(events, course.contention), reached, len(itinerary))


def _outcome(
    events: Sequence[clock.TimedEvent], times: clock.Times, reached: Sequence[int], buckets: int
) -> ItineraryRun:
    done = [0.0]  # when compute is done with each number of events
    starts: dict[str, tuple[float, float]] = {}
    waits: dict[str, tuple[float, float]] = {}
    exposed = 0.0
    for event, begin, end in zip(events, times.begins, times.ends, strict=True):
        if isinstance(event, clock.Launch):
            starts[event.name] = begin, end
        elif isinstance(event, clock.TimedWait):
            held = end - begin
            exposed += held
            if event.name not in waits or held > 0:
                waits[event.name] = begin, held
        done.append(done[-1] if isinstance(event, clock.Launch) else end)
    numbers = [str(number) for number in range(buckets)]
    return ItineraryRun(
        done[-1],
        exposed,
        tuple(starts[number] for number in numbers),
        tuple(done[count] for count in reached),
        tuple(waits[number] for number in numbers),
    )


def cuts_of(found: Windows) -> list[int]:
    """Return the positions at which something may start, is needed, or stands in the graph, and both ends."""
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
    """Return the course of a graph. Items are the compute between two cuts.

    Light nodes take the time of the leg, or of the compute, that asks for them first.
    """
    seconds = _seconds(graph, found, costs)
    packing, unpacking, beside = _light_seconds(graph, messages, found, seconds)
    items = [
        sum(seconds.get(n, 0.0) + beside.get(n, 0.0) for n in found.compute[a:b]) for a, b in itertools.pairwise(cuts)
    ]
    place = {cut: i for i, cut in enumerate(cuts)}
    names, every = list(wires), list(wires.values())
    legs = tuple(
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
        for message, window in zip(messages, found.of, strict=True)
    )

    @functools.cache
    def cost(wire: int, kind: str, num_bytes: int, num_tensors: int) -> float:
        return every[wire].seconds(kind, num_bytes, num_tensors)

    return Course(tuple(items), legs, tuple(wire.link for wire in every), cost, costs.profile.contention)


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
