"""The one simulation of schedules of the abstract problem: clocks and memory of a phase, event by event.

`ChainState` is a phase after some events. `ChainRun` runs all events of a schedule, `_placement.py` decides on the next
one as it goes, and `_exact_search.py` branches from copies. `clock.py` runs the events of lowered programs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.problem import (
    Action,
    Bucketed,
    Chain,
    Clocks,
    Link,
    Load,
    Occurrence,
    Placement,
    Problem,
    Schedule,
    load,
)


@dataclass(frozen=True)
class Simulation:
    """Seconds of one step, and the most bytes alive in it."""

    step_seconds: float
    peak: int


def simulate(problem: Problem, schedule: Schedule) -> Simulation:
    """Run a schedule of a problem."""
    chains = problem.keep(schedule.kept).chains
    runs = [ChainRun(c, problem.link_of(c), p) for c, p in zip(chains, schedule.placements, strict=True)]
    return Simulation(sum(run.seconds for run in runs), max(run.peak for run in runs))


class ChainState:
    """A phase after some events: its clocks, what is under way, and bytes alive."""

    def __init__(self, chain: Chain, link: Link) -> None:
        self.chain, self.link = chain, link
        self.at = 0  # items that have run
        self.clocks = Clocks()
        # By number of a bucket, which is that of its start unless a number is given; `ends` are of the last leg.
        self.buckets: dict[int, Bucketed] = {}
        self.loads: dict[int, Load] = {}
        self.ends: dict[int, float] = {}
        self.events: list[Occurrence] = []
        self.issued = {"gather": 0, "reduce": 0}  # transfers that were started
        # Under way, oldest first: gathers, reductions of which no leg was waited for, and second legs.
        self.gathers: deque[int] = deque()
        self.reductions: deque[int] = deque()
        self.second_legs: deque[int] = deque()
        self.gathered = 0  # bytes
        self.unreduced = 0  # bytes of gradients that are not waited for, of buffers, and of what second legs have twice
        self.peak = 0  # most bytes alive
        self._dies: defaultdict[int, int] = defaultdict(int)  # by position, bytes of gathered tensors

    def copy(self) -> ChainState:
        """Return a state from which other events may follow."""
        other = object.__new__(type(self))  # exact searches spend their time here: `copy.copy` takes longer
        other.__dict__.update(self.__dict__)
        other.clocks = Clocks(self.clocks.compute, [*self.clocks.channels], {**self.clocks.pending})
        other.buckets, other.loads, other.ends = self.buckets.copy(), self.loads.copy(), self.ends.copy()
        other.events, other.issued, other._dies = self.events.copy(), self.issued.copy(), self._dies.copy()
        other.gathers, other.reductions = self.gathers.copy(), self.reductions.copy()
        other.second_legs = self.second_legs.copy()
        return other

    @property
    def seconds(self) -> float:
        return self.clocks.compute

    @property
    def placement(self) -> Placement:
        """The schedule that leads to the state."""
        return Placement(tuple(self.buckets.values()), tuple(self.events))

    @property
    def alive(self) -> int:
        """Bytes at the position."""
        return self.chain.boundary[self.at] + self.gathered + self.unreduced

    def start(self, bucket: Bucketed, cost: Load, number: int | None = None) -> float:
        """Start a bucket; return when it begins on its channel."""
        number = len(self.buckets) if number is None else number
        self.buckets[number], self.loads[number], self.issued[bucket.kind] = bucket, cost, bucket.end
        if bucket.kind == "gather":
            for member in self.chain.members(bucket):
                self.gathered += member.num_bytes
                self._dies[member.last + 1] += member.num_bytes
            self.gathers.append(number)
            self._observe(self.chain.boundary[self.at])
        else:
            self.reductions.append(number)
            self.unreduced += cost.received
            self._observe(self.chain.boundary[self.at], cost.transient)
        self.clocks.compute += cost.copy_in
        return self._launch("start", number, bucket.kind, cost.seconds)

    def proceed(self, number: int) -> float:
        """End the first leg of a reduction, and start the second; return when that begins."""
        self.clocks.wait(self.ends[number])
        self.reductions.remove(number)
        self.second_legs.append(number)
        self.unreduced += self.loads[number].twice - self._bytes(number) - self.loads[number].received
        self._observe(self.chain.boundary[self.at])
        return self._launch("continue", number, "all_reduce", self.loads[number].second)

    def wait(self, number: int) -> None:
        """Wait for a bucket."""
        self.clocks.wait(self.ends[number])
        cost = self.loads[number]
        if self.buckets[number].kind == "gather":
            self.gathers.remove(number)
            self._observe(self.chain.boundary[self.at], cost.transient)
            self.clocks.compute += cost.copy_out
        elif self.link.all_reduce is None:
            self.reductions.remove(number)
            self.unreduced -= self._bytes(number) + cost.received
        else:
            self.second_legs.remove(number)
            self.unreduced -= cost.twice
        self.events.append(Occurrence("wait", number, self.at))

    def pass_on(self) -> None:
        """Wait for the oldest first leg of a reduction, and start the second one if there is one."""
        if self.link.all_reduce is None:
            self.wait(self.reductions[0])
        else:
            self.proceed(self.reductions[0])

    def settle(self, *, second_legs: bool = True) -> None:
        """Wait for reductions that have ended, the oldest first; `second_legs` says whether second ones start then."""
        while second_legs and self.reductions and self.ends[self.reductions[0]] <= self.seconds:
            self.pass_on()
        while self.second_legs and self.ends[self.second_legs[0]] <= self.seconds:
            self.wait(self.second_legs[0])

    def finish(self) -> None:
        """Wait for all reductions."""
        while self.reductions:
            self.pass_on()
        while self.second_legs:
            self.wait(self.second_legs[0])

    def item(self) -> dict[int, float]:
        """Run the next item; return by index when the model's collectives that start with it begin."""
        fixed = self.clocks.begin_item(self.chain, self.at, self.link.contention) if self.chain.fixed else {}
        self.unreduced += self.chain.made[self.at]
        self._observe(self.chain.base[self.at], in_item=True)
        # Starts come between items, so everything that will be under way next to this item is known when it begins.
        self.clocks.advance(self.chain.seconds[self.at], self.link.contention)
        self.at += 1
        self.gathered -= self._dies.pop(self.at, 0)
        return fixed

    def _bytes(self, number: int) -> int:
        return sum(member.num_bytes for member in self.chain.members(self.buckets[number]))

    def _launch(self, action: Action, number: int, kind: CollectiveKind, seconds: float) -> float:
        begin, self.ends[number] = self.clocks.launch(self.link.channel(kind), seconds)
        self.events.append(Occurrence(action, number, self.at))
        return begin

    def _observe(self, base: int, transient: int = 0, *, in_item: bool = False) -> None:
        self.peak = max(self.peak, base + self.gathered + self.unreduced + transient)


