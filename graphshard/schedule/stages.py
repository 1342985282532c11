"""Times of a pipeline's stages: each rank's forwards and backwards in their order, and what waits for what.

    1F1B of two stages and three microbatches, backward as long as forward:

    rank 0   F0 F1    B0 F2 B1    B2
    rank 1      F0 B0 F1 B1 F2 B2

The schedules follow `torch.distributed.pipelining`: GPipe (Huang et al., 2019, arXiv:1811.06965), 1F1B (Narayanan
et al., PipeDream-Flush, 2021, arXiv:2006.09503) and interleaved 1F1B (Narayanan et al., Megatron-LM, 2021,
arXiv:2104.04473). Where all stages take as long and sending takes nothing, the time in which a rank waits is
(ranks - 1) * (forward + backward), divided by the number of stages of a rank: section 2.2 of the last one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from graphshard.cost.scalars import Scalar, maximum

PipelineSchedule = Literal["1f1b", "gpipe", "interleaved"]
PIPELINE_SCHEDULES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)


class Turn(NamedTuple):
    """A forward or backward of one microbatch in one stage."""

    stage: int
    microbatch: int
    backward: bool


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a stage; each is a number, or an array of samples."""

    first_forward: Scalar  # with the gathers of its parameters
    forward: Scalar
    backward: Scalar
    last_backward: Scalar  # with the reductions of its gradients
    added: Scalar = 0.0  # to every backward but the first: full gradients are added to the ones of earlier microbatches

    def of(self, turn: Turn, microbatches: int) -> Scalar:
        """Return the seconds of a turn."""
        if turn.backward:
            added = self.added if turn.microbatch else 0.0
            return added + (self.last_backward if turn.microbatch == microbatches - 1 else self.backward)
        return self.forward if turn.microbatch else self.first_forward

    def busy(self, microbatches: int) -> Scalar:
        """Return the seconds of all its turns."""
        again = microbatches - 1
        return self.first_forward + again * (self.forward + self.backward + self.added) + self.last_backward


def turns_of(
    schedule: PipelineSchedule, rank: int, ranks: int, microbatches: int, stages_per_rank: int = 1
) -> list[Turn]:
    """Return the turns of a rank, in order. It has every stage `rank + i * ranks`, more than one if "interleaved"."""
    if schedule == "gpipe":
        return [Turn(rank, index, backward) for backward in (False, True) for index in range(microbatches)]
    if schedule == "1f1b":
        stages_per_rank, ahead = 1, ranks - 1 - rank
        together = microbatches
    else:
        together = microbatches // rounds_of(ranks, microbatches)
        ahead = (stages_per_rank - 1) * together + 2 * (ranks - 1 - rank)
    total = microbatches * stages_per_rank
    ahead = min(ahead, total)
    forwards = _sequence(rank, ranks, total, together, range(stages_per_rank), backward=False)
    backwards = _sequence(rank, ranks, total, together, range(stages_per_rank)[::-1], backward=True)
    turns = list(itertools.islice(forwards, ahead))
    for forward, backward in zip(forwards, backwards):
        turns += [forward, backward]
    return [*turns, *_sequence(rank, ranks, total, together, range(stages_per_rank)[::-1], True, total - ahead)]


