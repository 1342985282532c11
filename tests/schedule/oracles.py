"""Random problems, a simulator that counts ticks, and an exhaustive search, all independent of the tested code."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from graphshard.schedule import Bucketed, Chain, FixedCollective, Link, Occurrence, Placement, Rate, Transfer


def halves(num_bytes: int) -> float:
    """Return the seconds of a copy in whole ticks."""
    return float(num_bytes // 2)


@st.composite
def links(draw: st.DrawFn, *, separate: bool | None = None, legs: bool = False) -> Link:
    """Draw a link with whole seconds; `legs` for two-stage reductions, on any channel."""
    latency, per_tensor = st.integers(0, 4), st.integers(0, 2)
    second = Rate(draw(latency), draw(st.integers(0, 2)), draw(per_tensor)) if legs else None
    return Link(
        gather=Rate(draw(latency), draw(st.integers(0, 2)), draw(per_tensor)),
        reduce=Rate(draw(latency), draw(st.integers(0, 2)), draw(per_tensor)),
        copy=halves,
        num_shards=2,
        separate=draw(st.booleans()) if separate is None else separate,
        all_reduce=second,
        all_reduce_on=draw(st.integers(0, 1)) if legs else 0,
    )


@st.composite
def chains(draw: st.DrawFn, *, layers: int = 6, reductions: bool | None = None, small: bool = True) -> Chain:
    """Draw up to `layers` items in whole seconds; some gather, some reduce, and tensors may outlive their
    first item.
    """
    num = draw(st.integers(1, layers))
    items = st.integers(0, num - 1)

    def transfer(name: str, at: int, last: int) -> Transfer:
        num_bytes = draw(st.integers(1, 9))
        num_tensors = draw(st.integers(1, 2)) if small else 1
        num_small = draw(st.integers(0, num_tensors)) if small else 0
        return Transfer(
            name=name,
            num_bytes=num_bytes,
            at=at,
            last=last,
            group=draw(st.sampled_from("aaab")),
            num_tensors=num_tensors,
            num_small=num_small,
            small_bytes=min(num_bytes, num_small),
        )

    gathered = [i for i in range(num) if draw(st.integers(0, 3))]
    gathers = [transfer(f"w{at}", at, draw(st.integers(at, min(at + 1, num - 1)))) for at in gathered]
    reduced = [] if reductions is False else sorted(draw(st.lists(items, max_size=num, unique=not reductions)))
    return Chain(
        "phase",
        tuple(float(draw(st.integers(0, 9))) for _ in range(num)),
        tuple(draw(st.integers(0, 5)) for _ in range(num)),
        tuple(gathers),
        tuple(transfer(f"g{i}", at + 1, -1) for i, at in enumerate(reduced)),
    )


@st.composite
def of_experts(draw: st.DrawFn, *, legs: bool = False, **options: Any) -> tuple[Chain, Link]:
    """Draw a chain with some transfers over other axes, at other costs on the same channels."""
    chain, link = draw(chains(**options)), draw(links(legs=legs))
    other = draw(links(separate=link.separate, legs=legs))
    ways = [
        tuple(replace(t, link_index=int(t.group == "b")) for t in each) for each in (chain.gathers, chain.reductions)
    ]
    others = (replace(other, all_reduce_on=link.all_reduce_on),)
    return replace(chain, gathers=ways[0], reductions=ways[1]), replace(link, others=others)


@st.composite
def communicating(draw: st.DrawFn, **options: Any) -> Chain:
    """Draw a chain with the model's own collectives, blocking or overlapping some items, on either channel."""
    chain = draw(chains(**options))
    items = st.integers(0, len(chain.seconds) - 1)
    starts = sorted(draw(st.lists(items, min_size=1, max_size=3)))
    fixed = (
        FixedCollective(at, max(at, draw(items)), float(draw(st.integers(1, 6))), draw(st.integers(0, 1)), "sent")
        for at in starts
    )
    return replace(chain, fixed=tuple(fixed))


