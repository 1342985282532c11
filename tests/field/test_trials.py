"""The three ways to train agree on a model that all of them can train, and a difference is found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.field.trials import assert_equal, gradients, on_fsdp2, on_graphshard, on_plain_torch
from tests.ranks import Ranks


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def _train(model: nn.Module) -> list[Tensor | None]:
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    return [loss, *gradients(model)]


def _trial(rank: int, world_size: int) -> None:
    expected = on_plain_torch(_net, _train)
    assert_equal(on_fsdp2(_net, _train), expected)
    assert_equal(on_graphshard(_net, _train), expected)
    with pytest.raises(AssertionError, match=r"of 5 tensors, those at \[2\] differ"):
        assert_equal([*expected[:2], None, *expected[3:]], expected)


def test_three_ways_agree(ranks: Ranks) -> None:
    ranks(2).run(_trial)