def rounds_of(ranks: int, microbatches: int) -> int:
    """Return the number of rounds in which interleaved stages take their microbatches, which it must divide."""
    return max(1, microbatches // ranks)


def _sequence(
    rank: int, ranks: int, total: int, together: int, chunks: Sequence[int], backward: bool, start: int = 0
) -> Iterator[Turn]:
    """Yield turns of one direction: microbatches together in one stage, then in the next one of the rank."""
    for at in range(start, total):
        round_, place = divmod(at, together * len(chunks))
        yield Turn(rank + chunks[place // together] * ranks, round_ * together + place % together, backward)


@dataclass(frozen=True)
class StageTimes:
    """When turns end."""

    ends: Mapping[Turn, Scalar]  # by turn
    finish: tuple[Scalar, ...]  # by rank, the end of its last turn


def run_stages(
    turns: Sequence[Sequence[Turn]],
    seconds: Sequence[StageSeconds],
    sending: Sequence[tuple[Scalar, Scalar]],
    microbatches: int,
) -> StageTimes:
    """Run the turns of each rank: one begins when its rank is free and its input has arrived.

    `sending` has by border the seconds from a stage to the next one, and of gradients back. One transfer after the
    other goes over a border in each direction, next to compute.
    """
    ends: dict[Turn, Scalar] = {}
    arrived: dict[tuple[int, bool], Scalar] = {}  # the last one over a border
    free: list[Scalar] = [0.0] * len(turns)
    waiting = [iter(each) for each in turns]
    heads = [next(each, None) for each in waiting]
    arrivals: dict[Turn, Scalar] = {}
    last = len(seconds) - 1
    while any(head is not None for head in heads):
        moved = False
        for rank, head in enumerate(heads):
            while head is not None and (begin := _ready(head, arrivals, ends, last)) is not None:
                end = ends[head] = maximum(free[rank], begin) + seconds[head.stage].of(head, microbatches)
                free[rank] = end
                border = head.stage - head.backward
                if 0 <= border < last:  # sent on
                    to = head.stage + (-1 if head.backward else 1)
                    key = border, head.backward
                    arrived[key] = maximum(end, arrived.get(key, 0.0)) + sending[border][head.backward]
                    arrivals[head._replace(stage=to)] = arrived[key]
                head, moved = next(waiting[rank], None), True
            heads[rank] = head
        assert moved, "stages wait for each other"
    return StageTimes(ends, tuple(free))


def _ready(turn: Turn, arrivals: Mapping[Turn, Scalar], ends: Mapping[Turn, Scalar], last: int) -> Scalar | None:
    """Return when the inputs of a turn are there; None if that is not known yet."""
    if not turn.backward:
        return 0.0 if turn.stage == 0 else arrivals.get(turn)
    if turn.stage == last:
        return ends.get(turn._replace(backward=False))
    return arrivals.get(turn)


def most_alive(turns: Sequence[Turn], saved: Mapping[int, int], peaks: Mapping[int, int]) -> tuple[int, int, int]:
    """Return the most bytes that a rank's microbatches hold at once, in which stage's turn, and how many are alive.

    By stage, a microbatch leaves `saved` bytes to its backward, and alone holds at most `peaks`, these included.
    """
    alive = dict.fromkeys(saved, 0)
    best = 0, turns[0].stage, 0
    for turn in turns:
        if not turn.backward:
            alive[turn.stage] += 1
        held = sum(count * saved[stage] for stage, count in alive.items()) - saved[turn.stage] + peaks[turn.stage]
        if held > best[0]:
            best = held, turn.stage, sum(alive.values())
        if turn.backward:
            alive[turn.stage] -= 1
    return best


def even_counts(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return how many blocks each stage gets: the slowest stage is as fast as can be, and the others are alike."""
    sums = [0.0, *itertools.accumulate(seconds)]

    def begins(cost: Callable[[float, float], float]) -> tuple[float, list[list[int]]]:
        """Return the cost of the best split, and by stages and blocks so far where the last stage begins."""
        costs, found = [0.0, *[math.inf] * len(seconds)], []
        for _ in range(stages):
            ways = [
                [(cost(costs[begin], sums[end] - sums[begin]), begin) for begin in range(end)]
                for end in range(len(sums))
            ]
            row = [min(each, default=(math.inf, 0)) for each in ways]
            costs = [total for total, _ in row]
            found.append([begin for _, begin in row])
        return costs[-1], found

    slowest = begins(max)[0] * (1 + 1e-9)
    _, found = begins(lambda total, own: math.inf if own > slowest else total + own * own)
    counts: list[int] = []
    end = len(seconds)
    for row in reversed(found):
        counts.append(end - row[end])
        end = row[end]
    return tuple(reversed(counts))
