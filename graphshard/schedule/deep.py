"""Buckets and their order on the link for a deep phase: a dynamic program over (gathers issued, reductions issued).

Between two entries of the channel, compute has come to the first use of the next gather, and what matters of the past
are two clocks, the channel's and compute's there. When a bucket starts at an earlier position, compute was there at
most the seconds of the items between earlier: if it was held up in between, then by something that ended on the
channel before, so the channel is later than either. States keep the clocks that no other pair beats. Without a memory
limit, without copies and with one channel this is exact; the number of states is linear in depth.

With contention c what is found is the least of c W + T', which no step beats (`bounds`): a bucket of w seconds puts
both clocks forward by c w, and takes (1 - c) w on the channel. The step takes just that if the link is busy from the
first wait of compute to the last.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.beginnings import Beginning, Beginnings, Numbers
from graphshard.schedule.budget import Budget
from graphshard.schedule.coarse import coarsen
from graphshard.schedule.latest import Latest
from graphshard.schedule.problem import KINDS, Bucketed, Chain, Link
from graphshard.schedule.together import load


@dataclass(frozen=True)
class Effort:
    """How far the dynamic program looks.

    Attributes:
        window: most transfers in a bucket.
        lag: most reductions that are ready and not issued.
        labels: most pairs of clocks per state.
        most_bytes: largest bucket of several transfers.
        reserve: bytes of gradients that wait for their reduction, for which room is left.
        below: seconds that the result must stay below to be of interest.
        coarse: neighbours are joined first until they take so many latencies.
    """

    window: int = 8
    lag: int = 8
    labels: int = 4
    most_bytes: float = math.inf
    reserve: float = 0.0
    below: float = math.inf
    coarse: float = 0.0


_CHANNEL = itemgetter(0)

_EXACT = Effort(window=1 << 30, lag=1 << 30, labels=1 << 30)


# Steps of a budget for what is found out about each transfer, and about the buckets that begin with it.
_TRANSFER, _BEGINNING, _BUCKET = 40, 30, 0.2
# For a state, and for each of its labels with each bucket; one that is kept is a step.
_VISIT, _LOOK = 40, 0.03

# Two clocks, the channel's and compute's, the last bucket, and the label before it.
_Label = tuple[float, float, "Bucketed | None", Any]


def channel_order(
    chain: Chain, link: Link, effort: Effort, budget: Budget, limit: float = math.inf
) -> list[Bucketed] | None:
    """The buckets of a chain in the order of their starts; None if none is of interest, or the budget ends."""
    if effort.coarse and (coarse := coarsen(chain, link, effort.coarse)) is not None:
        found = channel_order(coarse.joined, link, replace(effort, coarse=0.0), budget, limit)
        return None if found is None else coarse.original(found)
    if link.separate and chain.gathers and chain.reductions:
        # Reductions on a channel of their own never delay a gather. Gathers delay reductions only by holding compute
        # up. So gathers come first, and what they cost compute is counted as items that take longer.
        gathers = channel_order(replace(chain, reductions=()), link, effort, budget, limit)
        if gathers is None:
            return None
        seconds = _held_up(chain, link, gathers)
        reductions = channel_order(replace(chain, seconds=seconds, gathers=()), link, effort, budget, limit)
        return None if reductions is None else gathers + reductions
    label = _Program(chain, link, effort, budget, limit).run()
    return None if label is None else _path(label)


def shortest_order(chain: Chain, link: Link, budget: Budget, below: float) -> tuple[float, list[Bucketed]] | None:
    """The shortest schedule of a chain without copies on one channel, and its seconds; None as for `channel_order`.

    With contention no schedule beats the seconds, and this one may take longer.
    """
    found = _Program(chain, link, replace(_EXACT, below=below), budget, math.inf).run()
    return None if found is None else (max(found[:2]), _path(found))


def _held_up(chain: Chain, link: Link, gathers: list[Bucketed]) -> tuple[float, ...]:
    """Seconds of the items, each with what compute waits before it when gathers start as early as they can."""
    waits = [0.0] * len(chain.seconds)
    channel = held = 0.0
    for bucket in gathers:
        members = chain.gathers[bucket.first : bucket.end]
        at = members[0].at
        channel += load(link, "gather", members, bucket.packed).seconds
        # Compute comes to its use at what has elapsed undisturbed and what it has been held up by then.
        late = max(0.0, channel - chain.elapsed[at] - held)
        waits[at] += late
        held += late
    return tuple(second + wait for second, wait in zip(chain.seconds, waits))


class _Program:
    def __init__(self, chain: Chain, link: Link, effort: Effort, budget: Budget, limit: float) -> None:
        self.chain, self.link, self.effort, self.budget = chain, link, effort, budget
        end = len(chain.seconds)
        self.use = np.array([chain.elapsed[at] for at in (*(g.at for g in chain.gathers), end)])
        self.used_at = [*(g.at for g in chain.gathers), end]
        self.launch = np.array([chain.elapsed[p] for p in earliest_launches(chain, limit, effort.reserve)])
        self.ready = np.array([chain.elapsed[r.at] for r in chain.reductions])
        self.latest = Latest(chain, link, effort.below)
        self.beginnings = {kind: Beginnings(chain, link, kind) for kind in KINDS}
        self.options: dict[tuple[CollectiveKind, int], _Options] = {}
        budget.spend(_TRANSFER * (len(chain.gathers) + len(chain.reductions)))

    def _gathers(self, first: int) -> _Options:
        """Every bucket of gathers that begins with one; `back` is from its launch to its use, `ahead` to the next."""
        use, begin = self.use[first], self.beginnings["gather"]
        end = min(begin.end_of_group(first), first + self.effort.window)
        sizes = begin.num_bytes(first, end)
        # What does not fit when its first transfer is needed, or does not end in time. Nor does what is longer.
        late = ~self.latest.may_gather(first, end) | (self.launch[first:end] > use)
        found = begin.of(first, self._last(first, late | (sizes > self.effort.most_bytes)))
        ahead = self.use[found.ends] - use + found.copy_in + found.copy_out
        return _Options.of(found, use - self.launch[found.ends - 1], ahead, self.link.contention)

    def _reductions(self, first: int) -> _Options:
        """Every bucket of reductions that begins with one; `back` is when it is ready, `ahead` its copies."""
        begin = self.beginnings["reduce"]
        end = min(begin.end_of_group(first), first + self.effort.window)
        found = begin.of(first, self._last(first, begin.num_bytes(first, end) > self.effort.most_bytes))
        return _Options.of(found, self.ready[found.ends - 1], found.copy_in, self.link.contention)

    def _last(self, first: int, not_in: NDArray[np.bool_]) -> int:
        """The end of the longest bucket before one that is left out; a transfer by itself is never left out."""
        left_out = not_in[1:].nonzero()[0]
        num = int(left_out[0]) + 1 if left_out.size else len(not_in)
        self.budget.spend(_BEGINNING + _BUCKET * num)
        return first + num

    def _of(self, kind: CollectiveKind, first: int) -> _Options:
        if (kind, first) not in self.options:
            self.options[kind, first] = self._gathers(first) if kind == "gather" else self._reductions(first)
        return self.options[kind, first]

    def run(self) -> _Label | None:
        """The label with which everything has come first; None if none is of interest, or the budget ends."""
        chain = self.chain
        num_gathers, num_reductions = len(chain.gathers), len(chain.reductions)
        states: list[dict[int, list[_Label]]] = [{} for _ in range(num_gathers + 1)]
        if self.use[0] >= self.latest.compute[0, 0] or self.latest.channel[0, 0] <= 0:
            return None
        states[0][0] = [(0.0, self.use[0], None, None)]
        ready_at = [bisect.bisect_right([r.at for r in chain.reductions], at) for at in self.used_at]
        for gathered in range(num_gathers + 1):
            ready = ready_at[gathered]
            here = states[gathered]
            # A bucket leads to more gathers, or to as many and more reductions. So in this order a state has all its
            # labels when its turn comes.
            for reduced in range(min(here, default=0), num_reductions + 1):
                if reduced not in here:
                    continue
                labels = here[reduced] = self._best(here[reduced])
                if self.budget.ended:
                    return None
                if reduced < ready:
                    self._reduce(labels, gathered, reduced, ready, here)
                if gathered < num_gathers and ready - reduced <= self.effort.lag:
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
        for bucket, label in self._of_interest(labels, options.beginning, channel, compute, *latest):
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
        for bucket, label in self._of_interest(labels, options.beginning, channel, compute + options.lost, *latest):
            here.setdefault(bucket.end, []).append(label)

    def _of_interest(
        self,
        labels: list[_Label],
        beginning: Beginning,
        channel: Numbers,
        compute: Numbers,
        latest_channel: Numbers,
        latest_compute: Numbers,
    ) -> Iterator[tuple[Bucketed, _Label]]:
        """What the labels lead to, by bucket and label, if the step can still end below the best."""
        good = (channel < latest_channel[:, None]) & (compute < latest_compute[:, None])
        which, of = (index.tolist() for index in good.nonzero())
        self.budget.spend(_VISIT + good.size * _LOOK + len(which))
        for option, label, link, here in zip(which, of, channel[good].tolist(), compute[good].tolist()):
            bucket = beginning.bucket(option)
            yield bucket, (link, here, bucket, labels[label])

    def _best(self, labels: list[_Label]) -> list[_Label]:
        """Those whose clocks no other has both as early; evenly among them if they are too many."""
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


@dataclass(frozen=True)
class _Options:
    """Buckets that begin with one transfer, and their costs as columns.

    Attributes:
        ends: of the buckets, in order.
        seconds: on the channel.
        lost: what contention takes.
        back, ahead: see `_Program`.
    """

    beginning: Beginning
    ends: NDArray[np.int64]
    seconds: Numbers
    lost: Numbers
    back: Numbers
    ahead: Numbers

    @staticmethod
    def of(beginning: Beginning, back: Numbers, ahead: Numbers, contention: float) -> _Options:
        """Of buckets, and what lies back and ahead."""
        seconds = beginning.seconds[:, None]
        return _Options(beginning, beginning.ends, seconds, contention * seconds, back[:, None], ahead[:, None])

    def until(self, end: int) -> _Options:
        """Those that end there or before."""
        num = int(np.searchsorted(self.ends, end, side="right"))
        seconds, lost, back, ahead = (c[:num] for c in (self.seconds, self.lost, self.back, self.ahead))
        return _Options(self.beginning, self.ends[:num], seconds, lost, back, ahead)


def _clocks(labels: list[_Label]) -> tuple[Numbers, Numbers]:
    """The channel's and compute's, as rows."""
    return np.array([label[0] for label in labels]), np.array([label[1] for label in labels])


def _path(label: _Label) -> list[Bucketed]:
    found = []
    step: _Label | None = label
    while step is not None:
        _, _, bucket, step = step
        if bucket is not None:
            found.append(bucket)
    return found[::-1]


def earliest_launches(chain: Chain, limit: float, reserve: float = 0.0) -> list[int]:
    """Per gather, the earliest position from which it, and all before it, fit beside what must be there."""
    if limit == math.inf:
        return [0] * len(chain.gathers)
    used = np.array(least_memory(chain), dtype=np.float64)
    found: list[int] = []
    for gather in chain.gathers:
        first = found[-1] if found else 0
        # No gather starts before the one in front of it. Those in front hold what they took here already, so what fits
        # now fits beside all of them.
        full = (used[first : gather.at] + (gather.num_bytes + reserve) > limit).nonzero()[0]
        position = first + int(full[-1]) + 1 if full.size else min(first, gather.at)
        used[position : gather.at] += gather.num_bytes
        found.append(position)
    return found


def least_memory(chain: Chain) -> list[int]:
    """Bytes that every schedule needs during each item: its base, what it reads, and the gradients it makes."""
    change = [0] * (len(chain.seconds) + 1)
    for gather in chain.gathers:
        change[gather.at] += gather.num_bytes
        change[gather.last + 1] -= gather.num_bytes
    for reduction in chain.reductions:
        # The item that makes a gradient holds it; after it, a schedule may wait for the reduction at once.
        change[reduction.at - 1] += reduction.num_bytes
        change[reduction.at] -= reduction.num_bytes
    return [base + held for base, held in zip(chain.base, accumulate(change))]
