"""The scheduling problem and its solutions, without graphs and tensors.

    items       0 |   1   |  2  | 3 |  4            one chain per phase, in a fixed order
    gathers     a..a  b.......b  c..c               a gather gates the first item that reads it (`at`), and
    reductions                  x   y               its tensors are alive to the last one; a gradient is ready
    positions  0  1       2     3   4     5         after the items before `at`

A position is a number of items: what happens at position p happens before item p. A schedule cuts the transfers of a
kind, whose order is fixed, into buckets, and says at which position each bucket is started and waited for. A bucket
starts when compute has come to its position and everything started before on its channel has ended; a wait holds
compute up until the bucket has ended. A phase waits for everything that it starts. While a channel is busy, items run
slower by the link's contention.

Where parameters are replicated a reduction has two legs: the result of a reduce-scatter is all-reduced over the
replicas, by a channel that may be another one. In between the schedule continues it: compute is held up until the first
leg has ended, and the second one starts. The scattered gradients exist twice until the second leg is waited for.

The model's own collectives stay where the model has them. One starts with an item, after what is started at its
position, queues for its channel like everything else, and holds compute up at the same item or at a later one.

Memory of an item: `base`, gathered tensors from their start to the last item that reads them, gradients from the item
that makes them to their wait. Between two items the smaller base counts. A packed bucket is copied into one buffer when
it starts and out of it when it is waited for; both are alive while they are copied: a gather's at its wait, a
reduction's at its start (`bucketing.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from graphshard.cost.scalars import slowed
from graphshard.ir.plan import CollectiveKind

KINDS: tuple[CollectiveKind, ...] = ("gather", "reduce")


@dataclass(frozen=True)
class Own:
    """A collective of the model's own, which no schedule moves.

    Attributes:
        at: the item that it starts with.
        until: the item that waits for it; `at` itself if compute waits at once.
        seconds: on its channel.
        channel: index of that.
        name: shown in timelines.
    """

    at: int
    until: int
    seconds: float
    channel: int = 0
    name: str = ""

    @property
    def at_once(self) -> bool:
        return self.until == self.at


@dataclass(frozen=True)
class Transfer:
    """Tensors that always travel together.

    Attributes:
        name: unique among the transfers of its kind in a chain.
        num_bytes: of the full tensors.
        at: for a gather the first item that reads it, for a reduction the position at which it is ready.
        last: for a gather the last item that reads it.
        group: only transfers of the same group may share a bucket.
        num_tensors: how many tensors they are.
        num_small: how many of them are worth packing into one buffer.
        small_bytes: bytes of those in full.
        packed: whether the small ones are packed; None leaves it to the planner.
        start: the only position at which it may start; None leaves it to the planner.
        way: index of its costs, see `Link.others`; transfers of a group have the same.
    """

    name: str
    num_bytes: int
    at: int
    last: int = -1
    group: str = ""
    num_tensors: int = 1
    num_small: int = 0
    small_bytes: int = 0
    packed: bool | None = None
    start: int | None = None
    way: int = 0


@dataclass(frozen=True)
class Chain:
    """One phase: items in order, and the transfers that gate and follow them, each kind in the order of `at`.

    Attributes:
        name: "forward", "backward", "optimizer".
        seconds: per item.
        base: bytes alive during each item, apart from gathered tensors and gradients that wait for their reduction.
        gathers: by first use.
        reductions: by position at which they are ready.
        own: the model's own collectives, by their start.
    """

    name: str
    seconds: tuple[float, ...]
    base: tuple[int, ...]
    gathers: tuple[Transfer, ...] = ()
    reductions: tuple[Transfer, ...] = ()
    own: tuple[Own, ...] = ()

    def __post_init__(self) -> None:
        end = len(self.seconds)
        assert end > 0, f"{self.name}: a chain has an item"
        assert len(self.base) == end, f"{self.name}: one base per item"
        assert all(0 <= g.at <= g.last < end for g in self.gathers), f"{self.name}: a gather is read by an item"
        assert all(0 < r.at <= end for r in self.reductions), f"{self.name}: a gradient comes out of an item"
        assert all(0 <= o.at <= o.until < end for o in self.own), f"{self.name}: a collective is waited for by an item"
        for ordered in (self.gathers, self.reductions):
            assert all(a.at <= b.at for a, b in itertools.pairwise(ordered)), f"{self.name}: transfers out of order"
        assert all(a.at <= b.at for a, b in itertools.pairwise(self.own)), f"{self.name}: collectives out of order"

    @cached_property
    def elapsed(self) -> tuple[float, ...]:
        """Seconds before each position of compute, and of the model's collectives that it waits for at once."""
        at_once = [sum(own.seconds for _, own in starting if own.at_once) for starting, _ in self.own_of]
        return (0.0, *itertools.accumulate(a + b for a, b in zip(self.seconds, at_once)))

    @cached_property
    def own_of(self) -> tuple[tuple[tuple[tuple[int, Own], ...], tuple[int, ...]], ...]:
        """By item, the model's collectives that start with it, and the indices of earlier ones that it waits for."""
        starts: list[list[tuple[int, Own]]] = [[] for _ in self.seconds]
        waits: list[list[int]] = [[] for _ in self.seconds]
        for index, own in enumerate(self.own):
            starts[own.at].append((index, own))
            if not own.at_once:
                waits[own.until].append(index)
        return tuple((tuple(started), tuple(waited)) for started, waited in zip(starts, waits))

    @cached_property
    def boundary(self) -> tuple[int, ...]:
        """Base bytes at each position, between two items."""
        pairs = [min(a, b) for a, b in itertools.pairwise(self.base)]
        return (self.base[0], *pairs, self.base[-1])

    @cached_property
    def least_memory(self) -> tuple[int, ...]:
        """Bytes that every schedule needs during each item: its base, what it reads, and the gradients it makes."""
        change = [0] * (len(self.seconds) + 1)
        for gather in self.gathers:
            change[gather.at] += gather.num_bytes
            change[gather.last + 1] -= gather.num_bytes
        for reduction in self.reductions:
            # The item that makes a gradient holds it; after it, a schedule may wait for the reduction at once.
            change[reduction.at - 1] += reduction.num_bytes
            change[reduction.at] -= reduction.num_bytes
        return tuple(base + held for base, held in zip(self.base, itertools.accumulate(change)))

    def transfers(self, kind: CollectiveKind) -> tuple[Transfer, ...]:
        """Return all transfers of a kind, in order."""
        return self.gathers if kind == "gather" else self.reductions

    def members(self, bucket: Bucketed) -> tuple[Transfer, ...]:
        """Return the transfers of a bucket."""
        return self.transfers(bucket.kind)[bucket.first : bucket.end]