@st.composite
def placements(draw: st.DrawFn, chain: Chain, *, legs: bool = False) -> Placement:
    """Draw any schedule of a chain that keeps the orders: random cuts, starts, waits, and starts of second stages."""
    end = len(chain.seconds)
    events: list[tuple[int, int, int, str, Bucketed]] = []
    for kind in ("gather", "reduce"):
        transfers = chain.transfers(kind)
        first, start, wait = 0, 0, 0
        while first < len(transfers):
            stop = first + 1
            while stop < len(transfers) and transfers[stop].group == transfers[first].group and draw(st.booleans()):
                stop += 1
            members = transfers[first:stop]
            packed = sum(m.num_small for m in members) > 1 and draw(st.booleans())
            bucket = Bucketed(kind, first, stop, packed)
            if kind == "gather":
                start = draw(st.integers(min(start, members[0].at), members[0].at))
                wait = members[0].at
            else:
                start = draw(st.integers(max(start, members[-1].at), end))
                wait = draw(st.integers(max(start, wait), end))
            tie = draw(st.integers(0, 1)) if kind == "reduce" and wait > start and not legs else 0
            if kind == "reduce" and legs:
                events.append((draw(st.integers(start, wait)), 1, len(events), "continue", bucket))
            events += [(start, tie, len(events), "start", bucket), (wait, 2 - tie, len(events) + 1, "wait", bucket)]
            first = stop
    events.sort(key=lambda e: e[:3])
    order = [bucket for *_, action, bucket in events if action == "start"]
    return Placement(tuple(order), tuple(Occurrence(action, order.index(b), at) for at, *_, action, b in events))


def ticks(chain: Chain, link: Link, placement: Placement) -> tuple[int, int]:
    """Simulate a schedule with whole seconds, second by second; return seconds and peak bytes.

    The host's program is a list; the compute stream takes the next entry when it is idle, channels are queues of
    remaining seconds. Memory is recounted from the lists of finished entries.
    """
    program: list[tuple[str, int]] = []
    for position in range(len(chain.seconds) + 1):
        program += [(e.action, e.bucket) for e in placement.events if e.at == position]
        program += [("settle", -1 - i) for i, fixed in enumerate(chain.fixed) if fixed.at < fixed.until == position]
        for i, fixed in enumerate(chain.fixed):
            program += [("send", -1 - i)] if fixed.at == position else []
            program += [("settle", -1 - i)] if fixed.at == fixed.until == position else []
        program += [("item", position)] if position < len(chain.seconds) else []
    queues: list[list[list[int]]] = [[], []]
    finished: set[int] = set()
    done: list[tuple[str, int]] = []
    busy = now = peak = 0
    pending: tuple[str, int] | None = None  # an entry whose copy is running
    todo = list(program)
    while todo or busy:
        while not busy and (todo or pending):
            action, index = pending or todo.pop(0)
            if action == "send":  # a collective of the model, with a negative number; it needs no memory here
                fixed = chain.fixed[-1 - index]
                queues[fixed.channel].append([index, int(fixed.seconds)])
                continue
            if action == "settle":
                if index not in finished:
                    todo.insert(0, (action, index))
                    break
                continue
            bucket = placement.buckets[index] if action != "item" else None
            peak = max(peak, _bytes_at(chain, link, placement, done, (action, index))) if not pending else peak
            if action == "item":
                busy = int(chain.seconds[index])
                done.append((action, index))
            elif action == "start":
                if not pending and (copy := _copy(chain, link, bucket, "start")):
                    pending, busy = (action, index), copy
                    continue
                pending = None
                queues[link.channel(bucket.kind)].append([index, _length(chain, link, bucket)])
                done.append((action, index))
                _finish(queues, finished)
            elif index not in finished:
                todo.insert(0, (action, index))
                break
            elif action == "continue":
                finished.remove(index)
                queues[link.all_reduce_on].append([index, _length(chain, link, bucket, second=True)])
                done.append((action, index))
                _finish(queues, finished)
            else:
                busy = _copy(chain, link, bucket, "wait")
                done.append((action, index))
        if not todo and not busy and not pending:
            break
        now += 1
        busy = max(0, busy - 1)
        for queue in queues:
            if queue:
                queue[0][1] -= 1
        _finish(queues, finished)
    return now, peak


def _finish(queues: list[list[list[int]]], finished: set[int]) -> None:
    for queue in queues:
        while queue and queue[0][1] <= 0:
            finished.add(queue.pop(0)[0])


