"""The best schedule of a small phase, exactly: every sequence of events, except those that another is no worse than.

A state is what has happened: items run, buckets started, continued and waited for. It is reached with several clocks;
one set of clocks is no worse than another of the same items and starts if compute, every channel, and every transfer in
flight are no later, and no more is in flight. States only grow, so they are taken in order.

Waiting for a reduction that has ended costs nothing and frees its gradients, so it is done at once. Waiting for one
that has not ended is only ever useful to free memory. One that has a second leg is continued at once, too, if nothing
else uses the channel of that and it slows nothing down; what is there twice then is no more than the gradients that are
freed.

The number of states grows exponentially, so there is a budget. It is counted in steps, not in seconds: all ranks, and
all machines, must find the same schedule. Where it ends the search, what has been found stands, and the states that are
left say what no schedule beats.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from graphshard.cost.costs import slowed
from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.budget import Budget
from graphshard.schedule.own import pass_own
from graphshard.schedule.problem import KINDS, Bucketed, Chain, Link, Occurrence, Placement
from graphshard.schedule.together import Load, load, modes, rests, runs, startable

# Steps of a budget for a state, and one for each that it is compared with.
_STATE = 10


class _Flight(NamedTuple):
    """A bucket that was started and not waited for."""

    bucket: int
    first: int
    end: int
    done: float
    copy_out: float
    transient: int
    second: float
    twice: int


@dataclass(frozen=True)
class _State:
    """Where a sequence of events has come to.

    Attributes:
        at: items that have run.
        compute, channels: clocks.
        gathered, reduced: transfers that were started.
        freed: reductions whose gradients are not needed any more: that were continued, or waited for.
        gathers, reductions: in flight, oldest first.
        seconds: second legs in flight, oldest first.
        num_buckets: that were started.
        path: the last decision and those before it.
        own: ends of what the model communicates and has not waited for, by its index.
    """

    at: int
    compute: float
    channels: tuple[float, float]
    gathered: int
    reduced: int
    freed: int
    gathers: tuple[_Flight, ...]
    reductions: tuple[_Flight, ...]
    seconds: tuple[_Flight, ...]
    num_buckets: int
    path: _Path | None
    own: tuple[tuple[int, float], ...] = ()


class _Path(NamedTuple):
    """A started bucket (or None) and an event, and what happened before."""

    bucket: Bucketed | None
    event: Occurrence
    before: _Path | None


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        seconds, placement: the best schedule below what was asked for; None and infinity if there is none.
        bound: seconds that no schedule beats.
    """

    seconds: float
    placement: Placement | None
    bound: float


def best_placement(chain: Chain, link: Link, budget: Budget, limit: float = math.inf, below: float = math.inf) -> Found:
    """The shortest schedule of a chain that keeps its memory within `limit` bytes and takes less than `below` seconds.

    The steps grow exponentially with the number of transfers; about a dozen are quick, the more so the closer `below`
    is to the optimum. When the budget ends, it is the best one so far.
    """
    return _Search(chain, link, budget, limit, below).run()


