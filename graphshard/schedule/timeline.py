"""Estimate of when the regions and collectives of a lowered program run.

Seconds that compute waits are exposed communication.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from torch.fx import Node

from graphshard.cost.costs import MODEL_KINDS, Costs
from graphshard.cost.kernels import num_bytes
from graphshard.ir.graph import kind_of
from graphshard.ir.program import Program
from graphshard.schedule._program_memory import workspaces
from graphshard.schedule.clock import (
    HOST_LINKS,
    Launch,
    Sizes,
    TimedCall,
    TimedEvent,
    TimedWait,
    TimelineDag,
    Times,
    events_of,
    run,
)

# Reason of a wait of compute: it is for the phase's first or last collective; the link was busy; the launch was too
# late, or is longer than the compute next to it; it is for a collective of the model.
Why = Literal["head", "tail", "link", "late", "model"]

# Why compute waits, in words.
WHY: dict[Why, str] = {
    "head": "the phase's first collective",
    "tail": "the phase's last collective",
    "link": "it had to queue for the link",
    "late": "launched too late, or longer than what it could hide behind",
    "model": "the model's own collective, which runs where the model has it",
}

# Kinds that compute waits for before it computes, and not after.
_BEFORE = ("gather", "upload")

# Waits that are explained: in a deep model all of them take seconds.
_DELAYS = 20


@dataclass(frozen=True)
class Step:
    """One call of a region, one collective, or one wait that holds compute up."""

    # "compute", "gather", "reduce", "all_reduce", "upload", "download" or "exposed"; or the kind of a collective of the
    # model.
    kind: str
    name: str  # of the region, bucket or copied value
    where: str  # the modules a region computes, or the one that communicates
    phase: str  # "forward" or "backward"
    start: float  # seconds from the start of the step
    end: float
    event: int  # index in `Estimate.events`
    num_bytes: int = 0  # of the full tensors of a collective
    # Regions that were called before, in the phase; for a collective when it is launched, for a wait when it waits.
    order: int = 0
    link: str = ""  # "node" or "network" of a collective, "host" of an upload, "to_host" of a download
    why: Why | None = None  # reason of a wait
    behind: str = ""  # the bucket that a collective had to queue for, or ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Estimate:
    """A step in time."""

    events: list[TimedEvent]  # of the clock
    times: Times
    steps: list[Step]
    compute: float  # seconds that the regions take alone; with collectives next to them it may be more
    at_once: float  # seconds that the model's own collectives take once their link is free
    phases: dict[str, tuple[float, float]]  # when each begins and ends
    node_times: dict[Node, float]  # compute's clock after each node
    workspace: dict[Node, int]  # by the call of a region, most bytes inside it beyond its inputs and results

    def total(self, *kinds: str) -> float:
        """Return the seconds of all steps of the given kinds."""
        return sum(step.seconds for step in self.steps if step.kind in kinds)

    @cached_property
    def waits(self) -> dict[str, int]:
        """By bucket, the regions of its phase that were called before compute waits for it."""
        return {e.name: e.order for e in reversed(self.events) if isinstance(e, TimedWait)}

    @cached_property
    def dag(self) -> TimelineDag:
        """The timeline as a graph: critical path and slack, by indices of events."""
        return TimelineDag(self.events, self.times)

    @cached_property
    def critical(self) -> list[Step]:
        """Calls, collectives and copies that follow each other without a gap from the begin of the step to its end."""
        by_event = {step.event: step for step in self.steps if step.kind != "exposed"}
        return [by_event[event] for event in self.dag.critical_path if self.dag.seconds[event]]

    @cached_property
    def delays(self) -> dict[int, dict[str, float]]:
        """By event of the longest waits, and by name: how much shorter the wait would be without it, longest first."""
        found = {}
        for step in self.waits_for[:_DELAYS]:
            named = defaultdict[str, float](float)
            for event, seconds in self.dag.delays(step.event).items():
                named[self.events[event].name] += seconds
            found[step.event] = dict(sorted(named.items(), key=lambda item: -item[1]))
        return found

    @cached_property
    def copied(self) -> dict[Node, float]:
        """When copies to the host end, by the nodes that launch them."""
        pairs = zip(self.events, self.times.ends)
        return {
            e.node: end for e, end in pairs if isinstance(e, Launch) and e.kind == "download" and e.node is not None
        }

    @property
    def communication(self) -> float:
        """Seconds of all collectives."""
        return self.total("gather", "reduce", "all_reduce", *MODEL_KINDS)

    def by_link(self) -> dict[str, float]:
        """Seconds of the collectives on each link."""
        found: dict[str, float] = {}
        for step in self.steps:
            if step.link:
                found[step.link] = found.get(step.link, 0.0) + step.seconds
        return found

    @property
    def waits_for(self) -> list[Step]:
        """Waits of compute, longest first."""
        return sorted((step for step in self.steps if step.kind == "exposed"), key=lambda step: -step.seconds)

    @property
    def ends(self) -> Ends:
        """Waits at the ends of the step."""
        order = []
        for event, begin, end in zip(self.events, self.times.begins, self.times.ends):
            if isinstance(event, TimedCall):
                order.append(("cast" if event.moves else "compute", end - begin))
            elif isinstance(event, TimedWait):
                sent = self.events[event.launch]
                if isinstance(sent, Launch) and sent.kind not in MODEL_KINDS:
                    order.append((sent.kind, end - begin))
        return ends_of(order)

    @property
    def seconds(self) -> float:
        return max((end for _, end in self.phases.values()), default=0.0)


class Ends(NamedTuple):
    """Seconds that compute waits where nothing is there to hide them: for first gathers, and for last reductions."""

    head: float
    tail: float


def ends_of(order: Sequence[tuple[str, float]]) -> Ends:
    """Return what is exposed at the ends of a step.

    `order` has compute's actions and their seconds: "compute", "cast" (of shards or gradients, for collectives), or the
    kind of collective that compute waits for. The ends are before the first and after the last "compute".
    """

    def outside(actions: Iterable[tuple[str, float]]) -> Iterator[tuple[str, float]]:
        return itertools.takewhile(lambda action: action[0] != "compute", actions)

    head = sum(seconds for kind, seconds in outside(order) if kind in _BEFORE)
    tail = sum(seconds for kind, seconds in outside(reversed(order)) if kind not in (*_BEFORE, "cast"))
    return Ends(head, tail)


def estimate(program: Program, costs: Costs) -> Estimate:
    """Run the executors of a lowered program through the clock."""
    events = timed_events(program, costs, costs)
    times = run(events, costs.profile.contention)
    return Estimate(
        events=events,
        times=times,
        steps=list(steps_of(events, times)),
        compute=sum(event.seconds for event in events if isinstance(event, TimedCall)),
        at_once=sum(event.seconds for event in events if isinstance(event, Launch) and event.at_once),
        phases=_phases(program, events, times),
        node_times=_node_times(program, events, times),
        workspace=workspaces(program, costs),
    )


def timed_events(program: Program, costs: Costs, drawn: Costs) -> list[TimedEvent]:
    """Return the events of a lowered program's executors; `drawn` are costs for their seconds, or for samples."""
    seconds = {key: drawn.region(region) for key, region in program.regions.items()}
    regions = {name: seconds[key] for name, key in program.region_names.items()}
    return events_of(program, costs, Sizes(drawn, program.mesh, regions, sent_bytes, num_bytes))


