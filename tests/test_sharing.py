"""What tests/sharing.py promises: one capture for all ranks, unless they differ or ask for their own."""

from __future__ import annotations

from unittest import mock

import torch

import graphshard
from graphshard.capture.capture import capture
from tests.distributed.nets import Net, rows
from tests.distributed.twins import world_mesh
from tests.ranks import Ranks


def _captures(rank: int, world_size: int, batches: list[int]) -> tuple[int, str]:
    """How often this rank captured, and the program."""
    model = graphshard.compile(Net(), world_mesh(), backend="eager")
    with mock.patch("tests.sharing.capture", side_effect=capture) as captured, torch.no_grad():
        model(rows(rank, batches[rank], 4))
    return captured.call_count, graphshard.programs(model)[0].history[-1].text


def test_the_first_rank_captures_for_all(ranks: Ranks) -> None:
    (first, text), *others = ranks(3).run(_captures, [5, 5, 5])
    assert first == 1
    assert others == [(0, text)] * 2


def test_a_rank_with_another_call_captures_itself(ranks: Ranks) -> None:
    counts = [count for count, _ in ranks(2).run(_captures, [5, 6])]
    assert counts == [1, 1]


def test_ranks_capture_themselves_if_asked_to(ranks: Ranks) -> None:
    counts = [count for count, _ in ranks(2).run(_captures, [5, 5], share=False)]
    assert counts == [0, 0]  # of the captures that are shared
