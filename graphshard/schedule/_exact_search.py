"""Exact search of a small phase: every sequence of events that no other dominates.

A state is a prefix of a schedule. Of two states with the same items and starts, one dominates if compute, every channel
and every transfer under way are no later, and it has no more under way. States only grow, so they are visited in the
order of their items.

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
from typing import NamedTuple

from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.problem import (
    KINDS,
    Bucketed,
    Budget,
    Chain,
    Link,
    Placement,
    Transfer,
    load,
    modes,
    startable,
)
from graphshard.schedule.simulator import ChainState

# Steps of a budget for a state, and one for each state that it is compared with.
_STATE = 10


class ExactResult(NamedTuple):
    """The best schedule below the seconds asked for, if there is one, and seconds that no schedule beats."""

    placement: Placement | None
    bound: float


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
        shared = on[2] in on[:2] or any(fixed.channel == link.all_reduce_on for fixed in chain.fixed)
        self.continues = link.all_reduce is None or not (shared or link.contention)
        # Costs are concave: what is left takes at least as long as it would in one bucket.
        self.rest = {kind: _least_rest(chain.transfers(kind), link, kind) for kind in (*KINDS, "all_reduce")}
        # By channel and position, the seconds of the model's collectives that start there or later.
        self.fixed = [
            [sum(f.seconds for f in chain.fixed if f.channel == channel and f.at >= at) for at in range(self.end + 1)]
            for channel in (0, 1)
        ]
        self.kept: dict[tuple[object, ...], list[tuple[float, ...]]] = {}

    def run(self) -> ExactResult:
        frontier = deque([ChainState(self.chain, self.link)])
        best: ChainState | None = None
        # An item is run last, so all states of a position exist when the first state of the next position is taken.
        while frontier:
            following: list[ChainState] = []
            while frontier:
                if self.budget.ended:
                    left = min(map(self._least, (*frontier, *following)))
                    return ExactResult(best.placement if best else None, min(left, self.below))
                state = frontier.popleft()
                if state.at == self.end and state.issued["reduce"] == len(self.chain.reductions):
                    done = state.copy()
                    done.finish()  # nothing competes for a channel any more
                    if done.seconds < self.below:
                        best, self.below = done, done.seconds
                for new in self._moves(state):
                    new.settle(second_legs=self.continues)
                    if self._is_new(new):
                        frontier.append(new)
                if self._may_advance(state):
                    advanced = state.copy()
                    advanced.item()
                    if advanced.peak <= self.limit:
                        advanced.settle(second_legs=self.continues)
                        following.append(advanced)
            # States are only compared with states of the same position.
            self.kept.clear()
            frontier = deque(state for state in following if self._is_new(state))
        return ExactResult(best.placement if best else None, self.below)

    def _is_new(self, state: ChainState) -> bool:
        """Return whether a state may become the best and none dominates it; forget the states that it dominates."""
        self.budget.spend(_STATE)
        if self._least(state) >= self.below:
            return False
        if self.budget.ended:
            return True
        key: tuple[object, ...] = (state.at, *state.issued.values())
        if self.link.all_reduce is not None:  # which second legs are left, and of which buckets
            legs = ((state.buckets[number].end, state.loads[number].second) for number in state.reductions)
            key = (*key, self._freed(state), *legs)
        clocks = self._clocks(state)
        others = self.kept.setdefault(key, [])
        self.budget.spend(len(others))
        # `map` compares without a frame per clock: the search spends its time here.
        if any(all(map(operator.le, other, clocks)) for other in others):
            return False
        others[:] = [other for other in others if not all(map(operator.le, clocks, other))]
        others.append(clocks)
        return True

    def _freed(self, state: ChainState) -> int:
        return state.buckets[state.reductions[0]].first if state.reductions else state.issued["reduce"]

    def _least(self, state: ChainState) -> float:
        """Return the seconds that every schedule takes from here: the rest of the compute, or of the bytes."""
        left: list[float] = [fixed[state.at] for fixed in self.fixed]
        done = {**state.issued, "all_reduce": self._freed(state)}
        for kind, rest in self.rest.items():
            left[self.link.channel(kind)] += rest[done[kind]]
        compute = state.seconds + self.chain.elapsed[-1] - self.chain.elapsed[state.at]
        return max(compute, *map(operator.add, state.clocks.channels, left))

    def _clocks(self, state: ChainState) -> tuple[float, ...]:
        """Return everything that decides what is still possible: less is better in every entry.

        A transfer under way counts with the end of its bucket, and with copies and buffer at the bucket's first one.
        Memory needs no entry: states that are compared have started the same transfers, so the same are gathered, and
        reductions that were waited for count as infinitely early.
        """
        clocks = [state.seconds, *state.clocks.channels, *state.clocks.pending.values()]
        gathered = state.issued["gather"]
        # Gathers of earlier items were waited for before those ran, in every state.
        first = next((i for i, g in enumerate(self.chain.gathers) if g.at >= state.at), gathered)
        pending = {state.buckets[number].first: number for number in state.gathers}
        done, waiting = -math.inf, min(pending, default=gathered)
        for i in range(first, gathered):
            cost = None
            if i in pending:
                # Between the first members of two buckets are the other members of the earlier one, which end with it.
                done, cost = state.ends[pending[i]], state.loads[pending[i]]
            clocks += [done if i >= waiting else -math.inf, *((cost.copy_out, cost.transient) if cost else (0, 0))]
        flights = ((state.buckets[number], state.ends[number]) for number in (*state.reductions, *state.second_legs))
        ends = {i: end for bucket, end in flights for i in range(bucket.first, bucket.end)}
        clocks += [ends.get(i, -math.inf) for i in range(state.issued["reduce"])]
        return tuple(clocks)

    def _moves(self, state: ChainState) -> Iterator[ChainState]:
        """Yield the states after each event that is possible before the next item."""
        for bucket in self._next_buckets(state):
            new = state.copy()
            new.start(bucket, load(self.chain, self.link, bucket))
            if new.peak <= self.limit:
                yield new
        if self._needed(state):
            new = state.copy()
            new.wait(state.gathers[0])
            if new.peak <= self.limit:
                yield new
        # Continuing a reduction starts its second leg, which may pay with or without a limit.
        if state.reductions and (self.limit < math.inf or self.link.all_reduce is not None):
            new = state.copy()
            new.pass_on()
            yield new
        if state.second_legs and self.limit < math.inf:
            new = state.copy()
            new.wait(state.second_legs[0])
            yield new

    def _next_buckets(self, state: ChainState) -> Iterator[Bucketed]:
        for kind in KINDS:
            transfers, first = self.chain.transfers(kind), state.issued[kind]
            for end in range(first + 1, len(transfers) + 1):
                members = transfers[first:end]
                if members[-1].group != members[0].group:
                    break
                if startable(members, kind, state.at):
                    yield from (Bucketed(kind, first, end, packed) for packed in modes(members))

    def _needed(self, state: ChainState) -> bool:
        """Return whether the next item reads the oldest gather under way."""
        return bool(state.gathers) and self.chain.members(state.buckets[state.gathers[0]])[0].at == state.at

    def _may_advance(self, state: ChainState) -> bool:
        """Return whether there is a next item, and what it reads is there."""
        gathers, gathered = self.chain.gathers, state.issued["gather"]
        missing = gathered < len(gathers) and gathers[gathered].at == state.at
        return state.at < self.end and not missing and not self._needed(state)


def _least_rest(transfers: Sequence[Transfer], link: Link, kind: CollectiveKind) -> list[float]:
    """Return, from each transfer on, the seconds that the rest takes at least, over whichever axes."""
    left = [*itertools.accumulate((t.num_bytes for t in reversed(transfers)), initial=0)][::-1]
    return [min(one.seconds(kind, n, 1) for one in (link, *link.others)) if n else 0.0 for n in left]