def _members(chain: Chain, bucket: Bucketed) -> tuple[Transfer, ...]:
    return chain.transfers(bucket.kind)[bucket.first : bucket.end]


def _length(chain: Chain, link: Link, bucket: Bucketed, *, second: bool = False) -> int:
    members = _members(chain, bucket)
    tensors = sum(m.num_tensors - m.num_small * bucket.packed for m in members) + bucket.packed
    link = link.others[0] if members[0].link_index else link
    rate = link.all_reduce if second else link.gather if bucket.kind == "gather" else link.reduce
    return int(rate(sum(m.num_bytes for m in members), tensors))


def _copy(chain: Chain, link: Link, bucket: Bucketed, action: str) -> int:
    small = sum(m.small_bytes for m in _members(chain, bucket)) if bucket.packed else 0
    if bucket.kind == "reduce":
        return int(link.copy(small)) if action == "start" else 0
    return int(link.copy(small // link.num_shards if action == "start" else small))


def _twice(chain: Chain, link: Link, bucket: Bucketed) -> int:
    """Return the bytes of the scattered result."""
    return sum(m.num_bytes for m in _members(chain, bucket)) // link.num_shards


def _bytes_at(chain: Chain, link: Link, placement: Placement, done: list[tuple[str, int]], now: tuple[str, int]) -> int:
    """Return the bytes alive while an entry of the program runs, counted from the entries before."""
    action, index = now
    items = sum(a == "item" for a, _ in done)
    last = len(chain.seconds) - 1
    total = chain.base[index] if action == "item" else min(chain.base[max(items - 1, 0)], chain.base[min(items, last)])
    started = [placement.buckets[i] for a, i in [*done, now] if a == "start"]
    waited = [placement.buckets[i] for a, i in done if a == "wait"]
    total += sum(m.num_bytes for b in started if b.kind == "gather" for m in _members(chain, b) if m.last >= items)
    continued = [placement.buckets[i] for a, i in [*done, now] if a == "continue"]
    freed = {m for b in (*waited, *continued) if b.kind == "reduce" for m in range(b.first, b.end)}
    total += sum(_twice(chain, link, b) for b in continued if b not in waited)
    made = items + 1 if action == "item" else items
    total += sum(r.num_bytes for i, r in enumerate(chain.reductions) if r.at <= made and i not in freed)
    if action != "item":
        bucket = placement.buckets[index]
        if bucket.packed and (action == "wait") == (bucket.kind == "gather"):
            total += sum(m.small_bytes for m in _members(chain, bucket))
    return total


def exhaustive(chain: Chain, link: Link, limit: float = math.inf) -> float:
    """Return the seconds of the shortest schedule within a memory limit over all sequences of events, or infinity.

    Equal states are continued once; nothing is pruned. A wait for a gather comes at its first use.
    """
    end = len(chain.seconds)

    def cuts(kind: str, first: int) -> Iterator[Bucketed]:
        transfers = chain.transfers(kind)
        for stop in range(first + 1, len(transfers) + 1):
            if transfers[stop - 1].group != transfers[first].group:
                return
            for packed in (False, True):
                if not packed or sum(m.num_small for m in transfers[first:stop]) > 1:
                    yield Bucketed(kind, first, stop, packed)

    @functools.cache
    def best(
        at: int, g: int, r: int, compute: float, channels: tuple[float, float], flying: tuple, sent: tuple = ()
    ) -> float:
        """Search from a state. `flying` has (bucket, end, whether continued) of pending transfers, in order of start.

        `sent` has (index, end) of the model's pending collectives.
        """
        gathers = [f for f in flying if f[0].kind == "gather"]
        reductions = [f for f in flying if f[0].kind == "reduce" and not f[2]]
        continued = [f for f in flying if f[2]]
        freed = reductions[0][0].first if reductions else r
        alive = sum(t.num_bytes for t in chain.gathers[:g] if t.last >= at)
        twice = sum(_twice(chain, link, f[0]) for f in continued)
        ready = twice + sum(t.num_bytes for t in chain.reductions[freed:] if t.at <= at)
        edge = min(chain.base[max(at - 1, 0)], chain.base[min(at, end - 1)])
        options = []
        if at == end and g == len(chain.gathers) and r == len(chain.reductions) and not flying:
            return compute
        for kind, first, most in (("gather", g, len(chain.gathers)), ("reduce", r, len(chain.reductions))):
            for bucket in cuts(kind, first) if first < most else ():
                members = _members(chain, bucket)
                small = sum(m.small_bytes for m in members) if bucket.packed else 0
                if kind == "gather":
                    fits = edge + alive + ready + sum(m.num_bytes for m in members if m.last >= at) <= limit
                    allowed = members[0].at >= at
                else:
                    fits = edge + alive + ready + small <= limit
                    allowed = members[-1].at <= at
                if allowed and fits:
                    began = compute + _copy(chain, link, bucket, "start")
                    channel = link.channel(kind)
                    stop = max(began, channels[channel]) + _length(chain, link, bucket)
                    now = (stop, channels[1]) if channel == 0 else (channels[0], stop)
                    counts = (bucket.end, r) if kind == "gather" else (g, bucket.end)
                    options.append(best(at, *counts, began, now, (*flying, (bucket, stop, False)), sent))
        if gathers and chain.gathers[gathers[0][0].first].at == at:
            bucket, stop, _ = gathers[0]
            small = sum(m.small_bytes for m in _members(chain, bucket)) if bucket.packed else 0
            if edge + alive + ready + small <= limit:
                after = max(compute, stop) + _copy(chain, link, bucket, "wait")
                options.append(best(at, g, r, after, channels, tuple(f for f in flying if f != gathers[0]), sent))
        if reductions:
            bucket, stop, _ = reductions[0]
            rest = tuple(f for f in flying if f != reductions[0])
            after = max(compute, stop)
            if link.all_reduce is None:
                options.append(best(at, g, r, after, channels, rest, sent))
            else:
                channel = link.all_reduce_on
                stop = max(after, channels[channel]) + _length(chain, link, bucket, second=True)
                now = (stop, channels[1]) if channel == 0 else (channels[0], stop)
                options.append(best(at, g, r, after, now, (*rest, (bucket, stop, True)), sent))
        if continued:
            rest = tuple(f for f in flying if f != continued[0])
            options.append(best(at, g, r, max(compute, continued[0][1]), channels, rest, sent))
        gated = any(chain.gathers[f[0].first].at <= at for f in gathers)
        gated = gated or (g < len(chain.gathers) and chain.gathers[g].at <= at)
        if at < end and not gated:
            making = sum(t.num_bytes for t in chain.reductions[freed:] if t.at == at + 1)
            if chain.base[at] + alive + ready + making <= limit:
                for fixed, end_of_own in sent:
                    compute = max(compute, end_of_own) if chain.fixed[fixed].until == at else compute
                left_to_wait = [pair for pair in sent if chain.fixed[pair[0]].until != at]
                for index, fixed in enumerate(chain.fixed):
                    if fixed.at != at:
                        continue
                    began = max(compute, channels[fixed.channel])
                    others = max(channels[1 - fixed.channel] - began, 0.0)
                    # A blocking one is like compute: slower while the other channel is busy.
                    slower = min(fixed.seconds / (1 - link.contention), others) * link.contention
                    stop = began + fixed.seconds + (slower if fixed.until == at else 0.0)
                    channels = (stop, channels[1]) if fixed.channel == 0 else (channels[0], stop)
                    if fixed.until == at:
                        compute = stop
                    else:
                        left_to_wait.append((index, stop))
                sent = tuple(left_to_wait)
                # Next to a busy channel it advances by (1 - contention) a second, after that by one.
                advanced = max(max(channels) - compute, 0.0) * (1 - link.contention)
                left = chain.seconds[at] - advanced
                after = max(channels) + left if 0 < advanced < chain.seconds[at] else None
                slow = chain.seconds[at] / (1 - link.contention) if advanced else chain.seconds[at]
                options.append(best(at + 1, g, r, compute + slow if after is None else after, channels, flying, sent))
        return min(options, default=math.inf)

    return best(0, 0, 0, 0.0, (0.0, 0.0), ())
