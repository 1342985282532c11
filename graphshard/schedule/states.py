"""States of a schedule of a small phase, and what may happen next: every sequence of events is a path through them.

A state is what has happened: items run, buckets started, continued and waited for, with the clocks that this takes.

Waiting for a reduction that has ended costs nothing and frees its gradients, so it is done at once. Waiting for one
that has not ended is only ever useful to free memory. One that has a second leg is continued at once, too, if nothing
else uses the channel of that and it slows nothing down; what is there twice then is no more than the gradients that are
freed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from graphshard.cost.scalars import slowed
from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.own import pass_own
from graphshard.schedule.problem import KINDS, Bucketed, Chain, Link, Occurrence, Placement
from graphshard.schedule.together import Load, load, modes, runs, startable


class Flight(NamedTuple):
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
class State:
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
    gathers: tuple[Flight, ...]
    reductions: tuple[Flight, ...]
    seconds: tuple[Flight, ...]
    num_buckets: int
    path: _Path | None
    own: tuple[tuple[int, float], ...] = ()


class _Path(NamedTuple):
    """A started bucket (or None) and an event, and what happened before."""

    bucket: Bucketed | None
    event: Occurrence
    before: _Path | None


START = State(0, 0.0, (0.0, 0.0), 0, 0, 0, (), (), (), 0, None)


class Moves:
    """What may happen in a state of a chain whose memory is kept within `limit` bytes."""

    def __init__(self, chain: Chain, link: Link, limit: float) -> None:
        self.chain, self.link, self.limit = chain, link, limit
        self.end = len(chain.seconds)
        # Whether to continue what has ended is a question where others want the channel, or it slows compute down.
        shared = link.shares or any(own.channel == link.all_reduce_on for own in chain.own)
        self.continues = link.all_reduce is None or not (shared or link.contention)

    def events(self, state: State) -> Iterator[State]:
        """What any event between two items makes of a state."""
        return map(self._settle, self._possible(state))

    def _possible(self, state: State) -> Iterator[State]:
        for kind in KINDS:
            yield from self._starts(kind, state)
        if state.gathers and self.chain.gathers[state.gathers[0].first].at == state.at:
            yield from self._wait_gather(state)
        # Continuing one is the start of its second leg, which may be wanted whether or not there is a limit.
        if state.reductions and (self.limit < math.inf or self.link.all_reduce is not None):
            yield self._pass_on(state)
        if state.seconds and self.limit < math.inf:
            yield self._wait_second(state)

    def _starts(self, kind: CollectiveKind, state: State) -> Iterator[State]:
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

    def _started(self, state: State, bucket: Bucketed, cost: Load) -> State:
        compute = state.compute + cost.copy_in
        channel = self.link.channel(bucket.kind)
        # The channel takes buckets in the order of their starts: this one begins when both clocks have come to it.
        done = max(compute, state.channels[channel]) + cost.seconds
        flight = Flight(
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

    def _wait_gather(self, state: State) -> Iterator[State]:
        flight = state.gathers[0]
        if self._fits(state, flight.transient):
            yield replace(
                state,
                compute=max(state.compute, flight.done) + flight.copy_out,
                gathers=state.gathers[1:],
                path=_Path(None, Occurrence("wait", flight.bucket, state.at), state.path),
            )

    def _pass_on(self, state: State) -> State:
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

    def _wait_second(self, state: State) -> State:
        flight = state.seconds[0]
        return replace(
            state,
            compute=max(state.compute, flight.done),
            seconds=state.seconds[1:],
            path=_Path(None, Occurrence("wait", flight.bucket, state.at), state.path),
        )

    def _settle(self, state: State) -> State:
        """Go on with the reductions that have ended."""
        while self.continues and state.reductions and state.reductions[0].done <= state.compute:
            state = self._pass_on(state)
        while state.seconds and state.seconds[0].done <= state.compute:
            state = self._wait_second(state)
        return state

    def advance(self, state: State) -> State | None:
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

    def finish(self, state: State) -> State | None:
        """Wait for everything, if everything was started."""
        if state.reduced < len(self.chain.reductions):
            return None
        # Nothing else wants a channel any more.
        while state.reductions:
            state = self._pass_on(state)
        while state.seconds:
            state = self._wait_second(state)
        return state

    def _fits(self, state: State, transient: int = 0) -> bool:
        """Whether what is alive between two items, and a buffer, fit."""
        alive = self._gathered(state, state.at) + self._unreduced(state, state.at - 1)
        return self.chain.boundary[state.at] + alive + transient <= self.limit

    def _gathered(self, state: State, item: int) -> int:
        return sum(g.num_bytes for g in self.chain.gathers[: state.gathered] if g.last >= item)

    def _unreduced(self, state: State, item: int) -> int:
        twice = sum(flight.twice for flight in state.seconds)
        return twice + sum(r.num_bytes for r in self.chain.reductions[state.freed :] if r.at - 1 <= item)


def _with_clock(channels: tuple[float, float], channel: int, clock: float) -> tuple[float, float]:
    return (clock, channels[1]) if channel == 0 else (channels[0], clock)


def placement_of(state: State) -> Placement:
    """The schedule that has come to a state."""
    buckets: list[Bucketed] = []
    events: list[Occurrence] = []
    path = state.path
    while path is not None:
        events.append(path.event)
        if path.bucket is not None:
            buckets.append(path.bucket)
        path = path.before
    return Placement(tuple(reversed(buckets)), tuple(reversed(events)))
