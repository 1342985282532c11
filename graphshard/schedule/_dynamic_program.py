"""Buckets and their order on the link: a dynamic program over (gathers issued, reductions issued).

Between two entries of the channel, compute has come to the first use of the next gather. Two clocks tell all that
matters of the past: the channel's, and compute's there. When a bucket starts at an earlier position, compute was there
at most the seconds of the items between earlier: if it was held up in between, then by something that ended on the
channel before, so the channel is later than either. States keep the clocks that no other pair beats. Without a memory
limit, without copies and with one channel this is exact; the number of states is linear in depth.

With contention c the result is the least of c W + T', which no step beats (`bounds.py`): a bucket of w seconds puts
both clocks forward by c w, and takes (1 - c) w on the channel. The step takes just that if the link is busy from the
first wait of compute to the last.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.bounds import Jobs, jobs
from graphshard.schedule.problem import KINDS, Bucketed, Budget, Chain, Contents, Link, Transfer, load

ANY = 1 << 30
Numbers = NDArray[np.float64]

# Steps of a budget for each transfer, for the buckets that begin with it, and for each of these.
_TRANSFER, _BEGINNING, _BUCKET = 40, 30, 0.2
# For a state, and for each of its labels with each bucket; one that is kept is a step.
_VISIT, _LOOK = 40, 0.03

# Two clocks, the channel's and compute's, the last bucket, and the label before it.
_Label = tuple[float, float, "Bucketed | None", Any]
_CHANNEL = itemgetter(0)


@dataclass(frozen=True)
class Effort:
    """How far the dynamic program looks."""

    window: int = 8  # most transfers in a bucket, and most reductions that are ready and not issued
    labels: int = 4  # most pairs of clocks per state
    below: float = math.inf  # seconds that the result must stay below to be of interest


def channel_order(
    chain: Chain, link: Link, effort: Effort, budget: Budget, limit: float = math.inf
) -> list[Bucketed] | None:
    """Return a chain's buckets in the order of their starts; None if none is of interest, or the budget ends."""
    if link.separate and chain.gathers and chain.reductions:
        # Reductions on a separate channel never delay a gather. Gathers delay reductions only by holding compute
        # up. So gathers come first, and the compute they cost is counted as longer items.
        gathers = channel_order(replace(chain, reductions=()), link, effort, budget, limit)
        if gathers is None:
            return None
        seconds = _held_up(chain, link, gathers)
        reductions = channel_order(replace(chain, seconds=seconds, gathers=()), link, effort, budget, limit)
        return None if reductions is None else gathers + reductions
    label = _Program(chain, link, effort, budget, limit).run()
    return None if label is None else _path(label)


def shortest_order(chain: Chain, link: Link, budget: Budget, below: float) -> tuple[float, list[Bucketed]] | None:
    """Return the shortest schedule without copies on one channel, and its seconds; None as for `channel_order`.

    With contention no schedule beats the seconds, and this one may take longer.
    """
    found = _Program(chain, link, Effort(ANY, ANY, below=below), budget, math.inf).run()
    return None if found is None else (max(found[:2]), _path(found))


def _held_up(chain: Chain, link: Link, gathers: list[Bucketed]) -> tuple[float, ...]:
    """Return the seconds of the items, each with compute's wait before it when gathers start as early as they can."""
    waits = [0.0] * len(chain.seconds)
    channel = held = 0.0
    for bucket in gathers:
        at = chain.members(bucket)[0].at
        channel += load(chain, link, bucket).seconds
        # Compute comes to its use after the undisturbed seconds and the waits so far.
        late = max(0.0, channel - chain.elapsed[at] - held)
        waits[at] += late
        held += late
    return tuple(second + wait for second, wait in zip(chain.seconds, waits))


def _path(label: _Label) -> list[Bucketed]:
    found = []
    step: _Label | None = label
    while step is not None:
        _, _, bucket, step = step
        if bucket is not None:
            found.append(bucket)
    return found[::-1]


