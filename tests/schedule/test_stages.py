"""Pipeline schedules: torch's orders, known formulas, and the effect of transfers and gathers."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from graphshard.schedule.stages import (
    PipelineSchedule,
    StageSeconds,
    Turn,
    even_counts,
    most_alive,
    run_stages,
    turns_of,
)

FORWARD, BACKWARD = 1.0, 2.0


def ran(
    schedule: PipelineSchedule, ranks: int, microbatches: int, per_rank: int = 1, sending: float = 0.0
) -> tuple[list[list[Turn]], float]:
    """Run equal stages; return the turns and the end time."""
    turns = [turns_of(schedule, rank, ranks, microbatches, per_rank) for rank in range(ranks)]
    stages = ranks * per_rank
    one = StageSeconds(FORWARD / per_rank, FORWARD / per_rank, BACKWARD / per_rank, BACKWARD / per_rank)
    times = run_stages(turns, [one] * stages, [(sending, sending)] * (stages - 1), microbatches)
    return turns, max(times.finish)


@pytest.mark.parametrize(("ranks", "microbatches"), list(itertools.product((1, 2, 4, 8), (8, 16, 32))))
def test_the_bubble_matches_the_papers(ranks: int, microbatches: int) -> None:
    """(ranks - 1) (forward + backward), divided by the stages of a rank (Megatron-LM, section 2.2)."""
    for schedule, per_rank in (("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 4)):
        turns, end = ran(schedule, ranks, microbatches, per_rank)
        bubble = (ranks - 1) * (FORWARD + BACKWARD) / per_rank
        assert end - microbatches * (FORWARD + BACKWARD) == pytest.approx(bubble), (schedule, per_rank)
        for rank, own in enumerate(turns):
            assert Counter(own) == Counter(
                Turn(stage, index, backward)
                for stage in range(rank, ranks * per_rank, ranks)
                for index in range(microbatches)
                for backward in (False, True)
            )


@pytest.mark.parametrize(
    ("ranks", "microbatches", "per_rank"), [(2, 4, 2), (4, 8, 2), (4, 10, 3), (4, 3, 2), (8, 16, 4)]
)
def test_interleaved_stages_have_the_order_of_torch(ranks: int, microbatches: int, per_rank: int) -> None:
    theirs = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    theirs.pp_group_size, theirs.n_local_stages, theirs._n_microbatches = ranks, per_rank, microbatches
    theirs.number_of_rounds = max(1, microbatches // ranks)
    theirs.microbatches_per_round = microbatches // theirs.number_of_rounds
    for rank in range(ranks):
        order = [action for action in theirs._calculate_single_rank_operations(rank) if action is not None]
        ours = turns_of("interleaved", rank, ranks, microbatches, per_rank)
        assert [(turn.stage, turn.microbatch) for turn in ours] == [
            (action.stage_index, action.microbatch_index) for action in order
        ]
        assert [turn.backward for turn in ours] == [action.computation_type.name != "FORWARD" for action in order]


def test_live_microbatches() -> None:
    """With 1F1B one microbatch per remaining stage; with GPipe all."""
    for rank in range(4):
        for schedule, alive in (("1f1b", 4 - rank), ("gpipe", 8)):
            turns = turns_of(schedule, rank, 4, 8)
            assert most_alive(turns, {rank: 10}, {rank: 15}) == ((alive - 1) * 10 + 15, rank, alive)
    assert most_alive(turns_of("1f1b", 0, 4, 2), {0: 10}, {0: 10})[2] == 2


def test_transfers_and_work_done_once() -> None:
    """Hand-computed: two stages, two microbatches; gathers take 5, reductions 7, accumulation 1, a transfer 3."""
    turns = [turns_of("1f1b", rank, 2, 2) for rank in range(2)]
    stage = StageSeconds(6.0, 1.0, 2.0, 9.0, added=1.0)
    times = run_stages(turns, [stage, stage], [(3.0, 4.0)], 2)
    ends = {(turn.stage, turn.microbatch, turn.backward): end for turn, end in times.ends.items()}
    assert ends[0, 0, False] == 6
    assert ends[0, 1, False] == 7
    assert ends[1, 0, False] == 6 + 3 + 6
    assert ends[1, 0, True] == 15 + 2
    assert ends[1, 1, False] == 18
    assert ends[1, 1, True] == 18 + 9 + 1
    assert ends[0, 0, True] == 17 + 4 + 2
    assert ends[0, 1, True] == 28 + 4 + 10
    assert times.finish == (42, 28)
    assert stage.busy(2) == 6 + 1 + 2 + 9 + 1


def test_transfers_queue_for_their_border() -> None:
    """If sending takes longer than a forward, the next stage waits for each transfer."""
    turns = [turns_of("gpipe", rank, 2, 3) for rank in range(2)]
    times = run_stages(turns, [StageSeconds(1.0, 1.0, 1.0, 1.0)] * 2, [(5.0, 0.0)], 3)
    assert [times.ends[Turn(1, index, False)] for index in range(3)] == [7, 12, 17]


def test_samples_run_at_once() -> None:
    """Arrays of seconds give each sample's result."""
    samples = [StageSeconds(*numbers) for numbers in ((2.0, 1.0, 3.0, 4.0), (5.0, 4.0, 1.0, 2.0))]
    both = StageSeconds(*(np.array([getattr(s, name) for s in samples]) for name in StageSeconds.__annotations__))
    turns = [turns_of("1f1b", rank, 3, 4) for rank in range(3)]
    together = run_stages(turns, [both] * 3, [(0.5, 0.25)] * 2, 4).finish
    alone = [run_stages(turns, [one] * 3, [(0.5, 0.25)] * 2, 4).finish for one in samples]
    assert np.array(together).T.tolist() == [list(each) for each in alone]


def test_counts_are_as_even_as_can_be() -> None:
    """The slowest stage decides; a head that takes as long as 1.2 blocks moves one of them."""
    assert even_counts([1.0] * 8, 4) == (2, 2, 2, 2)
    assert sorted(even_counts([1.0] * 10, 4)) == [2, 2, 3, 3]
    counts = even_counts([1.0] * 79 + [2.2], 8)
    assert (sum(counts), counts[-1], max(counts)) == (80, 9, 11)
    assert even_counts([1.0, 5.0, 1.0], 3) == (1, 1, 1)
    for seconds in ([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0], [1.0, 1.0, 1.0, 9.0, 1.0]):
        for stages in range(1, 5):
            counts = even_counts(seconds, stages)
            ends = [0, *itertools.accumulate(counts)]
            slowest = max(sum(seconds[a:b]) for a, b in itertools.pairwise(ends))
            ways = itertools.combinations(range(1, len(seconds)), stages - 1)
            assert slowest == min(
                max(sum(seconds[a:b]) for a, b in itertools.pairwise((0, *way, len(seconds)))) for way in ways
            )
