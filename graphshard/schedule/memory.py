"""Memory that the values of a lowered program hold while it runs on its predicted timeline."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch.fx import Node

from graphshard.cost.kernels import num_bytes
from graphshard.ir.graph import GATHERS, WAIT, is_collective, is_on_host, launch_of, module_of
from graphshard.ir.operators import RELOAD
from graphshard.ir.plan import EXCHANGE_RANKS
from graphshard.ir.program import LASTING, Phase, Program, Slot
from graphshard.schedule.program_memory import Saved, owners, saved_memory
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
    """Allocated bytes over one step, on the time axis of the timeline; `alive` is sorted, largest first."""

    points: tuple[MemoryPoint, ...]
    peak_bytes: int
    peak_time: float
    alive: tuple[Alive, ...]

    def by_kind(self) -> Counter[str]:
        """Return bytes at the peak by group."""
        found = Counter[str]()
        for value in self.alive:
            found[value.what] += value.num_bytes
        return found


def memory_of(program: Program, found: Estimate) -> MemoryTimeline:
    """Return the memory curve of a step, and what is alive at its peak."""
    held, seconds = tensors(program, found), found.seconds
    changes: dict[float, int] = {}
    for tensor in held:
        changes[tensor.start] = changes.get(tensor.start, 0) + tensor.num_bytes
        if tensor.end < seconds:
            changes[tensor.end] = changes.get(tensor.end, 0) - tensor.num_bytes
    points, total = [], 0
    for time in sorted(changes):
        total += changes[time]
        points.append(MemoryPoint(time, total))
    peak = max(points, key=lambda point: point.num_bytes, default=MemoryPoint(0.0, 0))
    alive = [t for t in held if t.start <= peak.time < t.end or t.end == seconds == peak.time]
    alive.sort(key=lambda tensor: -tensor.num_bytes)
    return MemoryTimeline(
        points=tuple(points),
        peak_bytes=peak.num_bytes,
        peak_time=peak.time,
        alive=tuple(Alive(t.name, t.what, t.num_bytes) for t in alive),
    )


def tensors(program: Program, found: Estimate) -> list[Tensor]:
    """Return what is alive between regions and inside them, and when."""
    held: dict[tuple[str, ...], Tensor] = {}
    saved = saved_memory(program)
    for phase_name, phase in program.phases.items():
        for tensor in _of_phase(program, phase, phase_name, found, saved):
            # A shard and its gathered parameter have one name.
            key = (tensor.what, tensor.name)
            if tensor.what in _FROM_PHASE_TO_PHASE and key in held:
                before = held[key]
                held[key] = Tensor(before.name, before.what, before.num_bytes, before.start, tensor.end)
            else:
                held[key if key not in held else (*key, phase_name)] = tensor
    return list(held.values())


def _of_phase(
    program: Program, phase: Phase, phase_name: str, found: Estimate, memory: Mapping[Slot, Saved]
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
            what = "inside regions" if inside > 0 else "freed inside regions"
            yield Tensor(f"{node.name} {module_of(node)}", what, inside, start, before)
        if node.target in GATHERS and program.device.type == "cpu" and node.args[-2] != EXCHANGE_RANKS:
            sent = (node, *parts)
            end = max(found.node_times[wait] for part in sent for wait in part.users if wait.target is WAIT)
            yield Tensor(node.meta["bucket"], "communication buffers", num_bytes(node), start, end)  # gloo's own
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
            yield Tensor(name, what, size, *((0.0, found.seconds) if kept else (began, end)))
        elif node in saved:
            yield Tensor(saved[node].name, _saved(saved[node]), size, start, end)
        else:
            is_part = node.target is operator.getitem and is_collective(node.all_input_nodes[0])
            bucket = (node.all_input_nodes[0] if is_part else node).meta.get("bucket", "")
            name = bucket or f"%{node.meta['number']} {module_of(node)}"
            what = "saved for backward" if node.target is RELOAD else "activations"
            if plan is not None and bucket:
                what = _OF_BUCKET[plan.bucket(bucket).kind]
            elif any(is_collective(user) for user in node.users) and phase_name == "backward":
                what = "gradients"
            yield Tensor(f"{name}[{node.args[1]}]" if is_part else name, what, size, start, end)


def _saved(slot: Slot) -> str:
    """Return the group of a value that forward leaves to backward."""
    return "gathered parameters" if slot.is_full or slot.kind == "shown" else "saved for backward"