class _Program:
    def __init__(self, chain: Chain, link: Link, effort: Effort, budget: Budget, limit: float) -> None:
        self.chain, self.link, self.effort, self.budget = chain, link, effort, budget
        self.used_at = [*(g.at for g in chain.gathers), len(chain.seconds)]
        self.use = np.array([chain.elapsed[at] for at in self.used_at])
        self.launch = np.array([chain.elapsed[p] for p in _earliest_launches(chain, limit)])
        self.ready = np.array([chain.elapsed[r.at] for r in chain.reductions])
        self.latest = _Latest(chain, link, effort.below)
        # By kind, the sums over the transfers before each, and the end of each one's group.
        self.sums = {kind: _sums(chain.transfers(kind)) for kind in KINDS}
        self.ends = {kind: _ends_of_groups(chain.transfers(kind)) for kind in KINDS}
        self.options: dict[tuple[CollectiveKind, int], _Options] = {}
        budget.spend(_TRANSFER * (len(chain.gathers) + len(chain.reductions)))

    def run(self) -> _Label | None:
        """Return the label with which everything has come first; None if none is of interest, or the budget ends."""
        num_gathers, num_reductions = len(self.chain.gathers), len(self.chain.reductions)
        states: list[dict[int, list[_Label]]] = [{} for _ in range(num_gathers + 1)]
        if self.use[0] >= self.latest.compute[0, 0] or self.latest.channel[0, 0] <= 0:
            return None
        states[0][0] = [(0.0, self.use[0], None, None)]
        ready_at = [bisect.bisect_right([r.at for r in self.chain.reductions], at) for at in self.used_at]
        for gathered in range(num_gathers + 1):
            ready = ready_at[gathered]
            here = states[gathered]
            # A bucket leads to more gathers, or to the same number and more reductions. So in this order a state has
            # all its labels when its turn comes.
            for reduced in range(min(here, default=0), num_reductions + 1):
                if reduced not in here:
                    continue
                labels = here[reduced] = self._best(here[reduced])
                if self.budget.ended:
                    return None
                if reduced < ready:
                    self._reduce(labels, gathered, reduced, ready, here)
                if gathered < num_gathers and ready - reduced <= self.effort.window:
                    self._gather(labels, gathered, reduced, states)
            if gathered < num_gathers:
                states[gathered] = {}
        final = states[-1].get(num_reductions)
        return min(final, key=lambda label: max(label[:2])) if final else None

    def _gather(self, labels: list[_Label], gathered: int, reduced: int, states: list[dict[int, list[_Label]]]) -> None:
        options = self._of("gather", gathered)
        before, compute = _clocks(labels)
        # `compute` is the clock at the use, and `compute - back` that at the launch if nothing held compute up in
        # between. If something did, it was a bucket that ended by `before`, and compute has run for at most `back`
        # since. Then `before` is the later of the two. It also is the later one in truth, as compute came to the launch
        # earlier still.
        channel = np.maximum(before, compute - options.back) + options.seconds
        compute = np.maximum(compute + options.lost, channel) + options.ahead
        latest = self.latest.channel[options.ends, reduced], self.latest.compute[options.ends, reduced]
        for bucket, label in self._of_interest(labels, options, channel, compute, *latest):
            states[bucket.end].setdefault(reduced, []).append(label)

    def _reduce(
        self, labels: list[_Label], gathered: int, reduced: int, ready: int, here: dict[int, list[_Label]]
    ) -> None:
        options = self._of("reduce", reduced).until(ready)
        before, compute = _clocks(labels)
        # Ready `back` before the position at which this clock of compute is; the same argument as for gathers.
        compute = compute + options.ahead
        channel = np.maximum(before, compute - (self.use[gathered] - options.back)) + options.seconds
        latest = self.latest.channel[gathered, options.ends], self.latest.compute[gathered, options.ends]
        for bucket, label in self._of_interest(labels, options, channel, compute + options.lost, *latest):
            here.setdefault(bucket.end, []).append(label)

    def _of_interest(
        self,
        labels: list[_Label],
        options: _Options,
        channel: Numbers,
        compute: Numbers,
        latest_channel: Numbers,
        latest_compute: Numbers,
    ) -> Iterator[tuple[Bucketed, _Label]]:
        """Yield the buckets and the labels they lead to, if the step can still end below the best."""
        good = (channel < latest_channel[:, None]) & (compute < latest_compute[:, None])
        which, of = (index.tolist() for index in good.nonzero())
        self.budget.spend(_VISIT + good.size * _LOOK + len(which))
        for option, label, link, here in zip(which, of, channel[good].tolist(), compute[good].tolist()):
            bucket = options.bucket(option)
            yield bucket, (link, here, bucket, labels[label])

    def _best(self, labels: list[_Label]) -> list[_Label]:
        """Return the labels whose clocks no other has both as early; evenly spread if they are too many."""
        # No label before one in this order has a later channel. So it is beaten if any of them has compute as early,
        # and `earliest` is the earliest of theirs.
        labels.sort(key=_CHANNEL)
        found: list[_Label] = []
        earliest = math.inf
        for label in labels:
            if label[1] < earliest:
                found.append(label)
                earliest = label[1]
        most = self.effort.labels
        if len(found) > most:
            # Both ends stay: the earliest channel and the earliest compute.
            found = [found[i * (len(found) - 1) // (most - 1)] for i in range(most)]
        return found

    def _of(self, kind: CollectiveKind, first: int) -> _Options:
        key = kind, first
        if key not in self.options:
            end = min(self.ends[kind][first], first + self.effort.window)
            if kind == "gather":
                # What does not fit when its first transfer is needed, or does not end in time. Nor does what is longer.
                left_out = ~self.latest.may_gather(first, end) | (self.launch[first:end] > self.use[first])
                longer = left_out[1:].nonzero()[0]  # a transfer by itself is never left out
                end = first + int(longer[0]) + 1 if longer.size else end
            self.budget.spend(_BEGINNING + _BUCKET * (end - first))
            rows = self._buckets(kind, first, end)
            ends, copy_in, copy_out = rows[:, 0].astype(np.int64), rows[:, 3], rows[:, 4]
            if kind == "gather":
                back = self.use[first] - self.launch[ends - 1]
                ahead = self.use[ends] - self.use[first] + copy_in + copy_out
            else:
                back, ahead = self.ready[ends - 1], copy_in
            seconds = rows[:, 2:3]
            lost = self.link.contention * seconds
            self.options[key] = _Options(kind, first, rows[:, 1], ends, seconds, lost, back[:, None], ahead[:, None])
        return self.options[key]

    def _buckets(self, kind: CollectiveKind, first: int, end: int) -> Numbers:
        """Return the buckets that begin with a transfer: end, whether packed, seconds, copy_in and copy_out."""
        link, before = self.link.of(self.chain.transfers(kind)[first].link_index), self.sums[kind]
        rows = []
        for place, sums in enumerate((before[first + 1 : end + 1] - before[first]).tolist(), start=first + 1):
            contents = Contents(*sums)
            costs = [(contents.load(link, kind, packed), packed) for packed in contents.modes]
            for cost, packed in costs:
                # Another mode is better if it takes less of the channel, and no more with its copies.
                total = (sum(other[:3]) for other, _ in costs if other.seconds < cost.seconds)
                if min(total, default=math.inf) > cost.seconds:
                    rows.append((place, packed, cost.seconds, cost.copy_in, cost.copy_out))
        return np.array(rows, dtype=np.float64).reshape(-1, 5)


def _sums(transfers: Sequence[Transfer]) -> NDArray[np.int64]:
    return np.array([[0] * 6, *map(Contents.of, transfers)], dtype=np.int64).cumsum(axis=0)


def _ends_of_groups(transfers: Sequence[Transfer]) -> list[int]:
    sizes = [len(list(members)) for _, members in itertools.groupby(transfers, lambda transfer: transfer.group)]
    return [end for end, size in zip(itertools.accumulate(sizes), sizes) for _ in range(size)]


class _Options(NamedTuple):
    """Buckets that begin with one transfer, and their costs as columns."""

    kind: CollectiveKind
    first: int
    packed: Numbers
    ends: NDArray[np.int64]  # of the buckets, in order
    seconds: Numbers  # on the channel
    lost: Numbers  # to contention
    back: Numbers  # of a gather from its launch to its use; of a reduction when it is ready
    ahead: Numbers  # of a gather from its use to the next, with its copies; of a reduction its copies

    def until(self, end: int) -> _Options:
        """Return the buckets that end there or before."""
        num = int(np.searchsorted(self.ends, end, side="right"))
        columns: list[Any] = [column[:num] for column in self[2:]]
        return _Options(self.kind, self.first, *columns)

    def bucket(self, row: int) -> Bucketed:
        return Bucketed(self.kind, self.first, int(self.ends[row]), bool(self.packed[row]))


def _clocks(labels: list[_Label]) -> tuple[Numbers, Numbers]:
    return np.array([label[0] for label in labels]), np.array([label[1] for label in labels])


class _Latest:
    """Latest clocks, by gathers and reductions issued, with which the step can end before a given time.

    Attributes:
        channel, compute: the clocks, of compute at the use of the next gather.
    """

    def __init__(self, chain: Chain, link: Link, below: float) -> None:
        gathers, reductions = jobs(chain, link)
        self.together = gathers.together.tolist()
        self.seconds = [gathers.between(first) for first in range(len(gathers.behind))]
        self.use = [*(below - gathers.behind).tolist(), below]
        # What is left of gathers as one bucket, and of reductions in buckets that keep to the end of the step.
        gathering = np.array([*(float(times[-1]) for times in self.seconds), 0.0])
        work = gathering[:, None] + reductions.work(below)[::-1]
        self.channel, self.compute = self._clocks(gathers, below, 1.0)
        if link.contention:
            # The same next to the link, before what contention takes for the work that is left.
            share, lost = 1 - link.contention, link.contention * np.where(np.isfinite(work), work, 0.0)
            beside = self._clocks(jobs(chain, link, share)[0], below, share)
            self.channel = np.minimum(self.channel, beside[0] - lost)
            self.compute = np.minimum(self.compute, beside[1] - lost)
        self.channel = np.minimum(below - work, self.channel)
        self.compute = np.broadcast_to(self.compute, work.shape)

    def _clocks(self, gathers: Jobs, below: float, share: float) -> tuple[Numbers, Numbers]:
        """Return as columns the link's clock if the rest of the gathers comes next, and compute's at the next use."""
        latest = (below - gathers.behind[i:] - share * self.seconds[i] for i in range(len(self.seconds)))
        channel = [*(float(times.min()) for times in latest), math.inf]
        return np.array(channel)[:, None], np.append(below - gathers.behind, below)[:, None]

    def may_gather(self, first: int, end: int) -> NDArray[np.bool_]:
        """Return by length whether a bucket that begins with a gather can end in time, if all before travel as one."""
        found: NDArray[np.bool_] = self.together[first] + self.seconds[first][: end - first] <= self.use[first]
        return found


def _earliest_launches(chain: Chain, limit: float) -> list[int]:
    """Return by gather the earliest position from which it, and all before it, fit next to what must be there."""
    if limit == math.inf:
        return [0] * len(chain.gathers)
    used = np.array(chain.least_memory, dtype=np.float64)
    found: list[int] = []
    for gather in chain.gathers:
        first = found[-1] if found else 0
        # No gather starts before the one in front of it. Those in front hold what they took here already, so what fits
        # now fits next to all of them.
        full = (used[first : gather.at] + gather.num_bytes > limit).nonzero()[0]
        position = first + int(full[-1]) + 1 if full.size else min(first, gather.at)
        used[position : gather.at] += gather.num_bytes
        found.append(position)
    return found
