"""Planner without costs, FSDP2's order: one bucket per unit, prefetch one ahead.

    gather 0 | gather 1      | gather 2      |
             | compute 0     | compute 1     | compute 2
                                                          backward: | reduce 2    | reduce 1 ...

The next unit's gather starts when the current one's has arrived, so at most two units are gathered at a time; a
reduction starts where its unit's backward ends and is waited for when the next one starts, which frees its gradients.
An all-reduce, which copies its input, is waited for at the end. A planner that weighs costs has the same type: a
program in, a plan out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from graphshard.errors import ArgumentError
from graphshard.ir.collective_regions import Collective, CollectiveRegions, is_scalar
from graphshard.ir.graph import fake
from graphshard.ir.plan import Bucket, Event, Plan
from graphshard.ir.program import Phase, Program
from graphshard.ir.repeats import BlocksDifferError
from graphshard.schedule.graph_facts import collectives_of, layout_of, within_one_plan
from graphshard.schedule.template_schedule import planned_in_short, unfolded_plan
from graphshard.utils.argument_validation import check_count, check_texts
from graphshard.utils.text import brief

# By bucket, the buckets whose gathers start when its own has arrived.
Prefetch = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class PlanByUnit:
    """Planner that knows nothing of costs.

    NCCL's bandwidth falls off below some tens of kilobytes per rank, so only small tensors pay for a copy. Gloo runs
    a coalesced reduction tensor by tensor at about a millisecond each, and its summation order depends on where in a
    buffer an element lies: one packed buffer is faster, and has the bits of FSDP2.

    Attributes:
        pack_gathers_below: bytes of a shard below which it is packed with others of its bucket.
        pack_reductions_below: the same for gradients; None packs what suits the device.
        forward_prefetch: by a unit's name, the units whose gathers start when its own has arrived; the next unit
            where it is not named here. "" is the root.
        backward_prefetch: the same for backward.
        reductions_under_way: how many units' gradients may be on their way before the next ones wait for the first.
    """

    pack_gathers_below: float = 64 * 1024
    pack_reductions_below: float | None = None
    forward_prefetch: Mapping[str, Sequence[str]] = field(default_factory=dict)
    backward_prefetch: Mapping[str, Sequence[str]] = field(default_factory=dict)
    reductions_under_way: int = 1

    def __post_init__(self) -> None:
        for name in ("pack_gathers_below", "pack_reductions_below"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
            if not number and (value is not None or name == "pack_gathers_below"):
                raise ArgumentError(f"{name} must be a number of bytes from 0 on, got {brief(value)}.")
        check_count("reductions_under_way", self.reductions_under_way)
        for name in ("forward_prefetch", "backward_prefetch"):
            if not isinstance(getattr(self, name), Mapping):
                raise ArgumentError(f"{name} must be a dict of lists of units, got {brief(getattr(self, name))}.")
            for unit, following in getattr(self, name).items():
                check_texts(f"{name}[{brief(unit)}]", following, "['layers.1']")

    @within_one_plan()
    def __call__(self, program: Program) -> Plan:
        """Bucket every collective of the program and place its start and wait."""
        return planned_in_short(program, self._planned)

    def _planned(self, program: Program) -> Plan:
        """Return the plan of all blocks; the order is local, so the plan of few blocks tells it."""
        if program.few is not None and (self.forward_prefetch or self.backward_prefetch):
            raise BlocksDifferError("prefetch lists name blocks")
        buckets: list[Bucket] = []
        events: dict[str, tuple[Event, ...]] = {}
        for name, phase in program.phases.items():
            found, at, layout = [], {}, layout_of(phase)
            for bucket, members in self._group(program, name, phase):
                at[bucket.name] = (first_use if bucket.kind == "gather" else last_input)(members, layout)
                found.append(bucket)
            prefetch = self._prefetch(program, name, found)
            events[name] = tuple(_place(found, at, len(layout.compute), prefetch, self.reductions_under_way))
            buckets += found
        plan = Plan(tuple(buckets), events)
        return plan if program.few is None else unfolded_plan(plan, program)

    def _prefetch(self, program: Program, phase: str, found: list[Bucket]) -> Prefetch:
        """Return the lists for a phase, by the names of buckets."""
        buckets: dict[str, list[str]] = {}
        for bucket in found:
            if bucket.kind == "gather":
                buckets.setdefault(program.params[bucket.members[0]].unit, []).append(bucket.name)
        given = {"forward": self.forward_prefetch, "backward": self.backward_prefetch}.get(phase, {})
        for unit in [unit for first, following in given.items() for unit in (first, *following)]:
            if unit not in program.params.units:
                known = ", ".join(map(repr, program.params.units))
                raise ArgumentError(f"{phase}_prefetch: {unit!r} is no unit that has parameters; there are {known}.")
        return {
            name: [other for unit in following for other in buckets.get(unit, [])]
            for first, following in given.items()
            for name in buckets.get(first, [])
        }

    def _group(self, program: Program, phase_name: str, phase: Phase) -> list[tuple[Bucket, list[Collective]]]:
        """Return collectives of one kind, unit and dtype as buckets, in the order of the parameter table."""
        groups: dict[tuple[str, ...], list[Collective]] = {}
        for collective in collectives_of(phase):
            row = program.params[collective.params[0]]
            dtypes = f"{row.sent_dtype(collective.kind)} as {fake(collective.node.all_input_nodes[0]).dtype}"
            # A parameter that is not cut is reduced over one axis after the other, in another way.
            key = collective.kind, row.unit, collective.axis, dtypes, f"{row.num_shards} {row.expert}"
            groups.setdefault(key, []).append(collective)
        reductions_below = self.pack_reductions_below
        if reductions_below is None:
            reductions_below = self.pack_gathers_below if program.device.type == "cuda" else math.inf
        found: list[tuple[Bucket, list[Collective]]] = []
        for (_, unit, axis, *_), members in groups.items():
            kind = members[0].kind
            names = {c.params[0] for c in members}
            rows = [row for row in program.params.in_packing_order if row.name in names]
            limit = self.pack_gathers_below if kind == "gather" else reductions_below
            packed = tuple(row.name for row in rows if row.piece_bytes(kind) < limit)
            packed = packed if len(packed) > 1 else ()
            name = f"{kind} {unit or '(root)'} in {phase_name}"
            same = sum(bucket.name.startswith(name) for bucket, _ in found)
            bucket = Bucket(
                name=f"{name} {same + 1}" if same else name,
                kind=kind,
                phase=phase_name,
                params=tuple(row.name for row in rows if row.name not in packed),
                packed=packed,
                axis=axis,
                num_bytes=sum(row.sent_bytes(kind) for row in rows),
            )
            found.append((bucket, members))
        return found


def plan_scalars(program: Program, phase_name: str, starts: Iterable[int]) -> tuple[list[Bucket], list[Event]]:
    """Return buckets of gradients that are all-reduced instead of scattered, over one axis after the other, at the end.

    They start at positions at which something `starts` anyway, so that no region is split.
    """
    phase = program.phases[phase_name]
    groups: dict[tuple[str, ...], dict[str, list[Collective]]] = {}
    for collective in collectives_of(phase):
        if is_scalar(program, collective):
            operation, axis = collective.node.args[1], collective.node.args[-1]
            sent = program.params[collective.params[0]].reduce_dtype
            groups.setdefault((str(sent), str(operation)), {}).setdefault(str(axis), []).append(collective)
    layout = layout_of(phase)
    end = len(layout.compute)
    buckets, events = [], []
    for (dtype, operation), by_axis in groups.items():
        for index, (axis, members) in enumerate(by_axis.items()):
            names = tuple(collective.params[0] for collective in members)
            bucket = Bucket(
                name=f"all_reduce {operation} of {dtype} scalars in {phase_name}{f' over {axis}' if index else ''}",
                kind="all_reduce",
                phase=phase_name,
                params=names if len(names) == 1 else (),
                packed=names if len(names) > 1 else (),
                axis=axis,
                num_bytes=sum(program.params[name].sent_bytes("all_reduce") for name in names),
            )
            buckets.append(bucket)
            ready = end if index else last_input(members, layout)
            events.append(Event("start", bucket.name, min((at for at in starts if at >= ready), default=end)))
            events.append(Event("wait", bucket.name, end))
    return buckets, sorted(events, key=lambda event: event.at)


def _place(buckets: Sequence[Bucket], at: Mapping[str, int], end: int, prefetch: Prefetch, most: int) -> list[Event]:
    """Return starts and waits of a phase in order of execution, with a limited number of reductions under way.

    `at` has the positions at which buckets are needed or ready, by name.
    """
    needed = {bucket.name: at[bucket.name] for bucket in buckets if bucket.kind == "gather"}
    boundaries = sorted(set(needed.values()))
    gathers: list[Event] = []
    order = sorted(needed, key=needed.__getitem__)
    waiting = dict.fromkeys(order)

    def start(names: Iterable[str], at: int) -> None:
        for name in names:
            if name in waiting:  # not started yet
                gathers.append(Event("start", name, at))
                del waiting[name]

    start(order[:1], 0)
    for index, name in enumerate(order):
        start([name], needed[name])
        gathers.append(Event("wait", name, needed[name]))
        start(prefetch.get(name, order[index + 1 : index + 2]), needed[name])
    chains: dict[str, list[str]] = {}  # buckets that reduce the same gradients one after another
    for kind in ("reduce", "all_reduce"):
        for bucket in buckets:
            if bucket.kind == kind:
                chains.setdefault(bucket.members[0], []).append(bucket.name)
    ready = {tuple(names): next_boundary(at[names[0]], boundaries) for names in chains.values()}
    all_reduces = {bucket.name for bucket in buckets if bucket.kind == "all_reduce"}
    reductions: list[Event] = []
    under_way: list[list[str]] = []
    for names in sorted(ready, key=ready.__getitem__):
        reductions += _continue(under_way, ready[names], held=all_reduces, keep=most - 1)
        reductions.append(Event("start", names[0], ready[names]))
        under_way.append(list(names))
    while any(names[0] not in all_reduces for names in under_way):
        reductions += _continue(under_way, end, held=all_reduces)
    while under_way:
        reductions += _continue(under_way, end)
    return list(heapq.merge(reductions, gathers, key=lambda event: event.at))


def _continue(under_way: list[list[str]], at: int, held: Collection[str] = (), keep: int = 0) -> list[Event]:
    """Wait for the reductions under way, the oldest first, start each one's successor, and drop what is done.

    Reductions that are `held` stay under way, and of the others the last ones.
    """
    events = []
    others = [names for names in under_way if names[0] not in held]
    for names in others[: max(len(others) - keep, 0)]:
        events.append(Event("wait", names.pop(0), at))
        events += [Event("start", name, at) for name in names[:1]]
    under_way[:] = [names for names in under_way if names]
    return events


def next_boundary(position: int, boundaries: Iterable[int]) -> int:
    """Return the next boundary between units, if there is one.

    A unit's last gradient is ready a few operators before its backward ends. Starting its reduction there, as FSDP2
    does, keeps those operators in one region with the rest.
    """
    return min((b for b in boundaries if b >= position), default=position)


def first_use(members: list[Collective], layout: CollectiveRegions) -> int:
    """Return the position of the first compute node that needs one of the gathered parameters."""
    waits = [wait for c in members for wait in c.waits]
    sources = waits + [node for wait in waits for node in layout.after[wait]]
    users = (user for node in sources for user in node.users)
    return min((layout.index[user] for user in users if user in layout.index), default=len(layout.compute))


def last_input(members: list[Collective], layout: CollectiveRegions) -> int:
    """Return the position after the last compute node that the gradients come from."""
    users = [node for c in members for node in (*layout.before[c.node], c.node)]
    inputs = (layout.index[n] for node in users for n in node.all_input_nodes if n in layout.index)
    return max(inputs, default=-1) + 1