class Passed(NamedTuple):
    """A collective of the model that an item starts or waits for.

    Attributes:
        number: index in `Chain.own`.
        begin: when it begins on its channel; None if an earlier item has started it.
        before, after: clocks of compute before and after the start or wait.
    """

    number: int
    begin: float | None
    before: float
    after: float


@dataclass
class Clocks:
    """Clocks of compute and of both channels; `pending` has ends of the model's collectives not yet waited for."""

    compute: float = 0.0
    channels: list[float] = field(default_factory=lambda: [0.0, 0.0])
    pending: dict[int, float] = field(default_factory=dict)

    def begin_item(self, chain: Chain, item: int, contention: float = 0.0) -> list[Passed]:
        """Wait for and start the model's own collectives at an item."""
        starting, waited = chain.own_of[item]
        passed = []
        for index in waited:
            before, self.compute = self.compute, max(self.compute, self.pending.pop(index))
            passed.append(Passed(index, None, before, self.compute))
        for index, own in starting:
            before, begin = self.compute, max(self.compute, self.channels[own.channel])
            seconds = own.seconds
            if own.at_once:  # like compute, it is slower next to transfers on the other channel
                seconds = slowed(seconds, self.channels[1 - own.channel] - begin, contention)
            end = self.channels[own.channel] = begin + seconds
            if own.at_once:
                self.compute = max(self.compute, end)
            else:
                self.pending[index] = end
            passed.append(Passed(index, begin, before, self.compute))
        return passed


@dataclass(frozen=True)
class Rate:
    """Seconds of one collective: a latency, and rates per byte and per tensor beyond the first."""

    latency: float
    per_byte: float
    per_tensor: float = 0.0

    def __call__(self, num_bytes: int, num_tensors: int) -> float:
        """Return the seconds of `num_bytes` in full that travel as `num_tensors`."""
        return self.latency + num_bytes * self.per_byte + (num_tensors - 1) * self.per_tensor


# Seconds of a collective, for bytes of the full tensors and their number.
Cost = Callable[[int, int], float]


