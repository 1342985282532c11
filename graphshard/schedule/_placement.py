"""Positions of buckets: schedules that need no search, the earliest feasible launches, and gathers delayed for free."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from graphshard.schedule.problem import (
    KINDS,
    Bucketed,
    Chain,
    FixedCollective,
    Link,
    Occurrence,
    Placement,
    load,
    modes,
    startable,
)
from graphshard.schedule.simulator import ChainRun, ChainState


def singles(chain: Chain) -> list[Bucketed]:
    """Return every transfer as a bucket, in the order in which compute meets them."""
    found = [(r.at, 0, i, Bucketed("reduce", i, i + 1, bool(r.packed))) for i, r in enumerate(chain.reductions)]
    found += [(g.at, 1, i, Bucketed("gather", i, i + 1, bool(g.packed))) for i, g in enumerate(chain.gathers)]
    return [bucket for *_, bucket in sorted(found, key=lambda entry: entry[:3])]


def laziest(chain: Chain, link: Link) -> Placement:
    """Return the schedule of single transfers at the last moment: no schedule needs less memory."""
    buckets = singles(chain)
    events: list[Occurrence] = []
    for index, bucket in enumerate(buckets):
        (member,) = chain.members(bucket)
        start = member.at if member.start is None else member.start
        events.append(Occurrence("start", index, start))
        if bucket.kind == "reduce" and link.all_reduce is not None:
            events.append(Occurrence("continue", index, start))
        events.append(Occurrence("wait", index, max(start, member.at)))
    return Placement(tuple(buckets), tuple(sorted(events, key=lambda event: event.at)))


def one_ahead(chain: Chain, link: Link) -> Placement:
    """Return FSDP2's order: a gather starts when the one before has arrived, a reduction ends when the next one starts.

    Where reductions have a second leg, it starts then, and is waited for at the end.
    """
    buckets = [replace(b, packed=modes(chain.members(b))[-1]) for b in singles(chain)]
    at = [chain.members(bucket)[0].at for bucket in buckets]
    gathers, reductions = ([i for i, b in enumerate(buckets) if b.kind == kind] for kind in KINDS)
    second = link.all_reduce is not None
    events: list[Occurrence] = []
    for index, following in zip(reductions, [*(at[i] for i in reductions[1:]), len(chain.seconds)]):
        events.append(Occurrence("start", index, at[index]))
        events.append(Occurrence("continue" if second else "wait", index, following))
    for index, start in zip(gathers, [0, *(at[i] for i in gathers)]):
        events += [Occurrence("start", index, start), Occurrence("wait", index, at[index])]
    if second:
        events += [Occurrence("wait", index, len(chain.seconds)) for index in reductions]
    return Placement(tuple(buckets), tuple(sorted(events, key=lambda event: event.at)))


def undisturbed(link: Link) -> Link:
    """Return the link on which nothing slows compute down."""
    return replace(link, contention=0.0) if link.contention else link


def place(
    chain: Chain, link: Link, order: Sequence[Bucketed], limit: float = math.inf, *, urgent: bool = False
) -> Placement | None:
    """Start and wait for buckets in this order; return None if they do not fit in `limit` bytes.

    A bucket is started when its turn has come, its members are ready, and it fits until its last use next to what must
    be there. A reduction is continued, or waited for, once it has ended, or when an item would not fit otherwise.

    Reductions may overtake gathers that do not fit yet, and a gather that is needed overtakes reductions. With `urgent`
    gathers start only if starting them at the next position would leave less than their length between their end and
    their use, were the link otherwise idle. What would hold up the next of the model's own collectives starts after it,
    unless it gets late.
    """
    return _Placing(chain, link, order, limit, urgent).run()


class _Placing:
    def __init__(self, chain: Chain, link: Link, order: Sequence[Bucketed], limit: float, urgent: bool) -> None:
        self.chain, self.link, self.order, self.limit = chain, link, order, limit
        self.end = len(chain.seconds)
        self.state = ChainState(chain, undisturbed(link))
        self.loads = [load(chain, link, bucket) for bucket in order]
        self.members = [chain.members(bucket) for bucket in order]
        self.bytes = [sum(m.num_bytes for m in members) for members in self.members]
        self.waiting = {kind: deque(i for i, b in enumerate(order) if b.kind == kind) for kind in KINDS}
        self.urgent = self._latest_starts() if urgent else {}
        # By channel and position, the next of the model's collectives that compute waits for at once.
        self.upcoming: dict[tuple[int, int], FixedCollective] = {}
        for fixed in reversed([fixed for fixed in chain.fixed if fixed.at_once]):
            self.upcoming.update({(fixed.channel, position): fixed for position in range(fixed.at + 1)})
        self.least = list(chain.least_memory)

    def _latest_starts(self) -> dict[int, float]:
        """Return by gather the seconds of compute by which it becomes urgent."""
        found: dict[int, float] = {}
        latest = math.inf
        for index in reversed(self.waiting["gather"]):
            seconds = self.loads[index].seconds
            # On the clock of undisturbed compute: what holds compute up moves a position and later uses alike.
            latest = min(latest, self.chain.elapsed[self.members[index][0].at]) - seconds
            found[index] = latest - seconds
        return found

    def _holds_up(self, index: int) -> bool:
        """Return whether a bucket would hold up the model's next collective, and could as well come after it."""
        bucket, cost, position, clocks = self.order[index], self.loads[index], self.state.at, self.state.clocks
        channel = self.link.channel(bucket.kind)
        fixed = self.upcoming.get((channel, position))
        if fixed is None:
            return False
        elapsed = self.chain.elapsed
        begins = elapsed[fixed.at] - elapsed[position]
        if max(clocks.channels[channel] - clocks.compute, 0.0) + cost.seconds <= begins:
            return False
        if bucket.kind == "reduce":
            return True
        used = elapsed[self.members[index][0].at] - elapsed[position]
        return used - begins - fixed.seconds >= cost.seconds

    def run(self) -> Placement | None:
        state = self.state
        for position in range(self.end + 1):
            self.state.settle()
            while self._start_next():
                self.state.settle()
            if not self._need():
                return None
            if position == self.end:
                break
            needed = self.chain.base[position] + self.chain.made[position]
            while needed + state.gathered + state.unreduced > self.limit:
                if not self._relieve():
                    return None
            state.item()
        while self.waiting["reduce"]:  # their buffers did not fit next to the gradients that are on their way
            if self._may_reduce(self.waiting["reduce"][0]):
                self._start(self.waiting["reduce"][0])
            elif not self._relieve():
                return None
        state.finish()
        return state.placement

    def _start_next(self) -> bool:
        """Start the bucket whose turn it is, or the reduction after gathers that do not fit."""
        gather, reduction = (self.waiting[kind][0] if self.waiting[kind] else None for kind in KINDS)
        if gather is not None:
            turn = bool(self.urgent) or self.link.separate or reduction is None or gather < reduction
            if self.urgent and self.chain.elapsed[min(self.state.at + 1, self.end)] <= self.urgent[gather]:
                turn = False
            if turn and not self._holds_up(gather) and self._may_gather(gather):
                self._start(gather)
                return True
        if reduction is not None and self._may_reduce(reduction) and not self._holds_up(reduction):
            self._start(reduction)
            return True
        return False

    def _may_gather(self, index: int) -> bool:
        members, state = self.members[index], self.state
        if not startable(members, "gather", state.at):
            return False
        if self.limit == math.inf:
            return True
        if state.alive + self.bytes[index] > self.limit:
            return False
        # Until its first use a member comes on top of what every schedule needs; from then on `least` counts it.
        # Gradients count at this position only: before a later item their reductions can be waited for.
        begin = state.at
        for first, member in enumerate(members):
            items = self.least[begin : member.at]
            if items:
                most = max(items) if begin > state.at else max(items[0] + state.unreduced, *items)
                if most + sum(m.num_bytes for m in members[first:]) > self.limit:
                    return False
                begin = member.at
        return True

    def _may_reduce(self, index: int) -> bool:
        fits = self.state.alive + self.loads[index].transient + self.loads[index].received <= self.limit
        return fits and startable(self.members[index], "reduce", self.state.at)

    def _start(self, index: int) -> None:
        bucket = self.order[index]
        self.waiting[bucket.kind].remove(index)
        self.state.start(bucket, self.loads[index])
        if bucket.kind == "gather" and self.limit < math.inf:
            for member in self.members[index]:
                for item in range(self.state.at, member.at):
                    self.least[item] += member.num_bytes

    def _need(self) -> bool:
        """Start the gathers that are needed now and were not started, and wait for them."""
        state, waiting = self.state, self.waiting["gather"]
        while waiting and self.members[waiting[0]][0].at <= state.at:
            index = waiting[0]
            if not startable(self.members[index], "gather", state.at):
                return False
            while state.alive + self.bytes[index] > self.limit:
                if not self._relieve():
                    return False
            self._start(index)
        while state.gathers and self.chain.members(state.buckets[state.gathers[0]])[0].at <= state.at:
            number = state.gathers[0]
            while state.alive + state.loads[number].transient > self.limit:
                if not self._relieve():
                    return False
            # Compute is held up by the gather: second legs of what ends before that start meanwhile.
            if self.link.all_reduce is not None:
                while state.reductions and state.ends[state.reductions[0]] <= state.ends[number]:
                    state.pass_on()
            state.wait(number)
            self.state.settle()
        return True

    def _relieve(self) -> bool:
        """Free gradients by waiting for a reduction; return False if none is ready."""
        state = self.state
        if not state.reductions and self.waiting["reduce"] and self._may_reduce(self.waiting["reduce"][0]):
            self._start(self.waiting["reduce"][0])
        if state.reductions:
            state.pass_on()
        elif state.second_legs:
            state.wait(state.second_legs[0])
        else:
            return False
        return True


