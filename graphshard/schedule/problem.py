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
reduction's at its start.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from graphshard.cost.scalars import slowed
from graphshard.ir.plan import CollectiveKind

KINDS: tuple[CollectiveKind, ...] = ("gather", "reduce")


@dataclass(frozen=True)
class FixedCollective:
    """A collective of the model, which no schedule moves."""

    at: int  # item that it starts with
    until: int  # item that waits for it; `at` if compute waits at once
    seconds: float  # on its channel
    channel: int = 0
    name: str = ""  # shown in timelines

    @property
    def at_once(self) -> bool:
        return self.until == self.at


@dataclass(frozen=True)
class Transfer:
    """Tensors that always travel together."""

    name: str  # unique among the transfers of its kind in a chain
    num_bytes: int  # of the full tensors
    at: int  # for a gather the first item that reads it, for a reduction the position at which it is ready
    last: int = -1  # for a gather the last item that reads it
    group: str = ""  # only transfers of the same group may share a bucket
    num_tensors: int = 1
    num_small: int = 0  # tensors that are worth packing into one buffer
    small_bytes: int = 0  # bytes of these in full
    packed: bool | None = None  # whether the small ones are packed; None leaves it to the planner
    start: int | None = None  # the only position at which it may start; None leaves it to the planner
    link_index: int = 0  # of its costs, see `Link.others`; transfers of a group have the same


@dataclass(frozen=True)
class Chain:
    """One phase: items in order, and the transfers that gate and follow them, each kind in the order of `at`."""

    name: str  # "forward", "backward", "optimizer"
    seconds: tuple[float, ...]  # per item
    base: tuple[int, ...]  # bytes alive during each item, apart from gathered tensors and gradients to be reduced
    gathers: tuple[Transfer, ...] = ()
    reductions: tuple[Transfer, ...] = ()
    fixed: tuple[FixedCollective, ...] = ()

    def __post_init__(self) -> None:
        end = len(self.seconds)
        assert end > 0, f"{self.name}: a chain has an item"
        assert len(self.base) == end, f"{self.name}: one base per item"
        assert all(0 <= g.at <= g.last < end for g in self.gathers), f"{self.name}: a gather is read by an item"
        assert all(0 < r.at <= end for r in self.reductions), f"{self.name}: a gradient comes out of an item"
        assert all(0 <= f.at <= f.until < end for f in self.fixed), f"{self.name}: an item waits for a collective"
        starts = ([each.at for each in of] for of in (self.gathers, self.reductions, self.fixed))
        assert all(at == sorted(at) for at in starts), f"{self.name}: transfers out of order"

    @cached_property
    def elapsed(self) -> tuple[float, ...]:
        """Seconds before each position of compute, and of the model's collectives that it waits for at once."""
        at_once = [sum(fixed.seconds for _, fixed in starting if fixed.at_once) for starting, _ in self.fixed_at]
        return (0.0, *itertools.accumulate(a + b for a, b in zip(self.seconds, at_once)))

    @cached_property
    def fixed_at(self) -> list[tuple[list[tuple[int, FixedCollective]], list[int]]]:
        """By item, the model's collectives that start with it, and the indices of earlier ones that it waits for."""
        found: list[tuple[list[tuple[int, FixedCollective]], list[int]]] = [([], []) for _ in self.seconds]
        for index, fixed in enumerate(self.fixed):
            found[fixed.at][0].append((index, fixed))
            if not fixed.at_once:
                found[fixed.until][1].append(index)
        return found

    @cached_property
    def boundary(self) -> tuple[int, ...]:
        """Base bytes at each position, between two items."""
        pairs = [min(a, b) for a, b in itertools.pairwise(self.base)]
        return (self.base[0], *pairs, self.base[-1])

    @cached_property
    def made(self) -> list[int]:
        """Bytes of the gradients that each item makes."""
        found = [0] * len(self.seconds)
        for reduction in self.reductions:
            found[reduction.at - 1] += reduction.num_bytes
        return found

    @cached_property
    def least_memory(self) -> tuple[int, ...]:
        """Bytes that every schedule needs during each item: its base, what it reads, and the gradients it makes."""
        change = [0] * (len(self.seconds) + 1)
        for gather in self.gathers:
            change[gather.at] += gather.num_bytes
            change[gather.last + 1] -= gather.num_bytes
        return tuple(map(sum, zip(self.base, self.made, itertools.accumulate(change))))

    def transfers(self, kind: CollectiveKind) -> tuple[Transfer, ...]:
        """Return all transfers of a kind, in order."""
        return self.gathers if kind == "gather" else self.reductions

    def members(self, bucket: Bucketed) -> tuple[Transfer, ...]:
        """Return the transfers of a bucket."""
        return self.transfers(bucket.kind)[bucket.first : bucket.end]


