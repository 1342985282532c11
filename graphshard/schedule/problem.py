"""The scheduling problem, and what a solution of it is, without graphs and tensors.

    items       0 |   1   |  2  | 3 |  4            one chain per phase, in a fixed order
    gathers     a..a  b.......b  c..c               a gather gates the first item that reads it (`at`), and
    reductions                  x   y               its tensors are alive to the last one; a gradient is ready
    positions  0  1       2     3   4     5         after the items before `at`

A position is a number of items: what happens at position p happens before item p. A schedule cuts the transfers of a
kind, whose order is fixed, into buckets, and says at which position each bucket is started and waited for. A bucket
starts when compute has come to its position and everything started before on its channel has ended; a wait holds
compute up until the bucket has ended. A phase waits for everything that it starts.
While a channel is busy, items run slower by the link's contention.

Where parameters are replicated a reduction has two legs: what a reduce-scatter made is all-reduced over the replicas,
by a channel that may be another one. In between the schedule continues it: compute is held up until the first leg has
ended, and the second one starts. What was scattered is there twice until the second one is waited for.

The model itself may communicate where it has it: such a collective starts with an item, behind what is started at its
position, queues for its channel like everything else, and compute is held up by it at the same item or at a later one.

Memory of an item: `base`, gathered tensors from their start to the last item that reads them, gradients from the
item that makes them to their wait. Between two items the smaller base counts. A packed bucket is copied into one
buffer when it starts and out of it when it is waited for; both are alive while they are copied: a gather's at its
wait, a reduction's at its start (`together.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.own import Own

KINDS: tuple[CollectiveKind, ...] = ("gather", "reduce")


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
        way: index of the costs that it has, see `Link.others`; transfers of a group have the same.
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
    """One phase: items in order, and what gates and follows them, each kind in the order of `at`.

    Attributes:
        name: "forward", "backward", "optimizer".
        seconds: per item.
        base: bytes alive during each item, apart from gathered tensors and gradients that wait for their reduction.
        gathers: by first use.
        reductions: by position at which they are ready.
        own: what the model itself communicates, by its start.
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
        for transfers in (self.gathers, self.reductions):
            assert all(a.at <= b.at for a, b in itertools.pairwise(transfers)), f"{self.name}: transfers out of order"
        assert all(0 <= o.at <= o.until < end for o in self.own), f"{self.name}: a collective is waited for by an item"
        assert all(a.at <= b.at for a, b in itertools.pairwise(self.own)), f"{self.name}: collectives out of order"

    @cached_property
    def elapsed(self) -> tuple[float, ...]:
        """Seconds before each position of compute, and of what the model communicates at once."""
        at_once = [sum(own.seconds for _, own in starting if own.at_once) for starting, _ in self.own_of]
        return (0.0, *itertools.accumulate(a + b for a, b in zip(self.seconds, at_once)))

    @cached_property
    def own_of(self) -> tuple[tuple[tuple[tuple[int, Own], ...], tuple[int, ...]], ...]:
        """By item what of the model's own starts with it, and the indices of what it waits for that started before."""
        starts: list[list[tuple[int, Own]]] = [[] for _ in self.seconds]
        waits: list[list[int]] = [[] for _ in self.seconds]
        for index, own in enumerate(self.own):
            starts[own.at].append((index, own))
            if not own.at_once:
                waits[own.until].append(index)
        return tuple((tuple(started), tuple(waited)) for started, waited in zip(starts, waits))

    def own_seconds(self, channel: int, first: int = 0) -> float:
        """Work of a channel for the model's own collectives from an item on."""
        return sum(own.seconds for own in self.own if own.channel == channel and own.at >= first)

    @cached_property
    def boundary(self) -> tuple[int, ...]:
        """Base bytes at each position, between two items."""
        pairs = [min(a, b) for a, b in itertools.pairwise(self.base)]
        return (self.base[0], *pairs, self.base[-1])

    def transfers(self, kind: CollectiveKind) -> tuple[Transfer, ...]:
        """All transfers of a kind, in order."""
        return self.gathers if kind == "gather" else self.reductions


@dataclass(frozen=True)
class Rate:
    """Seconds of one collective: a latency, and rates per byte and per tensor beyond the first."""

    latency: float
    per_byte: float
    per_tensor: float = 0.0

    def __call__(self, num_bytes: int, num_tensors: int) -> float:
        """Seconds for tensors of `num_bytes` in full that travel as `num_tensors`."""
        return self.latency + num_bytes * self.per_byte + (num_tensors - 1) * self.per_tensor


