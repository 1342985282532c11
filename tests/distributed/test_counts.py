"""How often gradients and parameters travel, in every mode of accumulation: as often as with FSDP2, or less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphshard
from tests.distributed.twins import CountLaunches, fsdp2
from tests.ranks import Ranks


class Chunked(nn.Module):
    """A trunk of two units, and a unit of two modules, whose head is called for one chunk after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor, *, hidden: bool = False) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.norm(x)
        return x if hidden else self.head(x)


def _step(model: Any, x: Tensor) -> None:
    model(x).sum().backward()


def _accumulate(model: Any, x: Tensor, *, keep: bool = False, switch: str = "set_requires_gradient_sync") -> None:
    for last in (False, False, True):
        getattr(model, switch)(last)
        if keep:
            model.set_reshard_after_backward(last)
        _step(model, x)


def _head_accumulates(model: Any, x: Tensor) -> None:
    """Each chunk has a backward of its own, of which the last one reduces."""
    hidden = model(x, hidden=True)
    leaf = hidden.detach().requires_grad_()
    for index, chunk in enumerate(leaf.chunk(3)):
        model.head.set_requires_gradient_sync(index == 2)
        model.head(chunk).square().sum().backward()
    hidden.backward(leaf.grad)


# How many gathers more than FSDP2's there are, where there are more; `docs/from_fsdp2.md` says so.
MODES: dict[str, tuple[Callable[[Any, Tensor], None], int]] = {
    "a step": (_step, 0),
    "microbatches": (_accumulate, 0),
    "microbatches that keep parameters": (lambda m, x: _accumulate(m, x, keep=True), 0),
    "microbatches that reduce over shards": (lambda m, x: _accumulate(m, x, switch="set_requires_all_reduce"), 0),
    "a head that accumulates chunks": (_head_accumulates, 3),
}


def _counted(rank: int, world_size: int, mode: str) -> None:
    run, more = MODES[mode]
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    ours, theirs = Chunked(), Chunked()
    graphshard.compile(ours, mesh, backend="eager", units=["layers.*", ("norm", "head")])
    fully_shard([theirs.norm, theirs.head], mesh=mesh)
    fsdp2(theirs, mesh)
    x = torch.randn(6, 8)
    counts = []
    for model in (ours, theirs):
        run(model, x)
        with CountLaunches() as count:
            run(model, x)
        counts.append({kind: count.of(kind) for kind in ("gather", "scatter", "all_reduce")})
    mine, other = counts
    assert mine["gather"] <= other["gather"] + more, counts
    assert mine["scatter"] <= other["scatter"], counts
    assert mine["all_reduce"] <= other["all_reduce"], counts
    assert min(mine.values()) > 0


@pytest.mark.parametrize("mode", MODES)
def test_collectives_of_a_step(ranks: Ranks, mode: str) -> None:
    ranks(4).run(_counted, mode)
