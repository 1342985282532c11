"""From a schedule back to the buckets and events of the plan that passes apply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from graphshard.ir.plan import Bucket, CollectiveKind, Event
from graphshard.schedule.build import PhaseMap
from graphshard.schedule.problem import Chain, Placement


def to_buckets(
    phase_name: str,
    chain: Chain,
    mapped: PhaseMap,
    placement: Placement,
    pack_below: float,
    exchange: Callable[[int], bool],
) -> tuple[list[Bucket], list[Event]]:
    """A placement as the plan's buckets and events; a reduction with two legs is two buckets.

    Args:
        exchange: whether a reduction of one tensor of so many bytes is cheaper as all-to-all.
    """
    first: list[Bucket] = []
    second: list[Bucket] = []  # the same where there is one leg
    taken: Counter[str] = Counter()

    def named(kind: CollectiveKind, where: str) -> str:
        name = f"{kind} {where}"
        taken[name] += 1
        return f"{name} {taken[name]}" if taken[name] > 1 else name

    for bucket in placement.buckets:
        atoms = mapped.atoms[bucket.kind][bucket.first : bucket.end]
        transfers = chain.transfers(bucket.kind)[bucket.first : bucket.end]
        rows = [row for atom in atoms for row in atom.rows]
        exact = all(t.num_small == t.num_tensors for t in transfers)
        small = [row.name for row in rows if exact or row.piece_bytes(bucket.kind) < pack_below]
        packed = tuple(small) if bucket.packed else ()
        units = list(dict.fromkeys(atom.unit or "(root)" for atom in atoms))
        where = f"{' to '.join(dict.fromkeys((units[0], units[-1])))} in {phase_name}"
        ways = mapped.ways.of(rows[0])
        kind = ways.reduction if bucket.kind == "reduce" else bucket.kind
        num_bytes = sum(t.num_bytes for t in transfers)
        alone = len(rows) - len(packed) + bool(packed) == 1
        made = Bucket(
            name=named(kind, where),
            kind=kind,
            phase=phase_name,
            params=tuple(row.name for row in rows if row.name not in packed),
            packed=packed,
            axis=ways.axis(kind).name,
            num_bytes=num_bytes,
            exchanged=kind == "reduce" and alone and not rows[0].expert and exchange(num_bytes),
        )
        first.append(made)
        second.append(made)
        if kind == "reduce" and ways.replicas is not None:
            shards = sum(row.sent_bytes("all_reduce") for row in rows)
            axis = ways.replicas.name
            name = named("all_reduce", where)
            second[-1] = replace(made, name=name, kind="all_reduce", axis=axis, num_bytes=shards, exchanged=False)
    events: list[Event] = []
    for event in placement.events:
        at = mapped.cuts[event.at]
        if event.action == "start":
            events.append(Event("start", first[event.bucket].name, at))
        elif event.action == "continue":
            events += [Event("wait", first[event.bucket].name, at), Event("start", second[event.bucket].name, at)]
        else:
            events.append(Event("wait", second[event.bucket].name, at))
    return list(dict.fromkeys((*first, *second))), events
