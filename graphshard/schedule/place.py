"""Launch positions of given buckets: as early as their order and the memory allow.

A bucket is started when its turn has come, what it carries is ready, and it fits until its last use beside what must be
there. A reduction is continued, or waited for, once it has ended, or when an item would not fit otherwise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from graphshard.schedule.deep import least_memory
from graphshard.schedule.own import Own, pass_own
from graphshard.schedule.problem import Bucketed, Chain, Link, Occurrence, Placement
from graphshard.schedule.together import load, startable


def place(
    chain: Chain,
    link: Link,
    order: Sequence[Bucketed],
    limit: float = math.inf,
    margin: float = math.inf,
    *,
    late: bool = False,
    aside: bool = False,
) -> Placement | None:
    """Start and wait for buckets in this order; None if they do not fit in `limit` bytes.

    Reductions may overtake gathers that do not fit yet or that are not urgent, and a gather that is needed overtakes
    reductions. A gather is urgent if starting it at the next position would leave less than `margin` times its length
    between its end and its use, were the link otherwise idle.

    Args:
        late: second legs start behind the last item, or where the memory allows no other; otherwise when the first has
            ended.
        aside: what would hold up the next one of the model's own collectives starts behind it, unless it gets late.
    """
    return _Placing(chain, link, order, limit, margin, late, aside).run()


class _Placing:
    def __init__(
        self, chain: Chain, link: Link, order: Sequence[Bucketed], limit: float, margin: float, late: bool, aside: bool
    ) -> None:
        self.chain, self.link, self.limit, self.late = chain, link, limit, late
        self.order = order
        self.loads = [load(link, b.kind, chain.transfers(b.kind)[b.first : b.end], b.packed) for b in order]
        self.waiting = {
            "gather": deque(i for i, b in enumerate(order) if b.kind == "gather"),
            "reduce": deque(i for i, b in enumerate(order) if b.kind == "reduce"),
        }
        self.urgent = self._latest_starts(margin)
        self.gathers: deque[int] = deque()
        self.reductions: deque[int] = deque()  # first legs that are under way
        self.second_legs: deque[int] = deque()  # second legs that are
        self.done: dict[int, float] = {}
        self.compute = 0.0
        self.channels = [0.0, 0.0]
        self.own: tuple[tuple[int, float], ...] = ()
        self.upcoming = self._upcoming() if aside else {}
        self.least = least_memory(chain)
        self.unreduced = 0  # bytes of gradients that are not waited for, and of what second legs have twice
        self.gathered = 0
        self.dies: dict[int, int] = {}
        self.events: list[Occurrence] = []

    def _latest_starts(self, margin: float) -> dict[int, float]:
        """Per gather the seconds of compute by which it becomes urgent; empty if every gather is at once."""
        found: dict[int, float] = {}
        latest = math.inf
        for index in reversed(self.waiting["gather"]) if margin < math.inf else ():
            seconds = self.loads[index].seconds
            # On the clock of undisturbed compute: what holds compute up moves a position and the uses behind it alike.
            latest = min(latest, self.chain.elapsed[self.chain.gathers[self.order[index].first].at]) - seconds
            found[index] = latest - margin * seconds
        return found

    def _upcoming(self) -> dict[tuple[int, int], Own]:
        """By channel and position the next one of the model's own collectives that runs at once."""
        found: dict[tuple[int, int], Own] = {}
        for own in reversed([own for own in self.chain.own if own.at_once]):
            found.update({(own.channel, position): own for position in range(own.at + 1)})
        return found

    def _holds_up(self, index: int, position: int) -> bool:
        """Whether a bucket would hold up what the model communicates next, and could as well come behind it."""
        bucket, cost = self.order[index], self.loads[index]
        channel = self.link.channel(bucket.kind)
        own = self.upcoming.get((channel, position))
        if own is None:
            return False
        elapsed = self.chain.elapsed
        begins = elapsed[own.at] - elapsed[position]
        if max(self.channels[channel] - self.compute, 0.0) + cost.seconds <= begins:
            return False
        if bucket.kind == "reduce":
            return True
        used = elapsed[self.chain.gathers[bucket.first].at] - elapsed[position]
        return used - begins - own.seconds >= cost.seconds

    def _model(self, item: int) -> None:
        if self.chain.own:
            passed = pass_own(*self.chain.own_of[item], 0.0, self.compute, self.channels, self.own)
            self.compute, self.channels, self.own = passed[0], list(passed[1]), passed[2]

    def run(self) -> Placement | None:
        made = [0] * len(self.chain.seconds)
        for reduction in self.chain.reductions:
            made[reduction.at - 1] += reduction.num_bytes
        for position in range(len(self.chain.seconds) + 1):
            self.gathered -= self.dies.pop(position, 0)
            self._settle(position)
            while self._start_next(position):
                self._settle(position)
            if not self._need(position):
                return None
            if position == len(self.chain.seconds):
                break
            base = self.chain.base[position] + made[position]
            while base + self.gathered + self.unreduced > self.limit:
                if not self._relieve(position):
                    return None
            self.unreduced += made[position]
            self._model(position)
            self.compute += self.chain.seconds[position]
        end = len(self.chain.seconds)
        while self.waiting["reduce"]:  # their buffers did not fit beside the gradients that are on their way
            if self._may_reduce(self.waiting["reduce"][0], end):
                self._start(self.waiting["reduce"][0], end)
            elif not self._relieve(end):
                return None
        while self.reductions:
            self._pass_on(end)
        while self.second_legs:
            self._wait_second(end)
        return self._result()

    def _result(self) -> Placement:
        """Buckets numbered in the order of their starts."""
        number = {e.bucket: i for i, e in enumerate(e for e in self.events if e.action == "start")}
        buckets = tuple(self.order[index] for index in number)
        return Placement(buckets, tuple(Occurrence(e.action, number[e.bucket], e.at) for e in self.events))

    def _start_next(self, position: int) -> bool:
        """Start the bucket whose turn it is, or the reduction behind gathers that do not fit."""
        gather = self.waiting["gather"][0] if self.waiting["gather"] else None
        reduction = self.waiting["reduce"][0] if self.waiting["reduce"] else None
        following = self.chain.elapsed[min(position + 1, len(self.chain.seconds))]
        turn = bool(self.urgent) or self.link.separate or reduction is None
        turn = turn or (gather is not None and reduction is not None and gather < reduction)
        if gather is not None and self.urgent and following <= self.urgent[gather]:
            turn = False
        if gather is not None and turn and self._holds_up(gather, position):
            turn = False
        if gather is not None and turn and self._may_gather(gather, position):
            self._start(gather, position)
            return True
        if reduction is not None and self._may_reduce(reduction, position) and not self._holds_up(reduction, position):
            self._start(reduction, position)
            return True
        return False

    def _may_gather(self, index: int, position: int) -> bool:
        bucket = self.order[index]
        members = self.chain.gathers[bucket.first : bucket.end]
        if not startable(members, "gather", position):
            return False
        if self.limit == math.inf:
            return True
        num_bytes = sum(m.num_bytes for m in members)
        if self.chain.boundary[position] + self.gathered + self.unreduced + num_bytes > self.limit:
            return False
        # Until its first use a member comes on top of what every schedule needs; from then on `least` counts it.
        # Gradients count at this position only: before a later item their reductions can be waited for.
        begin = position
        for index, member in enumerate(members):
            items = self.least[begin : member.at]
            if items:
                most = max(items) if begin > position else max(items[0] + self.unreduced, *items)
                if most + sum(m.num_bytes for m in members[index:]) > self.limit:
                    return False
                begin = member.at
        return True

    def _may_reduce(self, index: int, position: int) -> bool:
        bucket = self.order[index]
        members = self.chain.reductions[bucket.first : bucket.end]
        alive = self.chain.boundary[position] + self.gathered + self.unreduced
        return startable(members, "reduce", position) and alive + self.loads[index].transient <= self.limit

    def _start(self, index: int, position: int) -> None:
        bucket, cost = self.order[index], self.loads[index]
        self.waiting[bucket.kind].remove(index)
        self.compute += cost.copy_in
        channel = self.link.channel(bucket.kind)
        # Compute's real clock here, copies and waits included, unlike that of `_latest_starts`.
        self.channels[channel] = self.done[index] = max(self.compute, self.channels[channel]) + cost.seconds
        self.events.append(Occurrence("start", index, position))
        if bucket.kind == "reduce":
            self.reductions.append(index)
            return
        self.gathers.append(index)
        for member in self.chain.gathers[bucket.first : bucket.end]:
            self.gathered += member.num_bytes
            self.dies[member.last + 1] = self.dies.get(member.last + 1, 0) + member.num_bytes
            if self.limit < math.inf:
                for item in range(position, member.at):
                    self.least[item] += member.num_bytes

    def _need(self, position: int) -> bool:
        """Start what is needed now and was not, and wait for it."""
        while self.waiting["gather"]:
            index = self.waiting["gather"][0]
            members = self.chain.gathers[self.order[index].first : self.order[index].end]
            if members[0].at > position:
                break
            if not startable(members, "gather", position):
                return False
            num_bytes = sum(m.num_bytes for m in members)
            while self.chain.boundary[position] + self.gathered + self.unreduced + num_bytes > self.limit:
                if not self._relieve(position):
                    return False
            self._start(index, position)
        while self.gathers and self.chain.gathers[self.order[self.gathers[0]].first].at <= position:
            cost = self.loads[self.gathers[0]]
            while self.chain.boundary[position] + self.gathered + self.unreduced + cost.transient > self.limit:
                if not self._relieve(position):
                    return False
            # Compute is held up by the gather: second legs of what ends before that start meanwhile.
            while self._continues and self.done[self.reductions[0]] <= self.done[self.gathers[0]]:
                self._pass_on(position)
            index = self.gathers.popleft()
            self.compute = max(self.compute, self.done[index]) + cost.copy_out
            self.events.append(Occurrence("wait", index, position))
            self._settle(position)
        return True

    def _relieve(self, position: int) -> bool:
        """Free gradients by waiting for a reduction; False if none is ready."""
        if not self.reductions and self.waiting["reduce"] and self._may_reduce(self.waiting["reduce"][0], position):
            self._start(self.waiting["reduce"][0], position)
        if self.reductions:
            self._pass_on(position)
        elif self.second_legs:
            self._wait_second(position)
        else:
            return False
        return True

    def _settle(self, position: int) -> None:
        while self.reductions and not self._waits_for_the_end and self.done[self.reductions[0]] <= self.compute:
            self._pass_on(position)
        while self.second_legs and self.done[self.second_legs[0]] <= self.compute:
            self._wait_second(position)

    @property
    def _waits_for_the_end(self) -> bool:
        return self.late and self.link.all_reduce is not None

    @property
    def _continues(self) -> bool:
        """Whether there is a first leg that may be followed by the second."""
        return bool(self.reductions) and self.link.all_reduce is not None and not self.late

    def _pass_on(self, position: int) -> None:
        """Wait for the oldest reduction, and start its second leg if it has one."""
        index = self.reductions.popleft()
        self.compute = max(self.compute, self.done[index])
        bucket, cost = self.order[index], self.loads[index]
        self.unreduced -= sum(m.num_bytes for m in self.chain.reductions[bucket.first : bucket.end])
        if self.link.all_reduce is None:
            self.events.append(Occurrence("wait", index, position))
            return
        self.unreduced += cost.twice
        channel = self.link.channel("all_reduce")
        self.channels[channel] = self.done[index] = max(self.compute, self.channels[channel]) + cost.second
        self.events.append(Occurrence("continue", index, position))
        self.second_legs.append(index)

    def _wait_second(self, position: int) -> None:
        index = self.second_legs.popleft()
        self.compute = max(self.compute, self.done[index])
        self.unreduced -= self.loads[index].twice
        self.events.append(Occurrence("wait", index, position))