@dataclass
class Clocks:
    """Clocks of compute and of the channels."""

    compute: float = 0.0
    channels: list[float] = field(default_factory=lambda: [0.0, 0.0])
    pending: dict[int, float] = field(default_factory=dict)  # ends of the model's collectives not yet waited for

    def launch(self, channel: int, seconds: float) -> tuple[float, float]:
        """Start a transfer, which begins when its channel has ended what came before; return its begin and end."""
        begin = max(self.compute, self.channels[channel])
        end = self.channels[channel] = begin + seconds
        return begin, end

    def wait(self, end: float) -> None:
        """Hold compute up until a transfer has ended."""
        self.compute = max(self.compute, end)

    def advance(self, seconds: float, contention: float) -> None:
        """Compute, which is slower while a channel is busy."""
        self.compute += slowed(seconds, max(self.channels) - self.compute, contention) if contention else seconds

    def begin_item(self, chain: Chain, item: int, contention: float = 0.0) -> dict[int, float]:
        """Wait for and start the model's own collectives at an item; return by index when those started begin."""
        starting, waited = chain.fixed_at[item]
        for index in waited:
            self.wait(self.pending.pop(index))
        begins = {}
        for index, fixed in starting:
            seconds = fixed.seconds
            if fixed.at_once:  # like compute, it is slower next to transfers on the other channel
                begin = max(self.compute, self.channels[fixed.channel])
                seconds = slowed(seconds, self.channels[1 - fixed.channel] - begin, contention)
            begins[index], end = self.launch(fixed.channel, seconds)
            if fixed.at_once:
                self.wait(end)
            else:
                self.pending[index] = end
        return begins


@dataclass(frozen=True)
class Rate:
    """Seconds of one collective: a latency, and rates per byte and per tensor beyond the first."""

    latency: float
    per_byte: float
    per_tensor: float = 0.0

    def __call__(self, num_bytes: int, num_tensors: int) -> float:
        """Return the seconds of `num_bytes` in full that travel as `num_tensors`."""
        return self.latency + num_bytes * self.per_byte + (num_tensors - 1) * self.per_tensor


# Seconds of a collective, for bytes of the full tensors and their number; they must not fall with either.
Cost = Callable[[int, int], float]


@dataclass(frozen=True)
class Link:
    """Costs of transfers."""

    gather: Cost
    reduce: Cost
    copy: Callable[[int], float]  # seconds for a copy of a number of bytes within device memory
    num_shards: int  # a shard is that part of a full tensor
    separate: bool = False  # gathers and reductions do not share a channel
    contention: float = 0.0  # share of the compute that is lost while a channel is busy
    num_pieces: int = 0  # each rank gives that part of a full tensor to a gather; 0 means a shard
    all_reduce: Cost | None = None  # of the second leg of a reduction, for bytes of the full tensors
    all_reduce_on: int = 0  # index of its channel
    receives: bool = False  # a reduction has a buffer of the full tensors' size until it is waited for
    copies: int = 0  # the same of a second leg, in shards
    lead: Cost | None = None  # for bounds, seconds that pass before a reduction starts, wherever they are spent
    others: tuple[Link, ...] = ()  # over other axes on the same channels, for transfers with a `link_index` from 1 on

    def of(self, link_index: int) -> Link:
        """Return the costs of transfers that have an index."""
        return self.others[link_index - 1] if link_index else self

    def seconds(self, kind: CollectiveKind, num_bytes: int, num_tensors: int) -> float:
        """Return the seconds of one collective."""
        if kind == "all_reduce":
            return self.all_reduce(num_bytes, num_tensors) if self.all_reduce else 0.0
        return self.gather(num_bytes, num_tensors) if kind == "gather" else self.reduce(num_bytes, num_tensors)

    def channel(self, kind: CollectiveKind) -> int:
        """Return the index of the channel that a kind uses, 0 or 1."""
        return self.all_reduce_on if kind == "all_reduce" else int(self.separate and kind == "reduce")

    def _reducing(self, cost: Callable[[Link], Cost | None], *, lead: bool = False, separate: bool) -> Link:
        """Return the link on which reductions have one leg with other costs, led by the first one or by nothing."""
        first, *others = (
            replace(one, reduce=cost(one) or one.reduce, all_reduce=None, lead=one.reduce if lead else None, others=())
            for one in (self, *self.others)
        )
        return replace(first, separate=separate, others=tuple(others))

    @cached_property
    def first_legs(self) -> Link:
        """The link without second legs: no schedule takes longer."""
        return self._reducing(lambda link: link.reduce, separate=self.separate)

    @cached_property
    def second_legs(self) -> Link:
        """The link on which reductions are their second legs, and first legs use no channel: no schedule is longer."""
        assert all(link.all_reduce is not None for link in (self, *self.others)), "a first leg is no bound of a second"
        return self._reducing(lambda link: link.all_reduce, lead=True, separate=self.all_reduce_on != 0)

    @cached_property
    def leading(self) -> Link | None:
        """The link on which reductions are what must have passed before they start."""
        return None if self.lead is None else self._reducing(lambda link: link.lead, separate=self.separate)

    @cached_property
    def both_legs(self) -> Link:
        """The link on which reductions take as long as both legs; the same work if these share a channel."""
        return self._reducing(_sum_of_legs, separate=self.separate)