class _Search:
    def __init__(self, chain: Chain, link: Link, budget: Budget, limit: float, below: float) -> None:
        self.chain, self.link, self.budget, self.limit, self.below = chain, link, budget, limit, below
        self.end = len(chain.seconds)
        # Fewer buckets never take longer in all than more of them: what is left takes at least what it takes as one.
        self.rest = {kind: list(_rests(chain, link, kind)) for kind in KINDS}
        self.rest["all_reduce"] = [link.least("all_reduce", n) for n in rests(chain.reductions)]
        # Whether to continue what has ended is a question where others want the channel, or it slows compute down.
        shared = link.shares or any(own.channel == link.all_reduce_on for own in chain.own)
        self.continues = link.all_reduce is None or not (shared or link.contention)
        self.own = [[chain.own_seconds(channel, item) for item in range(self.end + 1)] for channel in (0, 1)]
        self.kept: dict[tuple[object, ...], list[tuple[float, ...]]] = {}

    def run(self) -> Found:
        frontier = deque([_State(0, 0.0, (0.0, 0.0), 0, 0, 0, (), (), (), 0, None)])
        best: _State | None = None
        # An item is run last, so all states of a position are there when its first successor is taken.
        while frontier:
            following: list[_State] = []
            while frontier:
                if self.budget.ended:
                    left = min(map(self._least, (*frontier, *following)))
                    return self._found(best, min(left, self.below))
                state = frontier.popleft()
                done = self._finish(state) if state.at == self.end else None
                if done is not None and done.compute < self.below:
                    # From here on every complete schedule found is what the rest must beat.
                    best, self.below = done, done.compute
                frontier.extend(new for new in map(self._settle, self._events(state)) if self._is_new(new))
                if (advanced := self._advance(state)) is not None:
                    following.append(advanced)
            # A state is compared with those of its own position alone, and that one is left for good.
            self.kept.clear()
            frontier = deque(state for state in following if self._is_new(state))
        return self._found(best, self.below)

    def _found(self, best: _State | None, bound: float) -> Found:
        return Found(math.inf, None, bound) if best is None else Found(best.compute, _placement(best), bound)

    def _events(self, state: _State) -> Iterator[_State]:
        for kind in KINDS:
            yield from self._starts(kind, state)
        if state.gathers and self.chain.gathers[state.gathers[0].first].at == state.at:
            yield from self._wait_gather(state)
        # Continuing one is the start of its second leg, which may be wanted whether or not there is a limit.
        if state.reductions and (self.limit < math.inf or self.link.all_reduce is not None):
            yield self._pass_on(state)
        if state.seconds and self.limit < math.inf:
            yield self._wait_second(state)

    def _starts(self, kind: CollectiveKind, state: _State) -> Iterator[_State]:
        """Every bucket of a kind that could start now."""
        transfers = self.chain.transfers(kind)
        begun = state.gathered if kind == "gather" else state.reduced
        for end in runs(transfers, begun) if begun < len(transfers) else ():
            members = transfers[begun:end]
            for packed in modes(members) if startable(members, kind, state.at) else ():
                cost = load(self.link, kind, members, packed)
                new = self._started(state, Bucketed(kind, begun, end, packed), cost)
                # A gather's buffer is there at its wait, a reduction's at its start.
                if self._fits(new, 0 if kind == "gather" else cost.transient):
                    yield new

    def _started(self, state: _State, bucket: Bucketed, cost: Load) -> _State:
        compute = state.compute + cost.copy_in
        channel = self.link.channel(bucket.kind)
        # The channel takes buckets in the order of their starts: this one begins when both clocks have come to it.
        done = max(compute, state.channels[channel]) + cost.seconds
        flight = _Flight(
            state.num_buckets, bucket.first, bucket.end, done, cost.copy_out, cost.transient, cost.second, cost.twice
        )
        new = replace(
            state,
            compute=compute,
            channels=_with_clock(state.channels, channel, done),
            num_buckets=state.num_buckets + 1,
            path=_Path(bucket, Occurrence("start", state.num_buckets, state.at), state.path),
        )
        if bucket.kind == "gather":
            return replace(new, gathered=bucket.end, gathers=(*state.gathers, flight))
        return replace(new, reduced=bucket.end, reductions=(*state.reductions, flight))

    def _wait_gather(self, state: _State) -> Iterator[_State]:
        flight = state.gathers[0]
        if self._fits(state, flight.transient):
            yield replace(
                state,
                compute=max(state.compute, flight.done) + flight.copy_out,
                gathers=state.gathers[1:],
                path=_Path(None, Occurrence("wait", flight.bucket, state.at), state.path),
            )

    def _pass_on(self, state: _State) -> _State:
        """Wait for the oldest reduction, and start its second leg if it has one."""
        flight = state.reductions[0]
        compute, freed = max(state.compute, flight.done), flight.end
        new = replace(state, compute=compute, freed=freed, reductions=state.reductions[1:])
        if self.link.all_reduce is None:
            return replace(new, path=_Path(None, Occurrence("wait", flight.bucket, state.at), state.path))
        channel = self.link.channel("all_reduce")
        done = max(compute, state.channels[channel]) + flight.second
        return replace(
            new,
            channels=_with_clock(state.channels, channel, done),
            seconds=(*state.seconds, flight._replace(done=done)),
            path=_Path(None, Occurrence("continue", flight.bucket, state.at), state.path),
        )

    def _wait_second(self, state: _State) -> _State:
        flight = state.seconds[0]
        return replace(
            state,
            compute=max(state.compute, flight.done),
            seconds=state.seconds[1:],
            path=_Path(None, Occurrence("wait", flight.bucket, state.at), state.path),
        )

    def _settle(self, state: _State) -> _State:
        """Go on with the reductions that have ended."""
        while self.continues and state.reductions and state.reductions[0].done <= state.compute:
            state = self._pass_on(state)
        while state.seconds and state.seconds[0].done <= state.compute:
            state = self._wait_second(state)
        return state

    def _advance(self, state: _State) -> _State | None:
        """Run the next item, if everything that gates it is there and it fits."""
        gathers = self.chain.gathers
        if state.at == self.end:
            return None
        if state.gathers and gathers[state.gathers[0].first].at == state.at:
            return None
        if state.gathered < len(gathers) and gathers[state.gathered].at == state.at:
            return None
        if self.chain.base[state.at] + self._gathered(state, state.at) + self._unreduced(state, state.at) > self.limit:
            return None
        own, (compute, channels) = state.own, (state.compute, state.channels)
        if self.chain.own:
            compute, channels, own = pass_own(
                *self.chain.own_of[state.at], self.link.contention, compute, channels, own
            )
        # What is launched later is launched behind this item, so nothing else slows it down.
        seconds = slowed(self.chain.seconds[state.at], max(channels) - compute, self.link.contention)
        return self._settle(replace(state, at=state.at + 1, compute=compute + seconds, channels=channels, own=own))

    def _finish(self, state: _State) -> _State | None:
        """Wait for everything, if everything was started."""
        if state.reduced < len(self.chain.reductions):
            return None
        # Nothing else wants a channel any more.
        while state.reductions:
            state = self._pass_on(state)
        while state.seconds:
            state = self._wait_second(state)
        return state

    def _fits(self, state: _State, transient: int = 0) -> bool:
        """Whether what is alive between two items, and a buffer, fit."""
        alive = self._gathered(state, state.at) + self._unreduced(state, state.at - 1)
        return self.chain.boundary[state.at] + alive + transient <= self.limit

    def _gathered(self, state: _State, item: int) -> int:
        return sum(g.num_bytes for g in self.chain.gathers[: state.gathered] if g.last >= item)

    def _unreduced(self, state: _State, item: int) -> int:
        twice = sum(flight.twice for flight in state.seconds)
        return twice + sum(r.num_bytes for r in self.chain.reductions[state.freed :] if r.at - 1 <= item)

    def _is_new(self, state: _State) -> bool:
        """Whether it may become the best and no state that was seen is as good; what it is as good as is forgotten."""
        self.budget.spend(_STATE)
        if self._least(state) >= self.below:
            return False
        if self.budget.ended:
            return True
        key: tuple[object, ...] = (state.at, state.gathered, state.reduced)
        if self.link.all_reduce is not None:  # what second legs are left, and of which buckets
            key = (*key, state.freed, *((flight.end, flight.second) for flight in state.reductions))
        clocks = self._clocks(state)
        others = self.kept.setdefault(key, [])
        self.budget.spend(len(others))
        if any(all(a <= b for a, b in zip(other, clocks)) for other in others):
            return False
        others[:] = [other for other in others if not all(a <= b for a, b in zip(clocks, other))]
        others.append(clocks)
        return True

    def _least(self, state: _State) -> float:
        """Seconds that every schedule takes from here: the rest of the compute, or of the bytes."""
        # Nothing begins before the clock of its channel, and no item before compute's.
        left = [own[state.at] for own in self.own]
        left[0] += self.rest["gather"][state.gathered]
        left[self.link.channel("reduce")] += self.rest["reduce"][state.reduced]
        left[self.link.channel("all_reduce")] += self.rest["all_reduce"][state.freed]
        compute = state.compute + self.chain.elapsed[-1] - self.chain.elapsed[state.at]
        return max(compute, state.channels[0] + left[0], state.channels[1] + left[1])

    def _clocks(self, state: _State) -> tuple[float, ...]:
        """Everything that decides what can still be reached: less is better in every entry.

        A transfer in flight counts with the end of its bucket, the copies and the buffer at the bucket's first.
        """
        # Memory needs no entry of its own. States that are compared have started the same transfers, so the same are
        # gathered; and what was waited for counts as infinitely early, so fewer gradients are alive where all are less.
        clocks = [state.compute, *state.channels, *(end for _, end in state.own)]
        # Gathers of earlier items were waited for before those ran, in every state.
        first = next((i for i, g in enumerate(self.chain.gathers) if g.at >= state.at), state.gathered)
        pending = {flight.first: flight for flight in state.gathers}
        done, begun = -math.inf, False
        waiting = state.gathers[0].first if state.gathers else state.gathered
        for i in range(first, state.gathered):
            flight = pending.get(i)
            begun = begun or i >= waiting
            # Between the first members of two buckets lie the others of the bucket before, which end with it.
            done = flight.done if flight else done
            clocks += [
                done if begun else -math.inf,
                flight.copy_out if flight else 0,
                flight.transient if flight else 0,
            ]
        ends = {i: f.done for f in (*state.reductions, *state.seconds) for i in range(f.first, f.end)}
        clocks += [ends.get(i, -math.inf) for i in range(state.reduced)]
        return tuple(clocks)


def _with_clock(channels: tuple[float, float], channel: int, clock: float) -> tuple[float, float]:
    return (clock, channels[1]) if channel == 0 else (channels[0], clock)


def _rests(chain: Chain, link: Link, kind: CollectiveKind) -> Iterator[float]:
    """Seconds of the link, at the least, for what is left from each transfer on."""
    for left in rests(chain.transfers(kind)):
        yield link.least(kind, left)


def _placement(state: _State) -> Placement:
    buckets: list[Bucketed] = []
    events: list[Occurrence] = []
    path = state.path
    while path is not None:
        events.append(path.event)
        if path.bucket is not None:
            buckets.append(path.bucket)
        path = path.before
    return Placement(tuple(reversed(buckets)), tuple(reversed(events)))
