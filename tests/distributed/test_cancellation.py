"""Cancellation: a rank that is capturing a big model learns at once that another rank cannot capture it."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

import graphshard
from graphshard.errors import CaptureError, PeerError
from tests.distributed.nets import rows
from tests.distributed.twins import world_mesh
from tests.ranks import Ranks

PAUSE, BLOCKS = 0.25, 200


@torch.library.custom_op("graphshard_tests::slow", mutates_args=())
def slow(x: Tensor) -> Tensor:
    return x.clone()


@slow.register_fake
def _(x: Tensor) -> Tensor:
    time.sleep(PAUSE)
    return torch.empty_like(x)


class Slow(nn.Module):
    """A model whose capture takes minutes, and fails at its first line if it branches."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        if self.branches and self.linear.weight.sum() > 0:
            x = -x
        x = self.linear(x)
        for _ in range(BLOCKS):
            x = x + slow(x.detach())
        return x.sum()


def _fails(rank: int, world_size: int) -> tuple[str, float]:
    model = graphshard.compile(Slow(branches=rank == 1), world_mesh(), backend="eager", fullgraph=True)
    start = time.monotonic()
    with pytest.raises((CaptureError, PeerError)) as raised:
        model(rows(rank))
    return str(raised.value), time.monotonic() - start


def test_a_capturing_rank_learns_of_a_failure(ranks: Ranks) -> None:
    (told, seconds), (said, _) = ranks(2).run(_fails)
    assert "test_cancellation.py:" in said
    assert said.splitlines()[0] in told
    assert seconds < PAUSE * BLOCKS / 2