class ChainRun(ChainState):
    """One phase after all events of a schedule."""

    def __init__(self, chain: Chain, link: Link, placement: Placement) -> None:
        super().__init__(chain, link)
        self.arrivals: list[float] = []  # by position, when compute comes to it
        self.starts: dict[int, float] = {}  # by bucket, when its first leg begins on its channel
        self.continued: dict[int, float] = {}  # the same of the second leg
        self.waited: dict[int, float] = {}  # by bucket, when compute comes to its wait
        self.fixed_starts: dict[int, float] = {}  # when the model's own collectives begin
        due: defaultdict[int, list[Occurrence]] = defaultdict(list)
        for event in placement.events:
            due[event.at].append(event)
        for position in range(len(chain.seconds) + 1):
            self.arrivals.append(self.clocks.compute)
            for action, number, _ in due[position]:
                if action == "start":
                    bucket = placement.buckets[number]
                    self.starts[number] = self.start(bucket, load(chain, link, bucket), number)
                elif action == "continue":
                    self.continued[number] = self.proceed(number)
                else:
                    self.waited[number] = self.clocks.compute
                    self.wait(number)
            if position < len(chain.seconds):
                self.fixed_starts |= self.item()
        assert len(self.ends) == len(placement.buckets), "a bucket was never started"


class ExplainedRun(ChainRun):
    """A run that tells what is alive at the peak: bytes by name, "" for the chain's base."""

    at_peak: dict[str, int]

    def _observe(self, base: int, transient: int = 0, *, in_item: bool = False) -> None:
        before = self.peak
        super()._observe(base, transient, in_item=in_item)
        if self.peak == before:
            return
        chain, at = self.chain, self.at
        held = [t for number in self.reductions for t in chain.members(self.buckets[number])]
        held += [r for r in chain.reductions[self.issued["reduce"] :] if r.at <= at + in_item]
        gathers = [bucket for bucket in self.buckets.values() if bucket.kind == "gather"]
        self.at_peak = {
            "": base,
            "packing": transient,
            **{f"gradient {r.name}": r.num_bytes for r in held},
            **{f"exchange {n}": self.loads[n].received for n in self.reductions if self.loads[n].received},
            **{f"gathered {m.name}": m.num_bytes for b in gathers for m in chain.members(b) if m.last >= at},
            **{f"all-reduce {number}": self.loads[number].twice for number in self.second_legs},
        }
