"""Make a plan: one bucket per unit, prefetch one ahead.

    gather 0 | gather 1      | gather 2      |
             | compute 0     | compute 1     | compute 2
                                                          backward: | reduce 2    | reduce 1 ...

This is FSDP2's order: the next unit's gather starts when the current one's has arrived, so at most two units are
gathered at a time; a reduction starts where its unit's backward ends and is waited for when the next one starts, which
frees what it was given. An all-reduce, which copies that, is waited for at the end. A planner that weighs costs has the
same type: a program in, a plan out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from graphshard.errors import ArgumentError
from graphshard.ir.collective_regions import Collective, CollectiveRegions, last_use
from graphshard.ir.graph import fake
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.plan import Bucket, CollectiveKind, Event, Plan
from graphshard.ir.program import Phase, Program
from graphshard.ir.repeats import BlocksDifferError
from graphshard.schedule.few import folded_plan, planned_in_short, unfolded_buckets, unfolded_positions, unfolding_of
from graphshard.schedule.known import collectives_of, layout_of, within_one_plan
from graphshard.utils.argument_validation import check_count, check_texts
from graphshard.utils.text import brief

# Buckets whose gathers start when that of another has arrived.
Prefetch = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class PlanByUnit:
    """The planner that knows nothing of costs.

    NCCL's bandwidth falls off below some tens of kilobytes per rank, so only small tensors pay for a copy. Gloo runs
    a coalesced reduction tensor by tensor at about a millisecond each, and its summation order depends on where in a
    buffer an element lies: one packed buffer is faster, and has the bits of FSDP2.

    Attributes:
        pack_gathers_below: bytes of a shard below which it is packed with others of its bucket.
        pack_reductions_below: the same for gradients; None packs what suits the device.
        forward_prefetch: by a unit's name, the units whose gathers start when its own has arrived; the next one of
            those that are not named here. "" is the root.
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
        return planned_in_short(program, self._of_few, self._plan)

    def _of_few(self, program: Program) -> Plan:
        if self.forward_prefetch or self.backward_prefetch:
            raise BlocksDifferError("prefetch lists name blocks")
        plan = self._plan(program)
        return replace(plan, gathered_bytes=gathered_of(folded_plan(plan, program), program))

    def _plan(self, program: Program) -> Plan:
        """The plan of all blocks; of few of them without the bytes."""
        buckets: list[Bucket] = []
        events: dict[str, tuple[Event, ...]] = {}
        gathered_bytes: dict[str, int] = {}
        for name, phase in program.phases.items():
            groups = self._group(program, name, phase)
            layout = layout_of(phase)
            end = len(layout.compute)
            at = {
                (bucket.kind, bucket.axis, bucket.members[0]): (
                    first_use(members, layout) if bucket.kind == "gather" else last_input(members, layout)
                )
                for bucket, members in groups
            }
            found = [bucket for bucket, _ in groups]
            if program.few is not None:
                found = unfolded_buckets(found, program, name)
                at, end = unfolded_positions(at, end, program, name)
            ats = {bucket.name: at[bucket.kind, bucket.axis, bucket.members[0]] for bucket in found}
            placed = _place(found, ats, end, self._prefetch(program, name, found), self.reductions_under_way)
            buckets += found
            events[name] = tuple(placed)
            if program.few is None:
                gathered_bytes[name] = account(phase, groups, placed, program)
        return Plan(tuple(buckets), events, gathered_bytes)

    def _prefetch(self, program: Program, phase: str, found: list[Bucket]) -> Prefetch:
        """The lists for a phase, by the names of buckets."""
        buckets: dict[str, list[str]] = {}
        for bucket in found:
            if bucket.kind == "gather":
                buckets.setdefault(program.all_params[bucket.members[0]].unit, []).append(bucket.name)
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
        """Collectives of one kind, unit and dtype travel together, in the order of the parameter table."""
        groups: dict[tuple[str, ...], list[Collective]] = {}
        for collective in collectives_of(phase):
            row = program.params[collective.params[0]]
            dtypes = f"{row.sent_dtype(collective.kind)} as {fake(collective.node.all_input_nodes[0]).dtype}"
            # What is not cut is reduced over one axis after the other, on a way of its own.
            key = collective.kind, row.unit, collective.axis, dtypes, f"{row.num_shards} {row.expert}"
            groups.setdefault(key, []).append(collective)
        found: list[tuple[Bucket, list[Collective]]] = []
        for (kind, unit, axis, *_), members in groups.items():
            rows = {c.params[0]: program.params[c.params[0]] for c in members}
            ordered = [row for row in program.params.in_packing_order if row.name in rows]
            name = self._name(kind, unit, phase_name, [bucket.name for bucket, _ in found])
            bucket = self._bucket(program, members[0].kind, name, phase_name, ordered, axis)
            found.append((bucket, members))
        return found

    def _name(self, kind: str, unit: str, phase_name: str, taken: Iterable[str]) -> str:
        name = f"{kind} {unit or '(root)'} in {phase_name}"
        same = sum(other.startswith(name) for other in taken)
        return f"{name} {same + 1}" if same else name

    def _reduction_limit(self, program: Program) -> float:
        if self.pack_reductions_below is not None:
            return self.pack_reductions_below
        return self.pack_gathers_below if program.device.type == "cuda" else math.inf

    def _bucket(
        self, program: Program, kind: CollectiveKind, name: str, phase_name: str, rows: list[ParamSpec], axis: str
    ) -> Bucket:
        limit = self.pack_gathers_below if kind == "gather" else self._reduction_limit(program)
        packed = tuple(row.name for row in rows if row.piece_bytes(kind) < limit)
        if len(packed) == 1:
            packed = ()
        return Bucket(
            name=name,
            kind=kind,
            phase=phase_name,
            params=tuple(row.name for row in rows if row.name not in packed),
            packed=packed,
            axis=axis,
            num_bytes=sum(row.sent_bytes(kind) for row in rows),
        )