def delay(chain: Chain, link: Link, placement: Placement) -> Placement:
    """Start gathers as late as keeps every clock, but so early that they end their length before their use.

    Memory is held no longer than it pays: compute, and everything else on the link, keep their clocks.
    """
    run = ChainRun(chain, undisturbed(link), placement)
    following = [(len(chain.seconds), math.inf)] * 2  # by channel: position and time of the start that follows
    first: defaultdict[int, deque[Occurrence]] = defaultdict(deque)  # what was moved comes first at its position
    rest: defaultdict[int, list[Occurrence]] = defaultdict(list)
    fixed_left = deque(enumerate(chain.fixed))
    for event in reversed(placement.events):
        while fixed_left and fixed_left[-1][1].at >= event.at:  # it starts after what is started at its position
            index, fixed = fixed_left.pop()
            following[fixed.channel] = fixed.at, run.fixed_starts[index]
        if event.action != "start":
            rest[event.at].append(event)
            if event.action == "continue":
                following[link.channel("all_reduce")] = event.at, run.continued[event.bucket]
            continue
        bucket, cost = placement.buckets[event.bucket], run.loads[event.bucket]
        # From the last event to the first, so the start that follows on the channel has found its place. This one must
        # not come after it, nor end after it begins.
        position, limit = following[link.channel(bucket.kind)]
        start, at = run.starts[event.bucket], event.at
        members = chain.members(bucket)
        # A copy takes time of compute: moving it would move compute's clock.
        if bucket.kind == "gather" and not cost.copy_in and all(m.start is None for m in members):
            latest = min(limit - cost.seconds, max(start, run.waited[event.bucket] - 2 * cost.seconds))
            # The last position to which compute has come by then. `arrivals` is before the events of a position, and
            # what is moved becomes the first of them, so it is launched at that very time.
            at = max(at, min(bisect.bisect_right(run.arrivals, latest) - 1, position, members[0].at))
            start = max(start, run.arrivals[at]) if at > event.at else start
        if at > event.at:
            first[at].appendleft(Occurrence("start", event.bucket, at))
        else:
            rest[at].append(event)
        following[link.channel(bucket.kind)] = at, start
    positions = range(len(chain.seconds) + 1)
    return Placement(placement.buckets, tuple(e for p in positions for e in (*first[p], *reversed(rest[p]))))
