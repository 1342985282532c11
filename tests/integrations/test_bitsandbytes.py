"""bitsandbytes' CPU optimizers and weights do not support shards, with FSDP2 and here, and errors say so."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

import graphshard
from graphshard.errors import ArgumentError
from tests.distributed.nets import rows
from tests.distributed.twins import twins, world_mesh
from tests.integrations.test_torchao_optimizers import Wide
from tests.ranks import Ranks

HAS = importlib.util.find_spec("bitsandbytes") is not None
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS, reason="bitsandbytes is not installed")]


def _optimizers(rank: int, world_size: int) -> list[str]:
    import bitsandbytes

    errors = []
    for model in twins(Wide(), world_mesh()):
        optim: Any = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2)
        model(rows(rank, 4, 64)).square().mean().backward()
        with pytest.raises(Exception) as caught:  # noqa: PT011  # torch's, about the operator
            optim.step()
        errors.append(f"{type(caught.value).__name__}: {caught.value}")
    return errors


def test_its_optimizers_reject_shards(ranks: Ranks) -> None:
    """When this test fails, rewrite docs/integrations/peft.md."""
    for ours, theirs in ranks(2).run(_optimizers):
        print(ours, theirs)
        assert "DTensor" in ours
        assert ours == theirs


def _four_bits(rank: int, world_size: int) -> None:
    import bitsandbytes

    model = nn.Sequential(bitsandbytes.nn.Linear4bit(64, 64, bias=False), nn.Linear(64, 4))
    model.to("cpu")
    with pytest.raises(ArgumentError, match=r"parameter 0\.weight is a Params4bit, a tensor subclass"):
        graphshard.compile(model, world_mesh())
    assert isinstance(model[0].weight, torch.nn.Parameter)


def test_rejects_its_four_bit_weights(ranks: Ranks) -> None:
    ranks(2).run(_four_bits)