def plan_scalars(program: Program, phase_name: str, starts: Iterable[int]) -> tuple[list[Bucket], list[Event]]:
    """Buckets for the gradients that are all-reduced instead of scattered, over one axis after the other, at the end.

    Args:
        starts: positions at which something starts anyway, so that no region is split.
    """
    phase = program.phases[phase_name]
    groups: dict[tuple[str, ...], dict[str, list[Collective]]] = {}
    for collective in collectives_of(phase):
        if is_scalar(program, collective):
            _, operation, axis = collective.node.args
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


def is_scalar(program: Program, collective: Collective) -> bool:
    """Whether it all-reduces gradients that are whole on every rank, beside others that are scattered."""
    whole = program.params[collective.params[0]].num_shards == 1 and program.mesh.shard.size > 1
    return whole and collective.kind == "all_reduce"


def _place(buckets: Sequence[Bucket], at: Mapping[str, int], end: int, prefetch: Prefetch, most: int) -> list[Event]:
    """Starts and waits of a phase in order of execution, with so many reductions under way at most.

    Args:
        at: where buckets are needed or ready, by name.
        end: of the compute.
    """
    needed = {bucket.name: at[bucket.name] for bucket in buckets if bucket.kind == "gather"}
    boundaries = sorted(set(needed.values()))
    ready = {names: next_boundary(at[names[0]], boundaries) for names in _reductions(buckets)}

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


def _reductions(buckets: Sequence[Bucket]) -> list[tuple[str, ...]]:
    """Names of the buckets that reduce the same gradients one after another."""
    found: dict[str, list[str]] = {}
    for kind in ("reduce", "all_reduce"):
        for bucket in buckets:
            if bucket.kind == kind:
                found.setdefault(bucket.members[0], []).append(bucket.name)
    return [tuple(names) for names in found.values()]


def _continue(under_way: list[list[str]], at: int, held: Collection[str] = (), keep: int = 0) -> list[Event]:
    """Wait for the reductions under way, the oldest first, and start what follows each; what is done is dropped.

    Those that are `held` stay under way, and of the others the last ones.
    """
    events = []
    others = [names for names in under_way if names[0] not in held]
    for names in others[: max(len(others) - keep, 0)]:
        events.append(Event("wait", names.pop(0), at))
        events += [Event("start", name, at) for name in names[:1]]
    under_way[:] = [names for names in under_way if names]
    return events


def account(
    phase: Phase,
    groups: list[tuple[Bucket, list[Collective]]],
    events: Iterable[Event],
    program: Program,
) -> int:
    """The most bytes of gathered parameters alive at once: each from its start to the last compute that reads it.

    Raises:
        BlocksDifferError: of few of many equal blocks, as these differ.
    """
    layout, params = layout_of(phase), program.params
    position = {**layout.index, phase.module.graph.output_node(): len(layout.compute)}
    alive: list[tuple[int, int]] = []
    found: list[tuple[str, int]] = []
    gathers = {bucket.name: (bucket, members) for bucket, members in groups if bucket.kind == "gather"}
    for event in events:
        if event.action == "start" and event.bucket in gathers:
            alive = [(end, size) for end, size in alive if end >= event.at]
            bucket, members = gathers[event.bucket]
            ends = {m.params[0]: max(event.at, last_use(m.waits, layout, position)) for m in members}
            last_packed = max((ends[name] for name in bucket.packed), default=0)
            ends.update(dict.fromkeys(bucket.packed, last_packed))
            alive += [(end, params[name].sent_bytes("gather")) for name, end in ends.items()]
            found.append((event.bucket, sum(size for _, size in alive)))
    if program.few is not None and found:
        unfolding = unfolding_of(program, groups[0][0].phase)
        found = replace(unfolding, begins={}).unfold_sums(found)
    return max((size for _, size in found), default=0)


def gathered_of(plan: Plan, program: Program) -> dict[str, int]:
    """By phase, the most bytes of gathered parameters that a plan lets live at once."""
    found = {}
    for name, events in plan.events.items():
        phase = program.phases[name]
        of_row = {(c.kind, c.axis, c.params[0]): c for c in collectives_of(phase)}
        buckets = [bucket for bucket in plan.buckets if bucket.phase == name and bucket.kind == "gather"]
        groups = [(b, [of_row[b.kind, b.axis, member] for member in b.members]) for b in buckets]
        found[name] = account(phase, groups, events, program)
    return found


def next_boundary(position: int, boundaries: Iterable[int]) -> int:
    """The next boundary between units, if there is one.

    A unit's last gradient is ready a few operators before its backward ends. Starting its reduction there, as FSDP2
    does, keeps those operators in one region with the rest.
    """
    return min((b for b in boundaries if b >= position), default=position)


def first_use(members: list[Collective], layout: CollectiveRegions) -> int:
    """Position of the first compute node that needs one of the gathered parameters."""
    waits = [wait for c in members for wait in c.waits]
    sources = waits + [node for wait in waits for node in layout.after[wait]]
    users = (user for node in sources for user in node.users)
    return min((layout.index[user] for user in users if user in layout.index), default=len(layout.compute))


def last_input(members: list[Collective], layout: CollectiveRegions) -> int:
    """Position after the last compute node that the gradients come from."""
    users = [node for c in members for node in (*layout.before[c.node], c.node)]
    inputs = (layout.index[n] for node in users for n in node.all_input_nodes if n in layout.index)
    return max(inputs, default=-1) + 1
