"""The clock of a step: what the executors of a lowered program do, in order, and when that begins and ends.

One compute stream, one channel for each link: in the node, beyond it, and to the host. A collective or a copy begins
when it is launched and its link is free; compute waits where the program waits. The model's own collectives are
launched where the model has them; where compute waits for one at once, contention slows it down as it does compute.
Seconds and bytes may be numbers (then `timeline` shows the step) or sympy expressions (then `formulas` does): both are
the result of this one clock. `simulator.py` runs schedules of the abstract problem, and memory after every event.

The timeline is a graph: a node is an event, by its index.

    gather a ---> wait a ---> region_0 ---> wait b ---> region_1      program order
        `---------------> gather b -----------^                      queue of the link, data
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch.fx import Node

from graphshard.cost.costs import Costs, ModelCollective, ModelKind, model_collective
from graphshard.cost.scalars import Scalar, is_zero, maximum, slowed
from graphshard.ir.collective_regions import moves_data
from graphshard.ir.graph import WAIT, is_average, is_collective, is_exchanged, kind_of, launch_of, module_of
from graphshard.ir.mesh import Mesh
from graphshard.ir.operators import ARRIVED, DOWNLOAD, MODEL_WAIT, RELOAD, UPLOADS
from graphshard.ir.plan import CollectiveKind
from graphshard.ir.program import Phase, Program

# The links of copies.
HOST_LINKS = ("host", "to_host")
LaunchKind = CollectiveKind | ModelKind | Literal["upload", "download"]


@dataclass(frozen=True)
class TimedEvent:
    """An action of an executor."""

    name: str  # of the region, bucket or copied value
    phase: str  # "forward" or "backward"
    order: int  # regions that were called before, in the phase
    node: Node | None  # of the graph; None after the last one


@dataclass(frozen=True)
class TimedCall(TimedEvent):
    """A region runs."""

    where: str  # the modules that it computes
    seconds: Scalar  # that it takes
    alone: bool  # the seconds are measured without collectives next to it
    moves: bool = False  # it only casts or copies for collectives


@dataclass(frozen=True)
class Launch(TimedEvent):
    """A collective, or a copy to or from the host, is launched."""

    kind: LaunchKind
    link: str  # "node" or "network" of a collective, "host" of an upload and "to_host" of a download, which do not meet
    num_bytes: Scalar  # of the full tensors of a collective
    seconds: Scalar  # that it takes once its link is free
    where: str = ""  # the module of the model that communicates; "" for what carries parameters and gradients
    at_once: bool = False  # the model communicates, and compute waits until it has ended
    behind: str = ""  # another link; it begins when all that was launched on that has ended, too


@dataclass(frozen=True)
class TimedWait(TimedEvent):
    """Compute goes on when the event at the index `launch` has ended."""

    launch: int


@dataclass(frozen=True)
class Sizes:
    """Sizes and costs, which are numbers or expressions."""

    costs: Costs  # seconds of collectives and copies
    mesh: Mesh  # whose axes the collectives run over
    region: Mapping[str, Scalar]  # seconds of one call of a region, by its name
    sent: Callable[[Node], Scalar]  # bytes of a collective that carries parameters or gradients, by its node
    copied: Callable[[Node], Scalar]  # bytes of a copy to or from the host, by its node
    model: Callable[[Node], ModelCollective | None] = model_collective  # a node's collective if it is the model's own


def events_of(program: Program, costs: Costs, sizes: Sizes) -> list[TimedEvent]:
    """Return what a lowered program does in a step, in the order of its executors.

    `costs` are on the program's own mesh, which says what link a collective takes.
    """
    measured = {name for name, key in program.region_names.items() if key in costs.measured}
    moving = {name for name, key in program.region_names.items() if moves_data(program.regions[key])}
    axes = {axis.name for axis in program.mesh.every_axis}  # one that is installed names process groups instead
    events: list[TimedEvent] = []
    for name, phase in program.phases.items():
        order = 0
        started: dict[Node, int] = {}
        for node in phase.module.graph.nodes:
            if is_collective(node):
                started[node] = len(events)
                events.append(_collective(program, costs, sizes, node, name, order))
            elif node.target is DOWNLOAD or node.target in UPLOADS:
                started[node] = len(events)
                events.append(_copy(phase, sizes, node, name, order))
            elif (sent := sizes.model(node)) is not None and sent.axis in axes:
                started[node] = len(events)
                events.append(_of_model(program, costs, sizes, node, sent, name, order))
                if sent.at_once:
                    events.append(TimedWait(sent.name, name, order, node, len(events) - 1))
            elif node.target is MODEL_WAIT and node.all_input_nodes[0] not in started:
                pass  # of a model's collective that is left out
            elif node.target in (WAIT, ARRIVED, MODEL_WAIT):
                launch = started[launch_of(node) if node.target is WAIT else node.all_input_nodes[0]]
                events.append(TimedWait(events[launch].name, name, order, node, launch))
            elif node.op == "call_module":
                region = str(node.target)
                seconds, alone = sizes.region[region], region not in measured
                where, moves = module_of(node), region in moving
                events.append(TimedCall(region, name, order, node, where, seconds, alone, moves))
                order += 1
        # Saved values are waited for where they are copied back.
        saved = {node for node, slot in zip(phase.results, phase.outputs) if slot.kind == "saved"}
        ends = (i for node, i in started.items() if node.target is DOWNLOAD and node not in saved)
        events += [TimedWait(events[i].name, name, order, None, i) for i in ends]
    return events


def _collective(program: Program, costs: Costs, sizes: Sizes, node: Node, phase: str, order: int) -> Launch:
    assert program.plan is not None
    bucket = program.plan.bucket(node.meta["bucket"])
    kind, size, axis = kind_of(node), sizes.sent(node), sizes.mesh.named(bucket.axis)
    num_tensors = len(node.all_input_nodes)
    if is_exchanged(node):
        seconds = sizes.costs.exchange(size, axis, num_tensors, kind)
    else:
        seconds = sizes.costs.collective(kind, size, num_tensors, axis, averages=is_average(node))
    link = costs.link(program.mesh.named(bucket.axis))
    return Launch(bucket.name, phase, order, node, kind, link, size, seconds)


def _of_model(
    program: Program, costs: Costs, sizes: Sizes, node: Node, sent: ModelCollective, phase: str, order: int
) -> Launch:
    seconds = sent.seconds(sizes.costs, sizes.mesh.named(sent.axis))
    link = costs.link(program.mesh.named(sent.axis))
    where = module_of(node)
    return Launch(sent.name, phase, order, node, sent.kind, link, sent.num_bytes, seconds, where, sent.at_once)


def _copy(phase: Phase, sizes: Sizes, node: Node, name: str, order: int) -> Launch:
    kind: LaunchKind = "download" if node.target is DOWNLOAD else "upload"
    (source,) = node.all_input_nodes
    slots = phase.slot_of()
    what = slots[source].name if source in slots else f"%{node.meta['number']}"
    size = sizes.copied(node)
    link = "host" if kind == "upload" else "to_host"
    seconds, behind = sizes.costs.host_copy(size), HOST_LINKS[1] if node.target is RELOAD else ""
    return Launch(f"{kind} {what}", name, order, node, kind, link, size, seconds, behind=behind)


@dataclass
class Times:
    """When events begin and end, one entry for each; a launch begins when its link is free."""

    begins: list[Scalar] = field(default_factory=list)
    ends: list[Scalar] = field(default_factory=list)
    # What contention adds to calls, one entry for each that may be slowed down.
    slower: list[Scalar] = field(default_factory=list)

    def step(self, events: Sequence[TimedEvent]) -> Scalar:
        """Seconds until compute is done."""
        ends = [end for event, end in zip(events, self.ends) if not isinstance(event, Launch)]
        return ends[-1] if ends else 0.0


def run(
    events: Sequence[TimedEvent], contention: Scalar, define: Callable[[str, Scalar], Scalar] | None = None
) -> Times:
    """Run events through the clock; compute is slower by `contention` while a link is busy.

    `define` takes a name and a value that later times are made of, and returns a short expression to use for it.
    """
    define = define or (lambda _, value: value)
    found = Times()
    compute: Scalar = 0.0
    free: dict[str, Scalar] = {}  # by link
    for event in events:
        begin = compute
        if isinstance(event, Launch):
            begin = maximum(compute, free.get(event.link, compute))
            if event.behind in free:
                begin = maximum(begin, free[event.behind])
            end = begin + event.seconds
            if event.at_once and not is_zero(contention):
                beside = [free[link] for link in free if link != event.link]
                busy = maximum(*beside, begin) - begin if beside else 0.0
                end += slowed(event.seconds, busy, contention) - event.seconds
            end = free[event.link] = define(f"end {event.name}", end)
        elif isinstance(event, TimedWait):
            end = compute = define(f"after wait {event.name}", maximum(found.ends[event.launch], compute))
        else:
            assert isinstance(event, TimedCall)
            end = compute + event.seconds
            if event.alone and not is_zero(contention):
                busy = maximum(*free.values(), compute) - compute
                found.slower.append(define("slower", slowed(event.seconds, busy, contention) - event.seconds))
                end = define(f"after {event.name}", end + found.slower[-1])
            compute = end
        found.begins.append(begin)
        found.ends.append(end)
    return found


# Fraction of the step below which seconds are rounding.
_ROUNDING = 1e-12

# A node before all events.
_BEGIN = -1


class TimelineDag:
    """The timeline as a graph: critical path, slack, and what delays a wait.

    An event begins when all those before it have ended: the event of compute before it, the event on its link before
    it, and, for a wait, the launch. So the longest path to the last event, of compute, is as long as the step. Slack
    and gains leave contention out: with it nothing that runs next to compute would have any slack.
    """

    def __init__(self, events: Sequence[TimedEvent], times: Times) -> None:
        # By event; a wait takes none, it ends when its launch has.
        self.seconds = {_BEGIN: 0.0}
        # By event: the event of compute before it, and the launch that it queues for or waits for, if any.
        self._order: list[int] = []
        self._other: list[int | None] = []
        here, on_link = _BEGIN, dict[str, int]()
        for index, event in enumerate(events):
            length = times.ends[index] - times.begins[index]
            self.seconds[index] = 0.0 if isinstance(event, TimedWait) else length
            self._order.append(here)
            if isinstance(event, Launch):
                self._other.append(on_link.get(event.link))
                on_link[event.link] = index
            else:
                self._other.append(event.launch if isinstance(event, TimedWait) else None)
                here = index
        self.end = here

    def _before(self, event: int) -> tuple[int, ...]:
        """Return the events that must end before an event begins, compute first."""
        other = self._other[event]
        return (self._order[event],) if other is None else (self._order[event], other)

    def ends(self, seconds: Mapping[int, float] | None = None) -> dict[int, float]:
        """Return when every event ends; `seconds` replace those of some events."""
        seconds = {**self.seconds, **(seconds or {})}
        found = {_BEGIN: seconds[_BEGIN]}
        for event, (order, other) in enumerate(zip(self._order, self._other)):
            begin = found[order] if other is None else max(found[order], found[other])
            found[event] = begin + seconds[event]
        return found

    def step(self, seconds: Mapping[int, float] | None = None) -> float:
        """Return how long the step takes; `seconds` as for `ends`."""
        return self.ends(seconds)[self.end]

    @cached_property
    def critical_path(self) -> list[int]:
        """Events that follow each other without a gap from the begin of the step to its end."""
        return list(self._longest_path(self.end))[::-1]

    @cached_property
    def slack(self) -> dict[int, float]:
        """Seconds by which an event may end later, because it begins later or takes longer, and the step does not."""
        ends = self._ends
        latest = dict.fromkeys(ends, ends[self.end])
        for event in reversed(range(len(self._order))):
            begin = latest[event] - self.seconds[event]
            for before in self._before(event):
                latest[before] = min(latest[before], begin)
        rounding = _ROUNDING * ends[self.end]
        return {n: late - ends[n] if late - ends[n] > rounding else 0.0 for n, late in latest.items()}

    def gains(self, target: int) -> dict[int, float]:
        """Return by event how much earlier another would end if the event took no time, if it would."""
        behind = self._behind(target)
        # Indices are a topological order, so a path around an event has one edge that goes over its index.
        way = sorted(node for node in self._longest_path(target) if self.seconds[node])
        found, open_edges, edge = {}, list[tuple[float, int]](), 0
        for node in way:
            while edge < len(self._edges) and self._edges[edge][0] < node:
                before, after = self._edges[edge]
                if after in behind:
                    length = self._ends[before] + self.seconds[after] + behind[after]
                    heapq.heappush(open_edges, (-length, after))
                edge += 1
            while open_edges and open_edges[0][1] <= node:
                heapq.heappop(open_edges)
            round_it = -open_edges[0][0] if open_edges else 0.0
            found[node] = min(self.seconds[node], self._ends[target] - round_it)
        return self._without_rounding(found)

    def delays(self, wait: int) -> dict[int, float]:
        """Return by event how much shorter a wait would be if the event took no time."""
        before = self.gains(self._order[wait])
        return self._without_rounding({n: gain - before.get(n, 0.0) for n, gain in self.gains(wait).items()})

    @cached_property
    def _ends(self) -> dict[int, float]:
        return self.ends()

    @cached_property
    def _edges(self) -> list[tuple[int, int]]:
        """Pairs of events of which one must end before the other begins, in order."""
        return sorted((before, event) for event in range(len(self._order)) for before in self._before(event))

    def _longest_path(self, target: int) -> Iterator[int]:
        """Yield the longest path backwards from an event; of two that are equally long the one along compute."""
        while target != _BEGIN:
            yield target
            target = max(self._before(target), key=self._ends.__getitem__)

    def _behind(self, target: int) -> dict[int, float]:
        """Return by the events that another depends on the longest path from their end to that one's."""
        found = {target: 0.0}
        for event in range(target, _BEGIN, -1):
            if event in found:
                length = found[event] + self.seconds[event]
                for before in self._before(event):
                    found[before] = max(found.get(before, 0.0), length)
        return found

    def _without_rounding(self, found: Mapping[int, float]) -> dict[int, float]:
        least = _ROUNDING * self._ends[self.end]
        return {node: seconds for node, seconds in found.items() if seconds > least}
