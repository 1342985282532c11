"""From a schedule back to the buckets and events of the plan that passes apply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from graphshard.ir.mesh import Axis
from graphshard.ir.plan import Bucket, Event
from graphshard.schedule.build import PhaseMap
from graphshard.schedule.problem import Chain, Placement


def to_buckets(
    phase_name: str,
    chain: Chain,
    mapped: PhaseMap,
    placement: Placement,
    axis: Axis,
    pack_below: float,
    exchange: Callable[[int], bool],
) -> tuple[list[Bucket], list[Event]]:
    """A placement as the plan's buckets and events.

    Args:
        exchange: whether a reduction of one tensor of so many bytes is cheaper as all-to-all.
    """
    buckets: list[Bucket] = []
    taken: Counter[str] = Counter()
    for bucket in placement.buckets:
        atoms = mapped.atoms[bucket.kind][bucket.first : bucket.end]
        transfers = chain.transfers(bucket.kind)[bucket.first : bucket.end]
        rows = [row for atom in atoms for row in atom.rows]
        exact = all(t.num_small == t.num_tensors for t in transfers)
        small = [row.name for row in rows if exact or row.piece_bytes(bucket.kind) < pack_below]
        packed = tuple(small) if bucket.packed else ()
        units = list(dict.fromkeys(atom.unit or "(root)" for atom in atoms))
        name = f"{bucket.kind} {' to '.join(dict.fromkeys((units[0], units[-1])))} in {phase_name}"
        taken[name] += 1
        num_bytes = sum(t.num_bytes for t in transfers)
        alone = len(rows) - len(packed) + bool(packed) == 1
        buckets.append(
            Bucket(
                name=f"{name} {taken[name]}" if taken[name] > 1 else name,
                kind=bucket.kind,
                phase=phase_name,
                params=tuple(row.name for row in rows if row.name not in packed),
                packed=packed,
                axis=axis.name,
                num_bytes=num_bytes,
                exchanged=bucket.kind == "reduce" and alone and exchange(num_bytes),
            )
        )
    events = [Event(e.action, buckets[e.bucket].name, mapped.cuts[e.at]) for e in placement.events]
    return buckets, events
