"""Counterpart of test_fully_shard_ignore_params.py: DDP around a sharded model, and inside of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.twins import assert_same, params_of, sharded_alike
from tests.ranks import Ranks
from tests.upstream.lockstep import own_rows


class _Inner(nn.Module):
    """A sharded module with one ignored layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.ignored = nn.Linear(8, 8), nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.ignored(x)) - self.shift


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = _Inner()
        self.shift = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) + self.shift).sum()


def _ddp_around(rank: int, world_size: int) -> None:
    def parallelize(shard: Any, model: Any) -> None:
        ignored = set(model.inner.ignored.parameters())
        shard(model.inner.layer, ignored_params=ignored)
        shard(model.inner, ignored_params=ignored)

    models: list[nn.Module] = []
    for model in sharded_alike(parallelize, _Outer()):
        names = [f"inner.{name}" for name, _ in model.inner.named_parameters() if not name.startswith("ignored")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        models.append(DistributedDataParallel(model))
    models.append(DistributedDataParallel(_Outer()))
    optims = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
    for step in range(3):
        losses = []
        for model, optim in zip(models, optims):
            loss = model(own_rows(step))
            loss.backward()
            with implicit_replication():
                optim.step()
                optim.zero_grad()
            losses.append({"loss": loss.detach()})
        ours, theirs, plain = map(params_of, models)
        assert_same(losses[0], losses[1], f"step {step}")
        assert_same(ours, theirs, f"parameters after step {step}")
        torch.testing.assert_close(losses[0], losses[2])
        for name, param in plain.items():
            whole = ours[name].full_tensor() if hasattr(ours[name], "full_tensor") else ours[name]
            torch.testing.assert_close(whole, param)


def test_ddp_around_a_model_that_ignores_parameters(ranks: Ranks) -> None:
    """`TestFullyShardIgnoreParams.test_ddp_A_fsdp_B_ddp_C`: DDP reduces ignored parameters, inside and outside."""
    ranks(2).run(_ddp_around)
