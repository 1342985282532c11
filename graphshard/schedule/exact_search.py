"""Exact search of a small phase: every sequence of events that no other dominates.

A state is a prefix of a schedule: items run, buckets started, continued and waited for, with the resulting clocks. Of
two states with the same items and starts, one dominates if compute, every channel and every transfer in flight are no
later, and it has no more in flight. States only grow, so they are visited in the order of their items.

Two rules keep the number of states small. Waiting for a reduction that has ended costs nothing and frees its gradients,
so it happens at once; waiting for one that has not ended only serves to free memory. A second leg starts as soon as its
first has ended, if nothing else uses its channel and it slows nothing down: the scattered gradients that exist twice
are then no more than the gradients that are freed.

The number of states grows exponentially, so the search has a budget of steps, not of seconds: all ranks and machines
find the same schedule. When it ends, the best schedule so far stands, and the states that are left bound the others.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from graphshard.cost.scalars import slowed
from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.bucketing import Load, load, modes, startable
from graphshard.schedule.problem import KINDS, Bucketed, Budget, Chain, Clocks, Link, Occurrence, Placement, Transfer

# Steps of a budget for a state, and one for each state that it is compared with.
_STATE = 10


class ExactResult(NamedTuple):
    """Result of a search.

    Attributes:
        placement: the best schedule below the seconds asked for; None if there is none.
        bound: seconds that no schedule beats.
    """

    placement: Placement | None
    bound: float


class _Flight(NamedTuple):
    """A bucket that was started and not waited for: transfers `first` to `end`, over at `done` seconds."""

    bucket: int
    first: int
    end: int
    done: float
    load: Load


class _SearchStep(NamedTuple):
    """An event, the bucket that it starts (None for other events), and the step before."""

    bucket: Bucketed | None
    event: Occurrence
    before: _SearchStep | None


@dataclass(frozen=True)
class _SearchState:
    """Prefix of a schedule.

    Attributes:
        at: items that have run.
        compute, channels: clocks.
        gathered, reduced: transfers that were started.
        freed: reductions that were continued or waited for, so that their gradients are free.
        gathers, reductions, seconds: gathers, first and second legs in flight, oldest first.
        num_buckets: buckets that were started.
        last: the last step.
        own: index and end of the model's collectives that were not waited for.
    """

    at: int = 0
    compute: float = 0.0
    channels: tuple[float, float] = (0.0, 0.0)
    gathered: int = 0
    reduced: int = 0
    freed: int = 0
    gathers: tuple[_Flight, ...] = ()
    reductions: tuple[_Flight, ...] = ()
    seconds: tuple[_Flight, ...] = ()
    num_buckets: int = 0
    last: _SearchStep | None = None
    own: tuple[tuple[int, float], ...] = ()

    @property
    def placement(self) -> Placement:
        """The schedule that leads to the state."""
        buckets: list[Bucketed] = []
        events: list[Occurrence] = []
        step = self.last
        while step is not None:
            events.append(step.event)
            if step.bucket is not None:
                buckets.append(step.bucket)
            step = step.before
        return Placement(tuple(reversed(buckets)), tuple(reversed(events)))


def search_exactly(chain: Chain, link: Link, budget: Budget, limit: float, below: float) -> ExactResult:
    """Return the shortest schedule of a chain that keeps to `limit` bytes and takes less than `below` seconds.

    About a dozen transfers are quick, the more so the closer `below` is to the optimum.
    """
    return _ExactSearch(chain, link, budget, limit, below).run()


class _ExactSearch:
    def __init__(self, chain: Chain, link: Link, budget: Budget, limit: float, below: float) -> None:
        self.chain, self.link, self.budget, self.limit, self.below = chain, link, budget, limit, below
        self.end = len(chain.seconds)
        on = [link.channel(kind) for kind in (*KINDS, "all_reduce")]
        # A second leg may be worth delaying where others use its channel, or where it slows compute down.
        shared = on[2] in on[:2] or any(own.channel == link.all_reduce_on for own in chain.own)
        self.continues = link.all_reduce is None or not (shared or link.contention)
        # Costs are concave: what is left takes at least as long as it would in one bucket.
        self.rest = {kind: _least_rest(chain.transfers(kind), link, kind) for kind in KINDS}
        self.rest["all_reduce"] = _least_rest(chain.reductions, link, "all_reduce")
        self.own_rest = [
            [sum(own.seconds for own in chain.own if own.channel == channel and own.at >= at) for channel in (0, 1)]
            for at in range(self.end + 1)
        ]
        self.kept: dict[tuple[object, ...], list[tuple[float, ...]]] = {}

    def run(self) -> ExactResult:
        frontier = deque([_SearchState()])
        best: _SearchState | None = None
        # An item is run last, so all states of a position exist when the first state of the next position is taken.
        while frontier:
            following: list[_SearchState] = []
            while frontier:
                if self.budget.ended:
                    left = min(map(self._least, (*frontier, *following)))
                    return ExactResult(best.placement if best else None, min(left, self.below))
                state = frontier.popleft()
                if state.at == self.end and state.reduced == len(self.chain.reductions):
                    done = self._finished(state)
                    if done.compute < self.below:
                        best, self.below = done, done.compute
                frontier.extend(new for new in map(self._settled, self._moves(state)) if self._is_new(new))
                if (advanced := self._advanced(state)) is not None:
                    following.append(advanced)
            # States are only compared with states of the same position.
            self.kept.clear()
            frontier = deque(state for state in following if self._is_new(state))
        return ExactResult(best.placement if best else None, self.below)

    # --- pruning ---

    def _is_new(self, state: _SearchState) -> bool:
        """Return whether a state may become the best and none dominates it; forget the states that it dominates."""
        self.budget.spend(_STATE)
        if self._least(state) >= self.below:
            return False
        if self.budget.ended:
            return True
        key: tuple[object, ...] = (state.at, state.gathered, state.reduced)
        if self.link.all_reduce is not None:  # which second legs are left, and of which buckets
            key = (*key, state.freed, *((flight.end, flight.load.second) for flight in state.reductions))
        clocks = self._clocks(state)
        others = self.kept.setdefault(key, [])
        self.budget.spend(len(others))
        # `map` compares without a frame per clock: the search spends its time here.
        if any(all(map(operator.le, other, clocks)) for other in others):
            return False
        others[:] = [other for other in others if not all(map(operator.le, clocks, other))]
        others.append(clocks)
        return True

    def _least(self, state: _SearchState) -> float:
        """Return the seconds that every schedule takes from here: the rest of the compute, or of the bytes."""
        left = [*self.own_rest[state.at]]
        left[0] += self.rest["gather"][state.gathered]
        left[self.link.channel("reduce")] += self.rest["reduce"][state.reduced]
        left[self.link.channel("all_reduce")] += self.rest["all_reduce"][state.freed]
        compute = state.compute + self.chain.elapsed[-1] - self.chain.elapsed[state.at]
        return max(compute, state.channels[0] + left[0], state.channels[1] + left[1])

    def _clocks(self, state: _SearchState) -> tuple[float, ...]:
        """Return everything that decides what is still possible: less is better in every entry.

        A transfer in flight counts with the end of its bucket, and with copies and buffer at the bucket's first one.
        Memory needs no entry: states that are compared have started the same transfers, so the same are gathered, and
        reductions that were waited for count as infinitely early.
        """
        clocks = [state.compute, *state.channels, *(end for _, end in state.own)]
        # Gathers of earlier items were waited for before those ran, in every state.
        first = next((i for i, g in enumerate(self.chain.gathers) if g.at >= state.at), state.gathered)
        pending = {flight.first: flight for flight in state.gathers}
        done, waiting = -math.inf, state.gathers[0].first if state.gathers else state.gathered
        for i in range(first, state.gathered):
            flight = pending.get(i)
            # Between the first members of two buckets are the other members of the earlier one, which end with it.
            done = flight.done if flight else done
            copies = (flight.load.copy_out, flight.load.transient) if flight else (0, 0)
            clocks += [done if i >= waiting else -math.inf, *copies]
        ends = {i: f.done for f in (*state.reductions, *state.seconds) for i in range(f.first, f.end)}
        clocks += [ends.get(i, -math.inf) for i in range(state.reduced)]
        return tuple(clocks)

    # --- moves ---

    def _moves(self, state: _SearchState) -> Iterator[_SearchState]:
        """Yield the states after each event that is possible before the next item."""
        for kind in KINDS:
            yield from self._starts(kind, state)
        if state.gathers and self.chain.gathers[state.gathers[0].first].at == state.at:
            flight = state.gathers[0]
            if self._fits(state, flight.load.transient):
                step = _SearchStep(None, Occurrence("wait", flight.bucket, state.at), state.last)
                compute = max(state.compute, flight.done) + flight.load.copy_out
                yield replace(state, compute=compute, gathers=state.gathers[1:], last=step)
        # Continuing a reduction starts its second leg, which may pay with or without a limit.
        if state.reductions and (self.limit < math.inf or self.link.all_reduce is not None):
            yield self._passed_on(state)
        if state.seconds and self.limit < math.inf:
            yield self._waited(state)

    def _starts(self, kind: CollectiveKind, state: _SearchState) -> Iterator[_SearchState]:
        transfers = self.chain.transfers(kind)
        first = state.gathered if kind == "gather" else state.reduced
        for end in range(first + 1, len(transfers) + 1):
            members = transfers[first:end]
            if members[-1].group != members[0].group:
                return
            for packed in modes(members) if startable(members, kind, state.at) else ():
                bucket = Bucketed(kind, first, end, packed)
                cost = load(self.chain, self.link, bucket)
                new = self._started(state, bucket, cost)
                # The buffer of a gather exists at its wait, of a reduction at its start.
                if self._fits(new, 0 if kind == "gather" else cost.transient):
                    yield new

    def _started(self, state: _SearchState, bucket: Bucketed, cost: Load) -> _SearchState:
        compute = state.compute + cost.copy_in
        channels, done = self._launched(state.channels, bucket.kind, compute, cost.seconds)
        flight = _Flight(state.num_buckets, bucket.first, bucket.end, done, cost)
        step = _SearchStep(bucket, Occurrence("start", state.num_buckets, state.at), state.last)
        new = replace(state, compute=compute, channels=channels, num_buckets=state.num_buckets + 1, last=step)
        if bucket.kind == "gather":
            return replace(new, gathered=bucket.end, gathers=(*state.gathers, flight))
        return replace(new, reduced=bucket.end, reductions=(*state.reductions, flight))

    def _launched(
        self, channels: tuple[float, float], kind: CollectiveKind, compute: float, seconds: float
    ) -> tuple[tuple[float, float], float]:
        """Return the channels' clocks after a transfer, which begins when compute and its channel have come to it."""
        channel = self.link.channel(kind)
        done = max(compute, channels[channel]) + seconds
        return ((done, channels[1]) if channel == 0 else (channels[0], done)), done

    def _passed_on(self, state: _SearchState) -> _SearchState:
        """Wait for the oldest first leg, and start its second one if there is one."""
        flight = state.reductions[0]
        compute, rest = max(state.compute, flight.done), state.reductions[1:]
        state = replace(state, compute=compute, freed=flight.end, reductions=rest)
        if self.link.all_reduce is None:
            step = _SearchStep(None, Occurrence("wait", flight.bucket, state.at), state.last)
            return replace(state, last=step)
        channels, done = self._launched(state.channels, "all_reduce", compute, flight.load.second)
        step = _SearchStep(None, Occurrence("continue", flight.bucket, state.at), state.last)
        return replace(state, channels=channels, seconds=(*state.seconds, flight._replace(done=done)), last=step)

    def _waited(self, state: _SearchState) -> _SearchState:
        """Wait for the oldest second leg."""
        flight = state.seconds[0]
        step = _SearchStep(None, Occurrence("wait", flight.bucket, state.at), state.last)
        return replace(state, compute=max(state.compute, flight.done), seconds=state.seconds[1:], last=step)

    def _settled(self, state: _SearchState) -> _SearchState:
        """Continue and wait for reductions that have ended."""
        while self.continues and state.reductions and state.reductions[0].done <= state.compute:
            state = self._passed_on(state)
        while state.seconds and state.seconds[0].done <= state.compute:
            state = self._waited(state)
        return state

    def _advanced(self, state: _SearchState) -> _SearchState | None:
        """Return the state after the next item; None if its parameters are not there, or it does not fit."""
        gathers, at = self.chain.gathers, state.at
        if at == self.end or (state.gathers and gathers[state.gathers[0].first].at == at):
            return None
        if state.gathered < len(gathers) and gathers[state.gathered].at == at:
            return None
        if self.chain.base[at] + self._gathered(state) + self._unreduced(state, at) > self.limit:
            return None
        clocks = Clocks(state.compute, [*state.channels], dict(state.own))
        if self.chain.own:
            clocks.begin_item(self.chain, at, self.link.contention)
        # Later launches come after this item, so nothing else slows it down.
        busy = max(clocks.channels) - clocks.compute
        compute = clocks.compute + slowed(self.chain.seconds[at], busy, self.link.contention)
        channels = clocks.channels[0], clocks.channels[1]
        own = tuple(clocks.pending.items())
        return self._settled(replace(state, at=at + 1, compute=compute, channels=channels, own=own))

    def _finished(self, state: _SearchState) -> _SearchState:
        """Wait for everything; nothing competes for a channel any more."""
        while state.reductions:
            state = self._passed_on(state)
        while state.seconds:
            state = self._waited(state)
        return state

    # --- memory ---

    def _fits(self, state: _SearchState, transient: int) -> bool:
        alive = self._gathered(state) + self._unreduced(state, state.at - 1)
        return self.chain.boundary[state.at] + alive + transient <= self.limit

    def _gathered(self, state: _SearchState) -> int:
        return sum(g.num_bytes for g in self.chain.gathers[: state.gathered] if g.last >= state.at)

    def _unreduced(self, state: _SearchState, item: int) -> int:
        twice = sum(flight.load.twice for flight in state.seconds)
        return twice + sum(r.num_bytes for r in self.chain.reductions[state.freed :] if r.at - 1 <= item)


def _least_rest(transfers: Sequence[Transfer], link: Link, kind: CollectiveKind) -> list[float]:
    """Return, from each transfer on, the seconds that the rest takes at least, over whichever axes."""
    left = [*itertools.accumulate((t.num_bytes for t in reversed(transfers)), initial=0)][::-1]
    return [min(one.seconds(kind, n, 1) for one in (link, *link.others)) if n else 0.0 for n in left]
