"""Gathers of a schedule moved behind, as late as costs nothing: memory is held no longer than it pays.

They still end well before they are needed. No clock changes: compute, and whatever else is on the link, keep theirs.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict, deque

from graphshard.schedule.own import Clocks
from graphshard.schedule.problem import Chain, Link, Occurrence, Placement
from graphshard.schedule.together import Load, load


def delay(chain: Chain, link: Link, placement: Placement, margin: float = 1.0) -> Placement:
    """Start gathers as late as keeps every clock, but so early that they end `margin` times their length before use."""
    arrival, starts, continued, needed, owns = _clocks(chain, link, placement)
    loads = _loads(chain, link, placement)
    behind = [(len(chain.seconds), math.inf)] * 2  # by channel: position and time of the start that follows
    first: defaultdict[int, deque[Occurrence]] = defaultdict(deque)  # what was moved comes first at its position
    rest: defaultdict[int, list[Occurrence]] = defaultdict(list)
    model = deque(zip(chain.own, owns))
    for event in reversed(placement.events):
        while model and model[-1][0].at >= event.at:  # it starts behind what is started at its position
            own, began = model.pop()
            behind[own.channel] = own.at, began
        if event.action == "wait":
            rest[event.at].append(event)
            continue
        if event.action == "continue":
            rest[event.at].append(event)
            behind[link.channel("all_reduce")] = event.at, continued[event.bucket]
            continue
        bucket, cost = placement.buckets[event.bucket], loads[event.bucket]
        # From the last event to the first, so the start that follows on the channel has found its place. This one must
        # not come behind it, nor end after it begins.
        position, limit = behind[link.channel(bucket.kind)]
        start, at = starts[event.bucket], event.at
        members = chain.transfers(bucket.kind)[bucket.first : bucket.end]
        # A copy takes time of compute: moving it would move compute's clock.
        if bucket.kind == "gather" and not cost.copy_in and all(m.start is None for m in members):
            latest = min(limit - cost.seconds, max(start, needed[event.bucket] - (1 + margin) * cost.seconds))
            # The last position to which compute has come by then. `arrival` is before the events of a position, and
            # what is moved becomes the first of them, so it is launched at that very time.
            at = max(at, min(bisect.bisect_right(arrival, latest) - 1, position, members[0].at))
            start = max(start, arrival[at]) if at > event.at else start
        if at > event.at:
            first[at].appendleft(Occurrence("start", event.bucket, at))
        else:
            rest[at].append(event)
        behind[link.channel(bucket.kind)] = at, start
    positions = range(len(chain.seconds) + 1)
    return Placement(placement.buckets, tuple(e for p in positions for e in (*first[p], *reversed(rest[p]))))


def _loads(chain: Chain, link: Link, placement: Placement) -> list[Load]:
    return [load(link, b.kind, chain.transfers(b.kind)[b.first : b.end], b.packed) for b in placement.buckets]


def _clocks(
    chain: Chain, link: Link, placement: Placement
) -> tuple[list[float], dict[int, float], dict[int, float], dict[int, float], list[float]]:
    """When compute comes to each position, buckets start and are continued, compute comes to their waits.

    And when the model's own collectives begin.
    """
    loads = _loads(chain, link, placement)
    compute, channels = 0.0, [0.0, 0.0]
    arrival: list[float] = []
    starts: dict[int, float] = {}
    continued: dict[int, float] = {}
    needed: dict[int, float] = {}
    done: dict[int, float] = {}  # when what was started of a bucket last ends
    upcoming = deque(placement.events)
    own: tuple[tuple[int, float], ...] = ()
    owns: list[float] = []
    for position in range(len(chain.seconds) + 1):
        arrival.append(compute)
        while upcoming and upcoming[0].at == position:
            event = upcoming.popleft()
            cost = loads[event.bucket]
            kind = placement.buckets[event.bucket].kind
            if event.action == "start":
                compute += cost.copy_in
                channel = link.channel(kind)
                starts[event.bucket] = max(compute, channels[channel])
                done[event.bucket] = channels[channel] = starts[event.bucket] + cost.seconds
            elif event.action == "continue":
                compute = max(compute, done[event.bucket])
                channel = link.channel("all_reduce")
                continued[event.bucket] = max(compute, channels[channel])
                done[event.bucket] = channels[channel] = continued[event.bucket] + cost.second
            else:
                needed[event.bucket] = compute
                compute = max(compute, done[event.bucket]) + cost.copy_out
        if position < len(chain.seconds):
            if chain.own:
                clocks = Clocks(compute, channels, dict(own))
                starting, waited = chain.own_of[position]
                for index in waited:
                    clocks.settle(index)
                owns += [clocks.start(index, each, 0.0)[0] for index, each in starting]
                compute, own = clocks.compute, tuple(clocks.flying.items())
            compute += chain.seconds[position]
    return arrival, starts, continued, needed, owns