@dataclass(frozen=True)
class Link:
    """Costs of transfers.

    Attributes:
        gather, reduce: seconds for (bytes in full, number of tensors); they must not fall with either.
        copy: seconds for a copy of a number of bytes within device memory.
        num_shards: a shard is that part of a full tensor.
        separate: gathers and reductions do not share a channel.
        contention: share of the compute that is lost while a channel is busy.
        num_pieces: each rank gives that part of a full tensor to a gather; 0 means a shard.
        all_reduce: seconds of the second leg of a reduction for the same arguments (bytes of the full tensors); None if
            there is none.
        all_reduce_on: index of its channel.
        lead: for bounds, seconds for the same arguments that pass before a reduction starts, wherever they are spent.
        others: costs over other axes on the same channels, for transfers with the ways 1, 2 and so on.
    """

    gather: Cost
    reduce: Cost
    copy: Callable[[int], float]
    num_shards: int
    separate: bool = False
    contention: float = 0.0
    num_pieces: int = 0
    all_reduce: Cost | None = None
    all_reduce_on: int = 0
    lead: Cost | None = None
    others: tuple[Link, ...] = ()

    def of(self, way: int) -> Link:
        """Return the costs of transfers that have a way."""
        return self.others[way - 1] if way else self

    def seconds(self, kind: CollectiveKind, num_bytes: int, num_tensors: int) -> float:
        """Return the seconds of one collective."""
        if kind == "all_reduce":
            return self.all_reduce(num_bytes, num_tensors) if self.all_reduce else 0.0
        return self.gather(num_bytes, num_tensors) if kind == "gather" else self.reduce(num_bytes, num_tensors)

    def channel(self, kind: CollectiveKind) -> int:
        """Return the index of the channel that a kind uses, 0 or 1."""
        return self.all_reduce_on if kind == "all_reduce" else int(self.separate and kind == "reduce")

    @cached_property
    def first_legs(self) -> Link:
        """The link without second legs: no schedule takes longer."""
        return replace(self, all_reduce=None, others=tuple(other.first_legs for other in self.others))

    @cached_property
    def second_legs(self) -> Link:
        """The link on which reductions are their second legs, and first legs use no channel: no schedule is longer."""
        assert self.all_reduce is not None
        others = tuple(other.second_legs for other in self.others)
        separate, lead = self.all_reduce_on != 0, self.reduce
        return replace(self, reduce=self.all_reduce, separate=separate, all_reduce=None, lead=lead, others=others)

    @cached_property
    def leading(self) -> Link | None:
        """The link on which reductions are what must have passed before they start."""
        if self.lead is None:
            return None
        others = tuple(other.leading or other for other in self.others)
        return replace(self, reduce=self.lead, lead=None, others=others)

    @cached_property
    def both_legs(self) -> Link:
        """The link on which reductions take as long as both legs; the same work if these share a channel."""
        first, second, others = self.reduce, self.all_reduce, tuple(other.both_legs for other in self.others)
        assert second is not None
        if isinstance(first, Rate) and isinstance(second, Rate):
            summed: Cost = Rate(
                first.latency + second.latency,
                first.per_byte + second.per_byte,
                first.per_tensor + second.per_tensor,
            )
        else:
            summed = functools.cache(
                lambda num_bytes, num_tensors: first(num_bytes, num_tensors) + second(num_bytes, num_tensors)
            )
        return replace(self, reduce=summed, all_reduce=None, others=others)


@dataclass(frozen=True)
class Bucketed:
    """Transfers `first` to `end` (exclusive) of a kind that travel as one; small tensors in one buffer if `packed`."""

    kind: CollectiveKind
    first: int
    end: int
    packed: bool = False


@dataclass(frozen=True)
class Occurrence:
    """Start, second leg, or wait of bucket `bucket` of a placement, at a position."""

    action: Literal["start", "continue", "wait"]
    bucket: int
    at: int


@dataclass(frozen=True)
class Placement:
    """The schedule of one chain: buckets, and events in order of execution."""

    buckets: tuple[Bucketed, ...] = ()
    events: tuple[Occurrence, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """A placement for each chain of a problem, and the names of the parameters that stay gathered for backward."""

    placements: tuple[Placement, ...]
    kept: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Problem:
    """One training step. Phases follow each other; the next step follows the last phase.

    Attributes:
        chains: forward, backward and optimizer, or fewer.
        link: costs of transfers.
        links: costs of chains that have others, by name.
        keepable: names of forward gathers that may stay gathered until backward has read them, which then does not
            gather them again; each is the name of one gather in both chains.
    """

    chains: tuple[Chain, ...]
    link: Link
    keepable: frozenset[str] = frozenset()
    links: Mapping[str, Link] = field(default_factory=dict, hash=False)

    def link_of(self, chain: Chain) -> Link:
        """Return the costs of a chain's transfers."""
        return self.links.get(chain.name, self.link)

    def keep(self, names: frozenset[str]) -> Problem:
        """Return the problem in which these parameters stay gathered."""
        if not names:
            return self
        forward, backward, *rest = self.chains
        end = len(forward.seconds) - 1
        stay = tuple(replace(g, last=end) if g.name in names else g for g in forward.gathers)
        base = list(backward.base)
        for gather in backward.gathers:
            if gather.name in names:
                for item in range(gather.last + 1):
                    base[item] += gather.num_bytes
        again = tuple(g for g in backward.gathers if g.name not in names)
        kept = replace(backward, base=tuple(base), gathers=again)
        return replace(self, chains=(replace(forward, gathers=stay), kept, *rest), keepable=frozenset())


@dataclass
class Budget:
    """Steps that a search may still take, about a microsecond each; the same on every machine.

    Attributes:
        left: steps; below zero if the last ones were more than there were.
    """

    left: float

    def spend(self, steps: float) -> None:
        """Count steps that are taken."""
        self.left -= steps

    @property
    def ended(self) -> bool:
        return self.left <= 0

    def part(self, parts: int) -> Budget:
        """Return one of a number of equal parts of the rest; `take` gives back what it does not use."""
        part = Budget(max(self.left, 0.0) / parts)
        self.left -= part.left
        return part

    def take(self, rest: Budget) -> None:
        """Add what is left of a part."""
        self.left += rest.left
