"""Run a schedule through a clock, event by event: when everything happens, what is exposed and why, what is alive.

One compute stream and one or two channels. The same problem and schedule give the same timeline.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

from graphshard.cost.scalars import slowed
from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.own import Clocks
from graphshard.schedule.problem import Chain, Link, Occurrence, Placement, Problem, Schedule
from graphshard.schedule.together import Load, load

Why = Literal["head", "tail", "link", "late", "model"]


@dataclass(frozen=True)
class Span:
    """An item or a bucket in time, seconds from the start of the first step.

    Attributes:
        kind: "compute", "copy", "gather", "reduce" or "all_reduce"; "model" of what the model communicates.
        phase: name of the chain.
        name: of the item or bucket.
        index: of the item in its chain, of the bucket in its placement, of the model's own in its chain.
    """

    kind: str
    phase: str
    name: str
    start: float
    end: float
    index: int

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Exposed:
    """A wait that holds compute up.

    Attributes:
        bucket: what is waited for.
        phase: name of the chain.
        at: position of the wait.
        start: when compute came to the wait.
        seconds: how long it waits.
        why: "head": no compute of the phase precedes it; "tail": none follows it; "link": the bucket had to queue
            behind `behind`; "late": it was started too late, or is longer than what it could hide behind; "model": it
            is the model's own.
        behind: the bucket before it on its channel if it had to queue.
    """

    bucket: str
    phase: str
    at: int
    start: float
    seconds: float
    why: Why
    behind: str = ""


@dataclass
class Timeline:
    """What a schedule does.

    Attributes:
        spans: compute items, copies and buckets.
        exposed: waits that hold compute up.
        memory: bytes alive by time, one entry per change.
        peak: most bytes alive.
        alive: what they are: bytes by name, "" for the chain's base.
        phases: start and end of each chain, by step.
        step_seconds: of the last step.
    """

    spans: list[Span] = field(default_factory=list)
    exposed: list[Exposed] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    peak: int = 0
    alive: dict[str, int] = field(default_factory=dict)
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    step_seconds: float = 0.0

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which compute waits."""
        return sum(e.seconds for e in self.exposed)

    def busy(self, *kinds: str) -> float:
        """Fraction of the time in which something of these kinds runs; they must share a channel."""
        total = self.phases[-1][2] if self.phases else 0.0
        return sum(s.seconds for s in self.spans if s.kind in kinds) / total if total else 0.0


def simulate(problem: Problem, schedule: Schedule, *, steps: int = 1) -> Timeline:
    """The timeline of a schedule over so many steps, each after the other."""
    found = Timeline()
    clock = 0.0
    for _ in range(steps):
        began = clock
        for chain, placement in zip(problem.keep(schedule.kept).chains, schedule.placements, strict=True):
            run = _Run(chain, problem.link_of(chain), placement, found, clock)
            end = run.play()
            found.phases.append((chain.name, clock, end))
            clock = end
        found.step_seconds = clock - began
    return found


def why_waits(kind: str, behind: str, *, first: bool, last: bool) -> Why:
    """Why compute waits for a collective, as in `Exposed`.

    Args:
        behind: what it queued behind, or "".
        first, last: nothing of its phase comes before it, or behind it.
    """
    if kind == "gather" and first:
        return "head"
    if kind != "gather" and last:
        return "tail"
    return "link" if behind else "late"


def bucket_name(chain: Chain, placement: Placement, index: int) -> str:
    """A bucket as it is shown."""
    bucket = placement.buckets[index]
    members = chain.transfers(bucket.kind)[bucket.first : bucket.end]
    names = dict.fromkeys((members[0].name, members[-1].name))
    return f"{bucket.kind} {' to '.join(names)}"