def sent_bytes(node: Node) -> int:
    """Return the bytes of the full tensors of a collective; an all-reduce has shards."""
    return num_bytes(node) if kind_of(node) == "gather" else sum(map(num_bytes, node.all_input_nodes))


def steps_of(events: Sequence[TimedEvent], times: Times) -> Iterator[Step]:
    """Yield events with their times; a wait only if it holds compute up."""
    behind = _queued(events, times)
    launches = [event for event in events if isinstance(event, Launch)]
    collectives = [event for event in launches if event.link not in HOST_LINKS and event.kind not in MODEL_KINDS]
    first = {event.phase: event for event in reversed(collectives)}
    last = {event.phase: event for event in collectives}
    for index, event in enumerate(events):
        begin, end = times.begins[index], times.ends[index]
        step = Step("compute", event.name, "", event.phase, begin, end, index, order=event.order)
        if isinstance(event, TimedCall):
            yield replace(step, where=event.where)
        elif isinstance(event, Launch):
            found = {"kind": event.kind, "num_bytes": event.num_bytes, "link": event.link}
            yield replace(step, **found, where=event.where, behind=behind[index])
        elif isinstance(event, TimedWait) and end > begin:
            sent, queued = events[event.launch], behind[event.launch]
            assert isinstance(sent, Launch)
            why: Why = "link" if queued else "late"
            if sent.kind in MODEL_KINDS:
                why = "model"
            elif sent.kind == "gather" and sent is first.get(sent.phase):
                why = "head"
            elif sent.kind != "gather" and sent is last.get(sent.phase):
                why = "tail"
            yield replace(step, kind="exposed", where=sent.where, why=why, behind=queued)


def _queued(events: Sequence[TimedEvent], times: Times) -> dict[int, str]:
    """Return by the index of a launch what it queues for on its link, or ""."""
    found: dict[int, str] = {}
    before: dict[str, str] = {}
    now = 0.0
    for index, event in enumerate(events):
        if isinstance(event, Launch):
            found[index] = before[event.link] if times.begins[index] > now else ""
            before[event.link] = event.name
        else:
            now = times.ends[index]
    return found


def _phases(program: Program, events: Sequence[TimedEvent], times: Times) -> dict[str, tuple[float, float]]:
    """Return when each phase begins and ends."""
    found: dict[str, tuple[float, float]] = {}
    began = 0.0
    for name in program.phases:
        ends = [end for event, end in zip(events, times.ends) if event.phase == name and not isinstance(event, Launch)]
        found[name] = began, max(ends, default=began)
        began = found[name][1]
    return found


def _node_times(program: Program, events: Sequence[TimedEvent], times: Times) -> dict[Node, float]:
    """Return compute's clock after each node."""
    ends = {e.node: end for e, end in zip(events, times.ends) if e.node is not None and not isinstance(e, Launch)}
    found: dict[Node, float] = {}
    now = 0.0
    finished = _phases(program, events, times)
    for name, phase in program.phases.items():
        now = finished[name][0]
        for node in phase.module.graph.nodes:
            now = found[node] = ends.get(node, now)
    return found
