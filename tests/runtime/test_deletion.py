"""Deleting a model frees everything, including the source of its graphs."""

from __future__ import annotations

import gc
import linecache
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx.graph_module import _loader

import graphshard
from tests.ranks import reset_distributed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x).tanh()
        return self.second(x), x


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    reset_distributed()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    reset_distributed()


def trained() -> weakref.ref[nn.Module]:
    """Train with a backward for the first output only; the second one is lowered later."""
    model = graphshard.compile(Net(), backend="eager")
    (a, b), (c, _) = model(torch.ones(2, 8)), model(torch.ones(2, 8))
    (a.sum() + b.sum()).backward()
    c.sum().backward()
    return weakref.ref(model)


def test_a_deleted_model_is_freed() -> None:
    trained()
    gc.collect()
    sources, lines = set(_loader.eval_cache), {name for name in linecache.cache if name.startswith("<")}
    model = trained()
    gc.collect()
    assert model() is None
    assert set(_loader.eval_cache) == sources
    assert {name for name in linecache.cache if name.startswith("<")} == lines