class _Run:
    """One chain on its way through the clock."""

    def __init__(self, chain: Chain, link: Link, placement: Placement, found: Timeline, clock: float) -> None:
        self.chain, self.link, self.placement, self.found = chain, link, placement, found
        self.compute = clock
        self.channels = [clock, clock]
        self.last_on: list[str] = ["", ""]
        self.names = [bucket_name(chain, placement, i) for i in range(len(placement.buckets))]
        self.loads: dict[int, Load] = {}
        self.launched: dict[int, tuple[float, str]] = {}  # by bucket: when what was launched last ends, behind what
        self.dies: defaultdict[int, list[str]] = defaultdict(list)  # gathered tensors by the position they die at
        self.own: dict[int, float] = {}  # when what the model communicates ends, by its index
        self.born: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)  # gradients by the item that makes them
        for reduction in chain.reductions:
            self.born[reduction.at - 1].append((f"gradient {reduction.name}", reduction.num_bytes))
        self.held: dict[str, int] = {}
        self.bytes = 0
        self._play = {"start": self._start, "continue": self._continue, "wait": self._wait}

    def play(self) -> float:
        """Run all items and events; the time at which the chain ends."""
        due: defaultdict[int, list[Occurrence]] = defaultdict(list)
        for event in self.placement.events:
            due[event.at].append(event)
        for position in range(len(self.chain.seconds) + 1):
            for name in self.dies.pop(position, ()):
                self._free(name)
            for event in due[position]:
                self._play[event.action](event.bucket, position)
            if position < len(self.chain.seconds):
                self._item(position)
        assert len(self.launched) == len(self.placement.buckets), "a bucket was never started"
        return self.compute

    def _item(self, index: int) -> None:
        self._model(index)
        for name, size in self.born.pop(index, ()):
            self._hold(name, size)
        self._observe(self.chain.base[index])
        # Starts come between items, so all that will be on its way beside this item is known when it begins.
        seconds = slowed(self.chain.seconds[index], max(self.channels) - self.compute, self.link.contention)
        self._busy("compute", str(index), seconds, index)

    def _model(self, item: int) -> None:
        """What the model communicates at the begin of an item."""
        starting, waited = self.chain.own_of[item]
        if not starting and not waited:
            return
        clocks = Clocks(self.compute, self.channels, self.own)
        for index in waited:
            before = clocks.compute
            clocks.settle(index)
            self._held_up(self.chain.own[index].name, item, before, clocks.compute, "model")
        for index, own in starting:
            before = clocks.compute
            behind = self.last_on[own.channel] if self.channels[own.channel] > before else ""
            begin, end = clocks.start(index, own, self.link.contention)
            self.found.spans.append(Span("model", self.chain.name, own.name, begin, end, index))
            self._held_up(own.name, item, before, clocks.compute, "model", behind)
            self.last_on[own.channel] = own.name
        self.compute = clocks.compute

    def _held_up(self, name: str, at: int, start: float, end: float, why: Why, behind: str = "") -> None:
        if end > start:
            self.found.exposed.append(Exposed(name, self.chain.name, at, start, end - start, why, behind))

    def _start(self, index: int, position: int) -> None:
        bucket = self.placement.buckets[index]
        members = self.chain.transfers(bucket.kind)[bucket.first : bucket.end]
        cost = self.loads[index] = load(self.link, bucket.kind, members, bucket.packed)
        if bucket.kind == "gather":
            for member in members:
                self._hold(f"gathered {member.name}", member.num_bytes)
                self.dies[member.last + 1].append(f"gathered {member.name}")
        self._observe(self.chain.boundary[position], cost.transient if bucket.kind == "reduce" else 0)
        self._busy("copy", self.names[index], cost.copy_in, index)
        self._launch(bucket.kind, index, cost.seconds)

    def _launch(self, kind: CollectiveKind, index: int, seconds: float) -> None:
        channel = self.link.channel(kind)
        # Two clocks: it is launched when compute is here, and begins when the channel has ended what came before.
        start = max(self.compute, self.channels[channel])
        behind = self.last_on[channel] if self.channels[channel] > self.compute else ""
        self.launched[index] = start + seconds, behind
        self.channels[channel] = start + seconds
        self.last_on[channel] = self.names[index]
        self.found.spans.append(Span(kind, self.chain.name, self.names[index], start, start + seconds, index))

    def _continue(self, index: int, position: int) -> None:
        """The first leg has ended, and the second starts."""
        self._arrive(index, position)
        self._free_gradients(index)
        cost = self.loads[index]
        self._hold(f"all-reduce {self.names[index]}", cost.twice)
        self._observe(self.chain.boundary[position])
        self._launch("all_reduce", index, cost.second)

    def _wait(self, index: int, position: int) -> None:
        self._arrive(index, position)
        bucket, cost = self.placement.buckets[index], self.loads[index]
        if bucket.kind == "gather":
            self._observe(self.chain.boundary[position], cost.transient)
        self._busy("copy", self.names[index], cost.copy_out, index)
        if bucket.kind == "reduce":
            if self.link.all_reduce is None:
                self._free_gradients(index)
            else:
                self._free(f"all-reduce {self.names[index]}")
            self._observe(self.chain.boundary[position])

    def _arrive(self, index: int, position: int) -> None:
        """Compute is held up until what was launched of a bucket has ended."""
        end, behind = self.launched[index]
        if end > self.compute:
            kind = self.placement.buckets[index].kind
            end_of_chain = position == len(self.chain.seconds)
            why = why_waits(kind, behind, first=position == 0, last=end_of_chain)
            self._held_up(self.names[index], position, self.compute, end, why, behind)
            self.compute = end

    def _free_gradients(self, index: int) -> None:
        bucket = self.placement.buckets[index]
        for member in self.chain.reductions[bucket.first : bucket.end]:
            self._free(f"gradient {member.name}")

    def _busy(self, kind: str, name: str, seconds: float, index: int) -> None:
        if seconds > 0 or kind == "compute":
            start, self.compute = self.compute, self.compute + seconds
            self.found.spans.append(Span(kind, self.chain.name, name, start, self.compute, index))

    def _hold(self, name: str, size: int) -> None:
        self.held[name] = size
        self.bytes += size

    def _free(self, name: str) -> None:
        self.bytes -= self.held.pop(name)

    def _observe(self, base: int, transient: int = 0) -> None:
        total = base + self.bytes + transient
        self.found.memory.append((self.compute, total))
        if total > self.found.peak:
            self.found.peak = total
            self.found.alive = {"": base, **self.held}
            if transient:
                self.found.alive["packing"] = transient
