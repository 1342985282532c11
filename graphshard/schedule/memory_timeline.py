"""Memory that values of a lowered program hold over one step, on the time axis of its timeline."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch.fx import Node

from graphshard.cost.kernels import num_bytes
from graphshard.ir.graph import (
    ALL_REDUCES,
    GATHERS,
    WAIT,
    is_collective,
    is_exchanged,
    is_on_host,
    launch_of,
    module_of,
)
from graphshard.ir.operators import RELOAD
from graphshard.ir.plan import EXCHANGE_RANKS
from graphshard.ir.program import LASTING, Phase, Program, Slot
from graphshard.schedule._program_memory import Saved, owners, saved_memory
from graphshard.schedule.timeline import Estimate

# Group of a bucket's tensors, by its kind.
_OF_BUCKET = {"gather": "gathered parameters", "reduce": "gradients", "all_reduce": "gradients"}

# Groups that backward may have from forward, under one name.
_FROM_PHASE_TO_PHASE = ("shards", "saved for backward", "gathered parameters")

# Group of a phase's inputs, by the kind of their slot.
_OF_SLOT = dict.fromkeys(("param", "part", "buffer", "late"), "shards") | {"input": "inputs"}


@dataclass(frozen=True)
class Tensor:
    """Memory that a value holds from `start` to `end` seconds; `what` is the group it is counted in."""

    name: str
    what: str
    num_bytes: int
    start: float
    end: float


@dataclass(frozen=True)
class MemoryPoint:
    """From `time` on, until the next point, `num_bytes` are allocated."""

    time: float
    num_bytes: int


@dataclass(frozen=True)
class Alive:
    """A value that is alive at the peak; `what` is the group it is counted in, such as "gradients"."""

    name: str
    what: str
    num_bytes: int


@dataclass(frozen=True)
class MemoryTimeline:
    """Allocated bytes over one step, on the time axis of the timeline.

    Attributes:
        alive: values at the peak, the largest first.
        groups: the points of each group, where it changes.
    """

    points: tuple[MemoryPoint, ...]
    peak_bytes: int
    peak_time: float
    alive: tuple[Alive, ...]
    groups: Mapping[str, tuple[MemoryPoint, ...]] = field(default_factory=dict)

    def by_kind(self) -> Counter[str]:
        """Return bytes at the peak by group."""
        found = Counter[str]()
        for value in self.alive:
            found[value.what] += value.num_bytes
        return _folded(found)

    def then(self, time: float, held: Mapping[str, int]) -> MemoryTimeline:
        """Return the curve of a step that ends with an update of the optimizer, which holds bytes by group."""
        total = MemoryPoint(time, sum(held.values()))
        names = dict.fromkeys((*self.groups, *held))
        groups = {what: (*self.groups.get(what, ()), MemoryPoint(time, held.get(what, 0))) for what in names}
        found = replace(self, points=(*self.points, total), groups=groups)
        if total.num_bytes <= self.peak_bytes:
            return found
        alive = tuple(Alive(f"all {what}", what, size) for what, size in Counter(held).most_common())
        return replace(found, peak_bytes=total.num_bytes, peak_time=time, alive=alive)


def memory_of(program: Program, found: Estimate, lasting: Mapping[str, int] = MappingProxyType({})) -> MemoryTimeline:
    """Return the memory curve of a step, and what is alive at its peak; `lasting` bytes are held throughout."""
    seconds = found.seconds
    held = tensors(program, found)
    held += [Tensor(f"all {what}", what, size, 0.0, seconds) for what, size in lasting.items() if size]
    changes: dict[float, Counter[str]] = defaultdict(Counter)
    for tensor in held:
        changes[tensor.start][tensor.what] += tensor.num_bytes
        if tensor.end < seconds:
            changes[tensor.end][tensor.what] -= tensor.num_bytes
    points, groups, total = [], defaultdict[str, list[MemoryPoint]](list), Counter[str]()
    shown: Mapping[str, int] = {}
    for time in sorted(changes):
        total.update(changes[time])
        points.append(MemoryPoint(time, total.total()))
        before, shown = shown, _folded(total)
        for what in dict.fromkeys((*before, *shown)):
            if before.get(what, 0) != shown.get(what, 0):
                groups[what].append(MemoryPoint(time, shown.get(what, 0)))
    peak = max(points, key=lambda point: point.num_bytes, default=MemoryPoint(0.0, 0))
    alive = [t for t in held if t.start <= peak.time < t.end or t.end == seconds == peak.time]
    alive.sort(key=lambda tensor: -tensor.num_bytes)
    return MemoryTimeline(
        points=tuple(points),
        peak_bytes=peak.num_bytes,
        peak_time=peak.time,
        alive=tuple(Alive(t.name, t.what, t.num_bytes) for t in alive),
        groups={what: tuple(of) for what, of in groups.items()},
    )


# Bytes that a region frees before it has made all of its results: less than its inputs and its results.
_FREED = "freed inside regions"


def _folded(groups: Counter[str]) -> Counter[str]:
    """Subtract what is freed inside regions from the groups whose tensors these are: activations, then the largest."""
    found = Counter({what: size for what, size in groups.items() if size > 0})
    freed = -groups[_FREED]
    for what in ("activations", *(what for what, _ in found.most_common())):
        taken = min(freed, found[what])
        found[what] -= taken
        freed -= taken
    return +found


def tensors(program: Program, found: Estimate) -> list[Tensor]:
    """Return what is alive between regions and inside them, and when."""
    held: dict[tuple[str, ...], Tensor] = {}
    saved, labels = saved_memory(program), {}
    if (forward := program.phases.get("forward")) is not None:
        pairs = zip(forward.results, forward.outputs)
        labels = {s.name: _label(n) for n, s in pairs if isinstance(n, Node) and s.kind == "saved" and not s.is_full}
    for phase_name, phase in program.phases.items():
        for tensor in _of_phase(program, phase, phase_name, found, saved, labels):
            # A shard and its gathered parameter have one name.
            key = (tensor.what, tensor.name)
            if tensor.what in _FROM_PHASE_TO_PHASE and key in held:
                before = held[key]
                held[key] = Tensor(before.name, before.what, before.num_bytes, before.start, tensor.end)
            else:
                held[key if key not in held else (*key, phase_name)] = tensor
    return list(held.values())


def _of_phase(
    program: Program,
    phase: Phase,
    phase_name: str,
    found: Estimate,
    memory: Mapping[Slot, Saved],
    labels: Mapping[str, str],
) -> Iterator[Tensor]:
    plan = program.plan
    nodes = list(phase.module.graph.nodes)
    began, ended = found.phases[phase_name]
    owner = owners(program, phase, memory)
    last: dict[Node, float] = {}
    copied = found.copied
    for node in nodes:
        time = ended if node.op == "output" else found.node_times[node]
        # The input of a collective is held until it is waited for; gloo's reduce-scatters hold a copy instead.
        given = launch_of(node).all_input_nodes if node.target is WAIT else ()
        for source in (*node.all_input_nodes, *given):
            last[owner[source]] = max(time, copied.get(node, 0.0), last.get(owner[source], 0.0))
        last[owner[node]] = max(time, last.get(owner[node], 0.0))
    slots = phase.slot_of()
    # Slots of saved values by the node whose memory they have.
    saved = {
        owner[n] if slot in memory else n: memory[slot].slot if slot in memory else slot
        for n, slot in zip(phase.results, phase.outputs)
        if isinstance(n, Node) and slot.kind in ("saved", "shown")
    }
    results = {owner[n] for n in phase.results if isinstance(n, Node)}
    before = began
    begins: dict[Node, float] = {}  # of results of regions, which are made inside, and of parts of collectives
    for node in nodes:
        start, before = begins.get(node, before), found.node_times.get(node, ended)
        parts = [user for user in node.users if user.target is operator.getitem]
        in_parts = node.op == "call_module" or (is_collective(node) and bool(parts))
        if in_parts:
            begins.update(dict.fromkeys(parts, start))
        if node.op == "call_module" and (inside := found.workspace[node]):
            what = "inside regions" if inside > 0 else _FREED
            yield Tensor(f"{module_of(node)} {node.target}".strip(), what, inside, start, before)
        if buffer := _buffer_bytes(node, program):
            sent = (node, *parts)
            end = max(found.node_times[wait] for part in sent for wait in part.users if wait.target is WAIT)
            yield Tensor(node.meta["bucket"], "communication buffers", buffer, start, end)
        if owner[node] is not node or in_parts or node.op == "output" or is_on_host(node):
            continue
        held = memory.get(slots[node]) if node in slots else None  # by an input of backward
        if not (size := num_bytes(node) if held is None else held.num_bytes):
            continue
        end = ended if node in results else last[node]
        if node in slots:
            slot = slots[node]
            kept = slot.kind in LASTING
            what = _OF_SLOT.get(slot.kind) or _saved(slot)
            slot = slot if held is None else held.slot
            name = f"{slot.name}[{slot.index}]" if slot.kind == "part" else slot.name
            name = labels.get(name, name) if slot.kind == "saved" and not slot.is_full else name
            yield Tensor(name, what, size, *((0.0, found.seconds) if kept else (began, end)))
        elif node in saved:
            slot = saved[node]
            name = slot.name if slot.is_full else labels.get(slot.name, slot.name)
            yield Tensor(name, _saved(slot), size, start, end)
        else:
            is_part = node.target is operator.getitem and is_collective(node.all_input_nodes[0])
            bucket = (node.all_input_nodes[0] if is_part else node).meta.get("bucket", "")
            name = bucket or _label(node)
            what = "saved for backward" if node.target is RELOAD else "activations"
            if plan is not None and bucket:
                what = _OF_BUCKET[plan.bucket(bucket).kind]
            elif any(is_collective(user) for user in node.users) and phase_name == "backward":
                what = "gradients"
                name = next(user.meta.get("bucket", name) for user in node.users if is_collective(user))
                name = f"{name} %{node.meta['number']}"
            if is_part and isinstance(place := node.args[1], int):
                sent_names = plan.bucket(bucket).tensors if plan is not None and bucket else ()
                name = f"{name}: {sent_names[place]}" if place < len(sent_names) else f"{name}[{place}]"
            yield Tensor(name, what, size, start, end)


def _buffer_bytes(node: Node, program: Program) -> int:
    """Return the bytes of a buffer that a collective has until it is waited for."""
    pair = program.device.type == "cpu" and is_collective(node) and node.args[-2] == EXCHANGE_RANKS
    if is_exchanged(node) and node.target in ALL_REDUCES:
        return sum(map(num_bytes, node.all_input_nodes)) * program.mesh.named(str(node.args[-1])).size
    if is_exchanged(node) and not pair:
        return sum(map(num_bytes, node.all_input_nodes))
    of_gloo = node.target in GATHERS and program.device.type == "cpu" and not pair
    return num_bytes(node) if of_gloo else 0


def _label(node: Node) -> str:
    """Return a value's module, operator and number: "layers.3.attention.wq mm %97"."""
    operator_of = node.meta.get("original_aten")
    name = str(getattr(operator_of, "_opname", "")) or (node.name if node.op == "placeholder" else "")
    return " ".join(filter(None, (module_of(node), name, f"%{node.meta['number']}")))


def _saved(slot: Slot) -> str:
    """Return the group of a value that forward leaves to backward."""
    return "gathered parameters" if slot.is_full or slot.kind == "shown" else "saved for backward"
