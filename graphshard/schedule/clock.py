"""The clock of a step: what the executors of a lowered program do, in order, and when that begins and ends.

One compute stream, one channel for each link: in the node, beyond it, and to the host. A collective or a copy begins
when it is launched and its link is free; compute waits where the program waits. What the model itself communicates is
launched where the model has it; where compute waits for it at once, contention slows it down as it does compute.
Seconds and bytes may be numbers (then `timeline` shows the step) or sympy expressions (then `formulas` does): both are
the result of this one clock.

`simulate` has a clock of its own. It runs schedules of the abstract problem, before there is a program: with items and
positions in place of regions and waits, copies of packed buckets on the compute stream, and the memory after every
event. Only what contention costs is common to both, and is `graphshard.cost.scalars.slowed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch.fx import Node

from graphshard.cost.collectives import ModelCollective, ModelKind, model_collective
from graphshard.cost.costs import Costs
from graphshard.cost.scalars import Scalar, is_zero, maximum, slowed
from graphshard.ir.graph import WAIT, is_collective, kind_of, launch_of, module_of
from graphshard.ir.mesh import Mesh
from graphshard.ir.operators import ARRIVED, DOWNLOAD, RELOAD, SETTLED, UPLOADS
from graphshard.ir.plan import CollectiveKind
from graphshard.ir.program import Phase, Program

# The links of copies.
HOST_LINKS = ("host", "to_host")
LaunchKind = CollectiveKind | ModelKind | Literal["upload", "download"]


@dataclass(frozen=True)
class Event:
    """Something that an executor does.

    Attributes:
        name: of the region or bucket, or of what is copied.
        phase: "forward" or "backward".
        order: regions that were called before, in the phase.
        node: of the graph; None for what follows the last one.
    """

    name: str
    phase: str
    order: int
    node: Node | None


@dataclass(frozen=True)
class Call(Event):
    """A region runs.

    Attributes:
        where: the modules that it computes.
        seconds: that it takes.
        alone: the seconds are those without collectives beside it.
    """

    where: str
    seconds: Scalar
    alone: bool


@dataclass(frozen=True)
class Launch(Event):
    """A collective, or a copy to or from the host, is launched.

    Attributes:
        link: "node" or "network" of a collective, "host" of an upload and "to_host" of a download, which do not meet.
        num_bytes: of the full tensors of a collective.
        seconds: that it takes once its link is free.
        behind: another link; it begins when all that was launched on that has ended, too.
        where: the module of the model that communicates; "" for what carries parameters and gradients.
        at_once: the model communicates, and compute waits until it has ended.
    """

    kind: LaunchKind
    link: str
    num_bytes: Scalar
    seconds: Scalar
    where: str = ""
    at_once: bool = False
    behind: str = ""


@dataclass(frozen=True)
class Wait(Event):
    """Compute goes on when the event at the index `launch` has ended."""

    launch: int


@dataclass(frozen=True)
class Sizes:
    """What numbers and expressions differ in.

    Attributes:
        costs: seconds of collectives and copies.
        mesh: whose axes the collectives run over.
        region: seconds of one call of a region, by its name.
        sent: bytes of a collective that carries parameters or gradients, from its node.
        model: what a node sends if it is a collective of the model.
        copied: bytes of a copy to or from the host, from its node.
    """

    costs: Costs
    mesh: Mesh
    region: Mapping[str, Scalar]
    sent: Callable[[Node], Scalar]
    copied: Callable[[Node], Scalar]
    model: Callable[[Node], ModelCollective | None] = model_collective


def events_of(program: Program, costs: Costs, sizes: Sizes) -> list[Event]:
    """What a lowered program does in a step, in the order of its executors.

    Args:
        costs: on the program's own mesh, which says what link a collective takes.
    """
    measured = {name for name, key in program.region_names.items() if key in costs.measured}
    axes = {axis.name for axis in program.mesh.every_axis}  # one that is installed names process groups instead
    events: list[Event] = []
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
                    events.append(Wait(sent.name, name, order, node, len(events) - 1))
            elif node.target is SETTLED and node.all_input_nodes[0] not in started:
                pass  # of a collective of the model that is left out
            elif node.target in (WAIT, ARRIVED, SETTLED):
                launch = started[launch_of(node) if node.target is WAIT else node.all_input_nodes[0]]
                events.append(Wait(events[launch].name, name, order, node, launch))
            elif node.op == "call_module":
                region = str(node.target)
                seconds, alone = sizes.region[region], region not in measured
                events.append(Call(region, name, order, node, module_of(node), seconds, alone))
                order += 1
        # What is saved is waited for where it is copied back.
        saved = {node for node, slot in zip(phase.results, phase.outputs) if slot.kind == "saved"}
        ends = (i for node, i in started.items() if node.target is DOWNLOAD and node not in saved)
        events += [Wait(events[i].name, name, order, None, i) for i in ends]
    return events


def _collective(program: Program, costs: Costs, sizes: Sizes, node: Node, phase: str, order: int) -> Launch:
    assert program.plan is not None
    bucket = program.plan.bucket(node.meta["bucket"])
    kind, size, axis = kind_of(node), sizes.sent(node), sizes.mesh.named(bucket.axis)
    if node.meta.get("exchanged"):
        seconds = sizes.costs.exchange(size, axis)
    else:
        seconds = sizes.costs.collective(kind, size, len(node.all_input_nodes), axis)
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
    """When events begin and end, one entry for each; a launch begins when its link is free.

    Attributes:
        slower: what contention adds to calls, one entry for each that may be slowed down.
    """

    begins: list[Scalar] = field(default_factory=list)
    ends: list[Scalar] = field(default_factory=list)
    slower: list[Scalar] = field(default_factory=list)

    def step(self, events: Sequence[Event]) -> Scalar:
        """Seconds until compute is done."""
        ends = [end for event, end in zip(events, self.ends) if not isinstance(event, Launch)]
        return ends[-1] if ends else 0.0


def _undefined(_: str, value: Scalar) -> Scalar:
    return value


def run(events: Sequence[Event], contention: Scalar, define: Callable[[str, Scalar], Scalar] = _undefined) -> Times:
    """Run events through the clock.

    Args:
        contention: share by which compute is slower while a link is busy.
        define: gives what later times are made of a name, so that expressions stay short; takes a name and the value,
            and returns what to use for it.
    """
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
        elif isinstance(event, Wait):
            end = compute = define(f"after wait {event.name}", maximum(found.ends[event.launch], compute))
        else:
            assert isinstance(event, Call)
            end = compute + event.seconds
            if event.alone and not is_zero(contention):
                busy = maximum(*free.values(), compute) - compute
                found.slower.append(define("slower", slowed(event.seconds, busy, contention) - event.seconds))
                end = define(f"after {event.name}", end + found.slower[-1])
            compute = end
        found.begins.append(begin)
        found.ends.append(end)
    return found