def _sum_of_legs(link: Link) -> Cost:
    first, second = link.reduce, link.all_reduce
    assert second is not None
    return functools.cache(lambda *of: first(*of) + second(*of))


@dataclass(frozen=True)
class Bucketed:
    """Transfers `first` to `end` (exclusive) of a kind that travel as one; small tensors in one buffer if `packed`."""

    kind: CollectiveKind
    first: int
    end: int
    packed: bool = False


Action = Literal["start", "continue", "wait"]


class Occurrence(NamedTuple):
    """Start, second leg, or wait of bucket `bucket` of a placement, at a position."""

    action: Action
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
    """One training step: forward, backward and optimizer, or fewer, which follow each other.

    Parameters that are `keepable` may stay gathered until backward has read them, which then does not gather them
    again; each is the name of one gather in both chains.
    """

    chains: tuple[Chain, ...]
    link: Link
    keepable: frozenset[str] = frozenset()
    links: Mapping[str, Link] = field(default_factory=dict, hash=False)  # of chains that have others, by name

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
    """Steps that a search may still take, about a microsecond each; the same on every machine."""

    left: float  # below zero if the last ones were more than there were

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


class Load(NamedTuple):
    """Costs of a bucket."""

    seconds: float  # on its channel
    copy_in: float  # seconds of copies on the compute stream
    copy_out: float
    transient: int  # bytes while it is copied
    second: float = 0.0  # seconds of its second leg on the channel of that
    twice: int = 0  # bytes of scattered gradients that exist twice while the second leg is under way
    received: int = 0  # bytes of a buffer that a reduction has until it is waited for


class Contents(NamedTuple):
    """Sums over the transfers of a bucket; `must` and `must_not` count the transfers that are packed or not by rule."""

    num_bytes: int
    num_tensors: int
    num_small: int
    small_bytes: int
    must: int
    must_not: int

    @staticmethod
    def of(transfer: Transfer) -> Contents:
        """Return the contents of one transfer."""
        t = transfer
        return Contents(t.num_bytes, t.num_tensors, t.num_small, t.small_bytes, t.packed is True, t.packed is False)

    @property
    def modes(self) -> tuple[bool, ...]:
        """The values of `Bucketed.packed` that a bucket may have."""
        if self.must or self.must_not:
            return () if self.must and self.must_not else (self.must > 0,)
        return (False, True) if self.num_small > 1 else (False,)

    def load(self, link: Link, kind: CollectiveKind, packed: bool) -> Load:
        """Return the costs as a bucket; `link` is that of the transfers' index."""
        num_tensors = self.num_tensors - self.num_small + 1 if packed else self.num_tensors
        seconds, transient = link.seconds(kind, self.num_bytes, num_tensors), self.small_bytes if packed else 0
        copy = link.copy(self.small_bytes) if packed else 0.0
        if kind == "gather":
            copy_in = link.copy(self.small_bytes // (link.num_pieces or link.num_shards)) if packed else 0.0
            return Load(seconds, copy_in, copy, transient)
        received = self.num_bytes if link.receives else 0
        if link.all_reduce is None:
            return Load(seconds, copy, 0.0, transient, received=received)
        second = link.all_reduce(self.num_bytes, num_tensors)
        twice = (1 + link.copies) * self.num_bytes // link.num_shards
        return Load(seconds, copy, 0.0, transient, second, twice, received)


def contents_of(members: Sequence[Transfer]) -> Contents:
    """Return the contents of a bucket of transfers."""
    return Contents(*(sum(column) for column in zip(*map(Contents.of, members))))


def load(chain: Chain, link: Link, bucket: Bucketed) -> Load:
    """Return the costs of a chain's bucket."""
    members = chain.members(bucket)
    return contents_of(members).load(link.of(members[0].link_index), bucket.kind, bucket.packed)


def modes(members: Sequence[Transfer]) -> tuple[bool, ...]:
    """Return the values of `Bucketed.packed` that a bucket of these transfers may have."""
    return contents_of(members).modes


def startable(members: Sequence[Transfer], kind: CollectiveKind, at: int) -> bool:
    """Return whether a bucket may start at a position: ready, not yet needed, and where the user wants it."""
    pinned = {m.start for m in members} - {None}
    if pinned and pinned != {at}:
        return False
    return at <= members[0].at if kind == "gather" else at >= members[-1].at
