"""Schedules of a phase that need no search: every transfer by itself, FSDP2's order, and the least memory."""

from __future__ import annotations

from dataclasses import replace

from graphshard.schedule.problem import KINDS, Bucketed, Chain, Occurrence, Placement
from graphshard.schedule.together import modes


def singles(chain: Chain) -> list[Bucketed]:
    """Every transfer by itself, in the order in which compute meets them."""
    found = [(r.at, 0, i, Bucketed("reduce", i, i + 1, bool(r.packed))) for i, r in enumerate(chain.reductions)]
    found += [(g.at, 1, i, Bucketed("gather", i, i + 1, bool(g.packed))) for i, g in enumerate(chain.gathers)]
    return [bucket for *_, bucket in sorted(found, key=lambda entry: entry[:3])]


def laziest(chain: Chain, *, second: bool = False) -> Placement:
    """Everything by itself and at the last moment: no schedule needs less memory.

    Args:
        second: reductions have a second leg.
    """
    buckets = singles(chain)
    events: list[Occurrence] = []
    for index, bucket in enumerate(buckets):
        member = chain.transfers(bucket.kind)[bucket.first]
        start = member.at if member.start is None else member.start
        events.append(Occurrence("start", index, start))
        if bucket.kind == "reduce" and second:
            events.append(Occurrence("continue", index, start))
        events.append(Occurrence("wait", index, max(start, member.at)))
    return Placement(tuple(buckets), tuple(sorted(events, key=lambda event: event.at)))


def one_ahead(chain: Chain, *, second: bool = False) -> Placement:
    """FSDP2's order: a gather starts when the one before it has arrived; a reduction ends when the next one starts.

    Args:
        second: reductions have a second leg: it starts then, and is waited for at the end.
    """
    buckets = [replace(b, packed=modes([chain.transfers(b.kind)[b.first]])[-1]) for b in singles(chain)]
    at = [chain.transfers(bucket.kind)[bucket.first].at for bucket in buckets]
    gathers, reductions = ([i for i, b in enumerate(buckets) if b.kind == kind] for kind in KINDS)
    events: list[Occurrence] = []
    for index, following in zip(reductions, [*(at[i] for i in reductions[1:]), len(chain.seconds)]):
        events += [
            Occurrence("start", index, at[index]),
            Occurrence("continue" if second else "wait", index, following),
        ]
    for index, start in zip(gathers, [0, *(at[i] for i in gathers)]):
        events += [Occurrence("start", index, start), Occurrence("wait", index, at[index])]
    if second:
        events += [Occurrence("wait", index, len(chain.seconds)) for index in reductions]
    return Placement(tuple(buckets), tuple(sorted(events, key=lambda event: event.at)))
