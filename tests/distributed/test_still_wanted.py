"""A rank that is busy capturing a big model is told at once that another rank cannot capture it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch import Tensor, nn

import graphshard
from graphshard.ir.errors import CaptureError, PeerError
from tests.distributed.nets import rows
from tests.distributed.twins import world_mesh
from tests.ranks import Ranks

PAUSE, BLOCKS = 0.25, 200


class Slow(nn.Module):
    """Its capture takes minutes, and fails at its first line if it branches."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        if self.branches and self.linear.weight.sum() > 0:
            x = -x
        for _ in range(BLOCKS):
            try:
                x = self.linear(x)
            except ValueError:  # takes no part in it
                continue
            time.sleep(PAUSE)
        return x.sum()


def _fails(rank: int, world_size: int) -> tuple[str, float]:
    model = graphshard.compile(Slow(branches=rank == 1), world_mesh(), backend="eager", allow=("time",))
    start = time.monotonic()
    error: Any = CaptureError if rank == 1 else PeerError
    with pytest.raises(error, match=r"test_still_wanted\.py:\d+") as raised:
        model(rows(rank))
    return str(raised.value), time.monotonic() - start


def test_a_rank_that_captures_is_told_of_a_failure(ranks: Ranks) -> None:
    (told, seconds), (said, _) = ranks(2).run(_fails, share=False)
    assert "rank 1 makes a program of Slow (first call) and failed: CaptureError: graphshard cannot capture" in told
    assert said.splitlines()[0] in told
    assert seconds < PAUSE * BLOCKS / 2
