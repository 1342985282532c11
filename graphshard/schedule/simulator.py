"""Run a schedule through the clocks, event by event: its time, and the most bytes alive.

One compute stream and one or two channels. It runs schedules of the abstract problem, before there is a program;
`clock.py` runs the events of lowered programs and of external graphs, and says what is exposed and why.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from graphshard.cost.scalars import slowed
from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.bucketing import load
from graphshard.schedule.problem import Chain, Clocks, Link, Occurrence, Placement, Problem, Schedule


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


class ChainRun:
    """One phase run through the clocks.

    Attributes:
        seconds: until everything has ended.
        peak: most bytes alive.
        alive: bytes by name at the peak, "" for the chain's base; {} unless asked for.
        loads: costs by bucket.
        arrivals: by position, when compute comes to it.
        starts, continued: by bucket, when its first and its second leg begin on their channel.
        waited: by bucket, when compute comes to its wait.
        own_starts: when the model's own collectives begin.
        items: begin and end of each item.
    """

    def __init__(self, chain: Chain, link: Link, placement: Placement, *, explain: bool = False) -> None:
        self.chain, self.link, self.placement = chain, link, placement
        self.clocks = Clocks()
        self.loads = [load(chain, link, bucket) for bucket in placement.buckets]
        self.peak = 0
        self.alive: dict[str, int] = {}
        self.arrivals: list[float] = []
        self.starts: dict[int, float] = {}
        self.continued: dict[int, float] = {}
        self.waited: dict[int, float] = {}
        self.own_starts: dict[int, float] = {}
        self.items: list[tuple[float, float]] = []
        self._ends: dict[int, float] = {}  # by bucket: when its last leg ends
        self._dies: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)  # by position, gathered tensors
        self._born: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)  # by item, gradients that it makes
        for reduction in chain.reductions:
            self._born[reduction.at - 1].append((f"gradient {reduction.name}", reduction.num_bytes))
        self._held: dict[str, int] | None = {} if explain else None
        self._bytes = 0
        self._run()

    @property
    def seconds(self) -> float:
        return self.clocks.compute

    def _run(self) -> None:
        actions = {"start": self._start, "continue": self._continue, "wait": self._wait}
        due: defaultdict[int, list[Occurrence]] = defaultdict(list)
        for event in self.placement.events:
            due[event.at].append(event)
        for position in range(len(self.chain.seconds) + 1):
            self.arrivals.append(self.clocks.compute)
            for name, size in self._dies.pop(position, ()):
                self._hold(name, -size)
            for event in due[position]:
                actions[event.action](event.bucket, position)
            if position < len(self.chain.seconds):
                self._item(position)
        assert len(self._ends) == len(self.placement.buckets), "a bucket was never started"

    def _item(self, index: int) -> None:
        clocks, contention = self.clocks, self.link.contention
        if self.chain.own:
            passed = clocks.begin_item(self.chain, index, contention)
            self.own_starts.update({each.number: each.begin for each in passed if each.begin is not None})
        for name, size in self._born.pop(index, ()):
            self._hold(name, size)
        self._observe(self.chain.base[index])
        # Starts come between items, so everything that will be under way next to this item is known when it begins.
        begin, seconds, busy = clocks.compute, self.chain.seconds[index], max(clocks.channels) - clocks.compute
        clocks.compute += slowed(seconds, busy, contention) if busy > 0 else seconds
        self.items.append((begin, clocks.compute))

    def _start(self, index: int, position: int) -> None:
        bucket, cost = self.placement.buckets[index], self.loads[index]
        if bucket.kind == "gather":
            for member in self.chain.members(bucket):
                name = f"gathered {member.name}"
                self._hold(name, member.num_bytes)
                self._dies[member.last + 1].append((name, member.num_bytes))
        self._observe(self.chain.boundary[position], cost.transient if bucket.kind == "reduce" else 0)
        self.clocks.compute += cost.copy_in
        self.starts[index] = self._launch(bucket.kind, index, cost.seconds)

    def _launch(self, kind: CollectiveKind, index: int, seconds: float) -> float:
        # Two clocks: it is launched when compute is here, and begins when the channel has ended what came before.
        channel, channels = self.link.channel(kind), self.clocks.channels
        start = max(self.clocks.compute, channels[channel])
        channels[channel] = self._ends[index] = start + seconds
        return start

    def _continue(self, index: int, position: int) -> None:
        """End the first leg, and start the second."""
        self.clocks.compute = max(self.clocks.compute, self._ends[index])
        self._free_gradients(index)
        self._hold(f"all-reduce {index}", self.loads[index].twice)
        self._observe(self.chain.boundary[position])
        self.continued[index] = self._launch("all_reduce", index, self.loads[index].second)

    def _wait(self, index: int, position: int) -> None:
        self.waited[index] = self.clocks.compute
        self.clocks.compute = max(self.clocks.compute, self._ends[index])
        cost, boundary = self.loads[index], self.chain.boundary[position]
        if self.placement.buckets[index].kind == "gather":
            self._observe(boundary, cost.transient)
            self.clocks.compute += cost.copy_out
            return
        if self.link.all_reduce is None:
            self._free_gradients(index)
        else:
            self._hold(f"all-reduce {index}", -cost.twice)
        self._observe(boundary)

    def _free_gradients(self, index: int) -> None:
        for member in self.chain.members(self.placement.buckets[index]):
            self._hold(f"gradient {member.name}", -member.num_bytes)

    def _hold(self, name: str, size: int) -> None:
        """Hold more bytes, or fewer, under a name."""
        self._bytes += size
        if self._held is not None:
            self._held[name] = self._held.get(name, 0) + size

    def _observe(self, base: int, transient: int = 0) -> None:
        total = base + self._bytes + transient
        if total > self.peak:
            self.peak = total
            if self._held is not None:
                found = {"": base, **self._held, "packing": transient}
                self.alive = {name: size for name, size in found.items() if size}