@dataclass(frozen=True)
class Link:
    """What transfers cost.

    Attributes:
        gather, reduce: seconds for (bytes in full, number of tensors); they must not fall with either.
        copy: seconds for a copy of so many bytes within device memory.
        num_shards: a shard is that part of a full tensor.
        num_pieces: what is gathered of each rank is that part; 0 is for a shard.
        separate: gathers and reductions do not share a channel.
        contention: share of the compute that is lost while a channel is busy.
        all_reduce: seconds of the second leg of a reduction for the same arguments, that is, for bytes of the full
            tensors; None if there is none.
        all_reduce_on: index of its channel.
        lead: for bounds, seconds for the same arguments of what must have passed before a reduction starts, wherever
            they are spent; None if nothing must.
        others: costs over other axes on the same channels, for transfers with the ways 1, 2 and so on.
    """

    gather: Callable[[int, int], float]
    reduce: Callable[[int, int], float]
    copy: Callable[[int], float]
    num_shards: int
    separate: bool = False
    contention: float = 0.0
    num_pieces: int = 0
    all_reduce: Callable[[int, int], float] | None = None
    all_reduce_on: int = 0
    lead: Callable[[int, int], float] | None = None
    others: tuple[Link, ...] = ()

    def of(self, way: int) -> Link:
        """What transfers cost that have a way."""
        return self.others[way - 1] if way else self

    def least(self, kind: CollectiveKind, num_bytes: int) -> float:
        """Seconds that so many bytes take at the least, over whichever axes: costs are concave."""
        return min(one.seconds(kind, num_bytes, 1) for one in (self, *self.others)) if num_bytes else 0.0

    def seconds(self, kind: CollectiveKind, num_bytes: int, num_tensors: int) -> float:
        """Seconds of one collective."""
        if kind == "all_reduce":
            return self.all_reduce(num_bytes, num_tensors) if self.all_reduce else 0.0
        return self.gather(num_bytes, num_tensors) if kind == "gather" else self.reduce(num_bytes, num_tensors)

    def channel(self, kind: CollectiveKind) -> int:
        """Index of the channel that a kind uses, 0 or 1."""
        return self.all_reduce_on if kind == "all_reduce" else int(self.separate and kind == "reduce")

    @property
    def shares(self) -> bool:
        """Whether second legs share their channel with others."""
        return self.all_reduce_on in (self.channel("gather"), self.channel("reduce"))

    @cached_property
    def first_legs(self) -> Link:
        """The same without second legs: no schedule takes longer."""
        return replace(self, all_reduce=None, others=tuple(other.first_legs for other in self.others))

    @cached_property
    def second_legs(self) -> Link:
        """Reductions are their second legs alone, and first legs are on no channel: no schedule takes longer."""
        assert self.all_reduce is not None
        others = tuple(other.second_legs for other in self.others)
        separate, lead = self.all_reduce_on != 0, self.reduce
        return replace(self, reduce=self.all_reduce, separate=separate, all_reduce=None, lead=lead, others=others)

    @cached_property
    def leading(self) -> Link | None:
        """Reductions are what must have passed before they start."""
        if self.lead is None:
            return None
        others = tuple(other.leading or other for other in self.others)
        return replace(self, reduce=self.lead, lead=None, others=others)

    @cached_property
    def both_legs(self) -> Link:
        """Reductions take as long as both legs; where these share a channel, the work on it is the same."""
        legs, others = (self.reduce, self.all_reduce), tuple(other.both_legs for other in self.others)
        if all(isinstance(leg, Rate) for leg in legs):
            sums = (sum(getattr(leg, name) for leg in legs) for name in ("latency", "per_byte", "per_tensor"))
            return replace(self, reduce=Rate(*sums), all_reduce=None, others=others)
        return replace(self, reduce=functools.cache(self._both), all_reduce=None, others=others)

    def _both(self, num_bytes: int, num_tensors: int) -> float:
        return self.reduce(num_bytes, num_tensors) + self.seconds("all_reduce", num_bytes, num_tensors)


@dataclass(frozen=True)
class Bucketed:
    """Transfers `first` to `end` (exclusive) of a kind travel as one; their small tensors in one buffer if `packed`."""

    kind: CollectiveKind
    first: int
    end: int
    packed: bool = False


@dataclass(frozen=True)
class Occurrence:
    """Bucket `bucket` of a placement is started, continued with its second leg, or waited for, at a position."""

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
        links: those of chains in which they are others, by name.
        keepable: names of forward gathers that may stay gathered until backward has read them, which then does not
            gather them again; each is the name of one gather in both chains.
    """

    chains: tuple[Chain, ...]
    link: Link
    keepable: frozenset[str] = frozenset()
    links: Mapping[str, Link] = field(default_factory=dict, hash=False)

    def link_of(self, chain: Chain) -> Link:
        """What transfers of a chain cost."""
        return self.links.get(chain.name, self.link)

    def keep(self, names: frozenset[str]) -> Problem:
        """The problem in which these parameters stay gathered."""
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
