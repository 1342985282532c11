"""Estimate when the regions and collectives of a lowered program run, and what memory they hold.

One compute stream, one channel for each link: in the node, beyond it, and to the host. A collective or a copy starts
when it is launched and its link is free; compute waits where the program waits. What it waits is exposed communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import Node

from graphshard.cost.costs import Costs
from graphshard.cost.kernels import num_bytes
from graphshard.ir.graph import WAIT, is_collective, is_view, kind_of, module_of
from graphshard.ir.mesh import Axis
from graphshard.ir.operators import ARRIVED, DOWNLOAD, UPLOAD
from graphshard.ir.program import Phase, Program
from graphshard.schedule.simulate import Why, why_waits

# Why compute waits, in words.
WHY: dict[Why, str] = {
    "head": "the phase's first collective",
    "tail": "the phase's last collective",
    "link": "it had to queue for the link",
    "late": "launched too late, or longer than what it could hide behind",
}


@dataclass(frozen=True)
class Step:
    """One call of a region, one collective, or one wait that holds compute up.

    Attributes:
        kind: "compute", "gather", "reduce", "all_reduce", "upload", "download" or "exposed".
        name: of the region or bucket, or of what is copied.
        where: the modules a region computes.
        phase: "forward" or "backward".
        start, end: seconds from the start of the step.
        num_bytes: of the full tensors of a collective.
        order: regions that were called before, in the phase; for a collective when it is launched, for a wait when
            it waits.
        link: "node" or "network" of a collective, "host" of a copy to or from it.
        why: compute waits, see `graphshard.schedule.simulate.Exposed`.
        behind: the bucket that a collective had to queue behind, or "".
    """

    kind: str
    name: str
    where: str
    phase: str
    start: float
    end: float
    num_bytes: int = 0
    order: int = 0
    link: str = ""
    why: Why | None = None
    behind: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Estimate:
    """A step in time.

    Attributes:
        compute: seconds that the regions take alone; with collectives beside them it may be more.
        waits: by bucket, the time and the order at which compute waits for it.
    """

    steps: list[Step] = field(default_factory=list)
    compute: float = 0.0
    waits: dict[str, tuple[float, int]] = field(default_factory=dict)
    phases: dict[str, tuple[float, float]] = field(default_factory=dict)
    node_times: dict[Node, float] = field(default_factory=dict)

    def total(self, *kinds: str) -> float:
        """Seconds of all steps of the given kinds."""
        return sum(step.seconds for step in self.steps if step.kind in kinds)

    @property
    def communication(self) -> float:
        """Seconds of all collectives."""
        return self.total("gather", "reduce", "all_reduce")

    def by_link(self) -> dict[str, float]:
        """Seconds of the collectives on each link."""
        found: dict[str, float] = {}
        for step in self.steps:
            if step.link:
                found[step.link] = found.get(step.link, 0.0) + step.seconds
        return found

    @property
    def waits_for(self) -> list[Step]:
        """What compute waits for, longest first."""
        return sorted((step for step in self.steps if step.kind == "exposed"), key=lambda step: -step.seconds)

    @property
    def seconds(self) -> float:
        return max((end for _, end in self.phases.values()), default=0.0)


def estimate(program: Program, costs: Costs) -> Estimate:
    """Run the executors of a lowered program through a clock."""
    seconds = {key: costs.region(region) for key, region in program.regions.items()}
    regions = {name: seconds[key] for name, key in program.region_names.items()}
    measured = {name for name, key in program.region_names.items() if key in costs.measured}  # beside collectives
    clock = _Clock(Estimate())
    for phase_name, phase in program.phases.items():
        began = clock.compute
        clock.phase, clock.order = phase_name, 0
        slots = phase.slot_of()
        launched: dict[str, Step] = {}
        copies: dict[Node, Step] = {}
        names = [node.meta["bucket"] for node in phase.module.graph.nodes if is_collective(node)]
        for node in phase.module.graph.nodes:
            bucket = node.meta.get("bucket", "")
            if is_collective(node):
                kind = kind_of(node)
                size = num_bytes(node) if kind == "gather" else sum(map(num_bytes, node.all_input_nodes))
                axis = _axis(program, bucket)
                if node.meta.get("exchanged"):
                    taken = costs.exchange(size, axis)
                else:
                    taken = costs.collective(kind, size, len(node.all_input_nodes), axis)
                launched[bucket] = clock.launch(kind, bucket, size, costs.link(axis), taken)
            elif node.target is WAIT:
                clock.found.waits.setdefault(bucket, (clock.compute, clock.order))
                clock.wait(launched[bucket], first=bucket == names[0], last=bucket == names[-1])
            elif node.target in (UPLOAD, DOWNLOAD):
                way = "upload" if node.target is UPLOAD else "download"
                (source,) = node.all_input_nodes
                name = slots[source].name if source in slots else f"%{node.meta['number']}"
                size = num_bytes(node)
                copies[node] = clock.launch(way, f"{way} {name}", size, "host", costs.host_copy(size))
            elif node.target is ARRIVED:
                clock.wait(copies[node.all_input_nodes[0]])
            elif node.op == "call_module":
                clock.run(node, regions[str(node.target)], costs, alone=str(node.target) not in measured)
            clock.found.node_times[node] = clock.compute
        for node, step in copies.items():
            if node.target is DOWNLOAD:
                clock.wait(step)
        clock.found.phases[phase_name] = began, clock.compute
    return clock.found


@dataclass
class _Clock:
    """Where compute and links are, in a phase and after so many calls of regions in it."""

    found: Estimate
    compute: float = 0.0
    phase: str = ""
    order: int = 0
    links: dict[str, tuple[float, str]] = field(default_factory=dict)  # when each is free, and what was on it last

    def launch(self, kind: str, name: str, size: int, link: str, seconds: float) -> Step:
        """Start something on a link when that is free."""
        free, before = self.links.get(link, (0.0, ""))
        start = max(self.compute, free)
        behind = before if free > self.compute else ""
        step = Step(kind, name, "", self.phase, start, start + seconds, size, self.order, link, behind=behind)
        self.links[link] = step.end, name
        self.found.steps.append(step)
        return step

    def wait(self, sent: Step, *, first: bool = False, last: bool = False) -> None:
        """Hold compute up until something has ended; `first` and `last` as in `why_waits`."""
        if sent.end > self.compute:
            why = why_waits(sent.kind, sent.behind, first=first, last=last)
            step = Step(
                "exposed", sent.name, "", self.phase, self.compute, sent.end, 0, self.order, "", why, sent.behind
            )
            self.found.steps.append(step)
            self.compute = sent.end

    def run(self, node: Node, seconds: float, costs: Costs, *, alone: bool) -> None:
        """Call a region; `alone` says that its time is without what runs beside it."""
        busy = max((free for free, _ in self.links.values()), default=0.0) - self.compute
        self.found.compute += seconds
        end = self.compute + (costs.slowed(seconds, busy) if alone else seconds)
        name = str(node.target)
        self.found.steps.append(Step("compute", name, module_of(node), self.phase, self.compute, end, 0, self.order))
        self.compute = end
        self.order += 1


def _axis(program: Program, bucket: str) -> Axis:
    assert program.plan is not None
    return program.mesh.named(program.plan.bucket(bucket).axis)


@dataclass(frozen=True)
class Tensor:
    """Memory that a value holds from `start` to `end` seconds."""

    name: str
    what: str
    num_bytes: int
    start: float
    end: float


def tensors(program: Program, found: Estimate) -> list[Tensor]:
    """What is alive between regions, and when; what a region holds while it runs is not seen."""
    held: dict[str, Tensor] = {}
    for phase_name, phase in program.phases.items():
        for tensor in _of_phase(phase, phase_name, found):
            if tensor.what in ("shards", "saved for backward") and tensor.name in held:
                before = held[tensor.name]
                held[tensor.name] = Tensor(before.name, before.what, before.num_bytes, before.start, tensor.end)
            else:
                held[tensor.name if tensor.name not in held else f"{phase_name} {tensor.name}"] = tensor
    return list(held.values())


def _of_phase(phase: Phase, phase_name: str, found: Estimate) -> Iterator[Tensor]:
    nodes = list(phase.module.graph.nodes)
    began, ended = found.phases[phase_name]
    owner: dict[Node, Node] = {}
    last: dict[Node, float] = {}
    for node in nodes:
        owner[node] = owner[node.all_input_nodes[0]] if _shares(node) else node
        time = ended if node.op == "output" else found.node_times[node]
        for source in node.all_input_nodes:
            last[owner[source]] = time
        last[owner[node]] = max(time, last.get(owner[node], 0.0))
    slots = phase.slot_of()
    saved = {n: slot for n, slot in zip(phase.results, phase.outputs) if isinstance(n, Node) and slot.kind == "saved"}
    results = {owner[n] for n in phase.results if isinstance(n, Node)}
    before = began
    for node in nodes:
        start, before = before, found.node_times.get(node, ended)
        if owner[node] is not node or not num_bytes(node) or node.op in ("call_module", "output") or _on_host(node):
            continue
        end = ended if node in results else last[node]
        if node in slots:
            slot = slots[node]
            kept = slot.kind in ("param", "buffer", "input")
            what = {"param": "shards", "buffer": "shards", "input": "inputs"}.get(slot.kind, "saved for backward")
            yield Tensor(slot.name, what, num_bytes(node), began, ended if kept else end)
        elif node in saved:
            yield Tensor(saved[node].name, "saved for backward", num_bytes(node), start, end)
        else:
            bucket = node.meta.get("bucket", "")
            what = "activations"
            if bucket:
                what = "gathered parameters" if bucket.startswith("gather") else "gradients"
            elif any(is_collective(user) for user in node.users) and phase_name == "backward":
                what = "gradients"
            yield Tensor(bucket or f"%{node.meta['number']} {module_of(node)}", what, num_bytes(node), start, end)


def _on_host(node: Node) -> bool:
    """Whether a value is a shard or a gradient that lives on the host."""
    return node.target is DOWNLOAD or any(user.target is UPLOAD for user in node.users)


def _shares(node: Node) -> bool:
    """Whether a value has the memory of its first input: a view, a wait, a part of a coalesced collective."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    source = node.all_input_nodes[0]
    return node.target in (WAIT, ARRIVED) or is_view(node) or (is_collective(source) and not is_collective(node))
