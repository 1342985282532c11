"""graphshard.save_checkpoint and load_checkpoint: resuming repeats training, and what is not whole is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import graphshard
from graphshard.checkpoint import _Ranks
from graphshard.errors import CheckpointError
from graphshard.manifest import latest_checkpoint, measure, write_manifest
from graphshard.unpickling import SafeReader, load_plain, serialize_plain
from tests.distributed.test_parity import assert_same, fsdp2, params_of, world_mesh
from tests.ranks import RankError, Ranks


class Net(nn.Module):
    """Two blocks of odd width and a head of one row: shards are uneven, and empty on trailing ranks."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.norm = nn.BatchNorm1d(dim)
        self.head = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x))


def trainer(impl: str, seed: int, dim: int = 7) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, sharded by graphshard or by FSDP2."""
    torch.manual_seed(seed)
    model = Net(dim)
    if impl == "fsdp2":
        fsdp2(model, world_mesh())
    else:
        graphshard.compile(model, world_mesh(), backend="eager")
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def steps(model: nn.Module, optim: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Train; the same rows on every rank, so that the result does not depend on their number."""
    losses = []
    for step in range(first, last):
        x = torch.randn(4, model.norm.num_features, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def _save(rank: int, world_size: int, impl: str, path: Path) -> list[float]:
    model, optim = trainer(impl, seed=1)
    steps(model, optim, 0, 2)
    extra = {"step": 2, "note": ["text", 1.5, None], "tensor": torch.arange(3)}
    graphshard.save_checkpoint(path, model, optim, extra=extra, per_rank={"rng": torch.get_rng_state(), "rank": rank})
    return steps(model, optim, 2, 5)


def _load(rank: int, world_size: int, impl: str, path: Path) -> tuple[list[float], Any]:
    model, optim = trainer(impl, seed=2)
    steps(model, optim, 7, 8)  # what was trained here is replaced
    extra, per_rank = graphshard.load_checkpoint(path, model, optim)
    assert (extra["step"], extra["note"]) == (2, ["text", 1.5, None])
    assert torch.equal(extra["tensor"], torch.arange(3))
    return steps(model, optim, extra["step"], 5), per_rank and per_rank["rank"]


def test_round_trip(ranks: Ranks, tmp_path: Path) -> None:
    losses = ranks(2).run(_save, "graphshard", tmp_path / "a")[0]
    print(losses, [(p.name, p.stat().st_size) for p in (tmp_path / "a").iterdir()])
    assert [v for v in ranks(2).run(_load, "graphshard", tmp_path / "a")] == [(losses, 0), (losses, 1)]
    assert latest_checkpoint(tmp_path) == tmp_path / "a"
