"""The best schedule of a small phase, exactly: every sequence of events, except those that another is no worse than.

What has happened is reached with several clocks (`states.py`). One set of clocks is no worse than another of the same
items and starts if compute, every channel, and every transfer in flight are no later, and no more is in flight. States
only grow, so they are taken in order.

The number of states grows exponentially, so there is a budget. It is counted in steps, not in seconds: all ranks, and
all machines, must find the same schedule. Where it ends the search, what has been found stands, and the states that are
left say what no schedule beats.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.budget import Budget
from graphshard.schedule.problem import KINDS, Chain, Link, Placement
from graphshard.schedule.states import START, Moves, State, placement_of
from graphshard.schedule.together import rests

# Steps of a budget for a state, and one for each that it is compared with.
_STATE = 10


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
        self.chain, self.link, self.budget, self.below = chain, link, budget, below
        self.moves = Moves(chain, link, limit)
        # Fewer buckets never take longer in all than more of them: what is left takes at least what it takes as one.
        self.rest = {kind: list(_rests(chain, link, kind)) for kind in KINDS}
        self.rest["all_reduce"] = [link.least("all_reduce", n) for n in rests(chain.reductions)]
        self.own = [[chain.own_seconds(channel, item) for item in range(self.moves.end + 1)] for channel in (0, 1)]
        self.kept: dict[tuple[object, ...], list[tuple[float, ...]]] = {}

    def run(self) -> Found:
        frontier = deque([START])
        best: State | None = None
        # An item is run last, so all states of a position are there when its first successor is taken.
        while frontier:
            following: list[State] = []
            while frontier:
                if self.budget.ended:
                    left = min(map(self._least, (*frontier, *following)))
                    return self._found(best, min(left, self.below))
                state = frontier.popleft()
                done = self.moves.finish(state) if state.at == self.moves.end else None
                if done is not None and done.compute < self.below:
                    # From here on every complete schedule found is what the rest must beat.
                    best, self.below = done, done.compute
                frontier.extend(new for new in self.moves.events(state) if self._is_new(new))
                if (advanced := self.moves.advance(state)) is not None:
                    following.append(advanced)
            # A state is compared with those of its own position alone, and that one is left for good.
            self.kept.clear()
            frontier = deque(state for state in following if self._is_new(state))
        return self._found(best, self.below)

    def _found(self, best: State | None, bound: float) -> Found:
        return Found(math.inf, None, bound) if best is None else Found(best.compute, placement_of(best), bound)

    def _is_new(self, state: State) -> bool:
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
        # `map` compares without a frame for each clock: this is where a search spends its time.
        if any(all(map(operator.le, other, clocks)) for other in others):
            return False
        others[:] = [other for other in others if not all(map(operator.le, clocks, other))]
        others.append(clocks)
        return True

    def _least(self, state: State) -> float:
        """Seconds that every schedule takes from here: the rest of the compute, or of the bytes."""
        # Nothing begins before the clock of its channel, and no item before compute's.
        left = [own[state.at] for own in self.own]
        left[0] += self.rest["gather"][state.gathered]
        left[self.link.channel("reduce")] += self.rest["reduce"][state.reduced]
        left[self.link.channel("all_reduce")] += self.rest["all_reduce"][state.freed]
        compute = state.compute + self.chain.elapsed[-1] - self.chain.elapsed[state.at]
        return max(compute, state.channels[0] + left[0], state.channels[1] + left[1])

    def _clocks(self, state: State) -> tuple[float, ...]:
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


def _rests(chain: Chain, link: Link, kind: CollectiveKind) -> Iterator[float]:
    """Seconds of the link, at the least, for what is left from each transfer on."""
    for left in rests(chain.transfers(kind)):
        yield link.least(kind, left)
