"""Counterparts of test_fully_shard_comm.py: gathered and reduced values, and manual `unshard`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from graphshard.torch_compat.torch_ops import TorchDispatchMode
from tests.distributed.twins import (
    OURS,
    assert_same,
    grads_of,
    local,
    params_of,
    sharded_alike,
    world_mesh,
)
from tests.ranks import Ranks
from tests.upstream.lockstep import Layer, launches, own_rows

Shard = Callable[..., Any]

# --- values -------------------------------------------------------------------------------------------------

SIZES = [(5, 7), (5,), (8, 3), (8,), (9, 2, 2), (1, 4), (2,), (4, 6)]


class _OddSizes(nn.Module):
    """Parameters of uneven and empty shards; the values are integers, so sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        values = [nn.Parameter(torch.randint(-4, 5, size).float()) for size in SIZES]
        self.parts = nn.ModuleList(nn.ParameterList(values[start : start + 4]) for start in (0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(param * x).sum() for part in self.parts for param in part]).sum()


def _odd_sizes(rank: int, world_size: int) -> None:
    plain = _OddSizes()
    total = sum(float(other) for other in range(world_size))
    for reshard in (True, 2):
        for dtype in (torch.float32, torch.float16):
            options = {"reshard_after_forward": reshard, "mp_policy": MixedPrecisionPolicy(reduce_dtype=dtype)}
            pair = sharded_alike(lambda shard, model, options=options: shard(model, **options), copy.deepcopy(plain))
            for model in pair:
                model.unshard()
                for param, whole in zip(model.parameters(), plain.parameters(), strict=True):
                    assert not isinstance(param, DTensor)
                    assert torch.equal(param, whole)
                model.reshard()
                model(torch.tensor(float(rank))).backward()
                for param in model.parameters():
                    assert isinstance(param, DTensor)
                    assert torch.equal(param.grad.full_tensor(), torch.full(param.shape, total / world_size))
            assert_same(*map(grads_of, pair), f"{reshard=}, {dtype=}")


@pytest.mark.slow
def test_parameters_of_odd_sizes(ranks: Ranks) -> None:
    """`TestFullyShardCollectiveOps.test_all_gather_fp32`, `TestFullyShardCollectiveOps.test_reduce_scatter_fp32` and
    `TestFullyShardCollectiveOps.test_reduce_scatter_fp16`: unsharded parameters and mean gradients.
    """
    ranks(4).run(_odd_sizes)


class _Divisions(TorchDispatchMode):
    """A mode that counts divisions and multiplications by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func._opname in ("div", "div_", "mul_", "_foreach_div_", "_foreach_mul_")
        return func(*args, **(kwargs or {}))


def _alone(rank: int, world_size: int) -> None:
    """Each rank is a world: there are no collectives, and gradients are divided only by an explicit factor."""
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("other", "shard"))["shard"]
    for factor in (None, 1.0, 2.0):
        pair = sharded_alike(lambda shard, model: shard(model, mesh=mesh), nn.Linear(8, 4, bias=False))
        for model in pair:
            if factor is not None:
                model.set_gradient_divide_factor(factor)
            model(torch.ones(3, 8)).sum().backward()
            expected = torch.full((4, 8), 3 / (factor or 1))
            assert torch.equal(local(model.weight.grad), expected)
            model.zero_grad()
            loss = model(torch.ones(3, 8)).sum()
            with _Divisions() as divisions, launches(model) as launched:
                loss.backward()
            assert not launched
            if model is pair[0]:  # FSDP2 of torch 2.13 also divides by one
                assert divisions.number == (factor == 2)
            assert torch.equal(local(model.weight.grad), expected)


def test_a_world_of_one_divides_only_by_an_explicit_factor(ranks: Ranks) -> None:
    """`TestFullyShardReduceOpWorldSize1.test_singleton_copy_division` and
    `TestFullyShardReduceOpWorldSize1.test_size1_reduceop`."""
    ranks(2).run(_alone)


# --- unshard ------------------------------------------------------------------------------------------------


def _before_the_first_call(rank: int, world_size: int) -> None:
    """Call `unshard` first. A root without parameters has nothing to gather."""
    plain = _Mlps()
    for units in (True, False):
        model = copy.deepcopy(plain)
        for layer in model.layers if units else ():
            OURS(layer)
        OURS(model)
        with launches(model) as gathered:
            handle = model.unshard(async_op=True)
        assert bool(gathered) != units
        handle.wait()
        for param, whole in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(param, DTensor) == units
            assert torch.equal(param.full_tensor() if isinstance(param, DTensor) else param, whole)


def test_unshard_before_the_first_call(ranks: Ranks) -> None:
    """`TestFullyShardUnshardMultiThread.test_unshard_no_param_group` and
    `TestFullyShardUnshardMultiThread.test_unshard_without_lazy_init`."""
    ranks(2).run(_before_the_first_call)


class _Summed(nn.Module):
    """A product that is summed over the ranks while the model continues."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, dist.Work]:
        y = F.relu(x @ self.weight)
        return y, dist.all_reduce(y.detach(), group=self.mesh.get_group(), async_op=True)


class _Mlps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(12 + 4 * index) for index in range(3))

    def forward(self, ys: list[Tensor], works: list[dist.Work]) -> Tensor:
        total = torch.zeros_like(ys[0])
        for layer, y, work in zip(self.layers, ys, works):
            if work is not None:
                work.wait()
            total = total + layer(y)
        return total


class _Ahead(nn.Module):
    """A model that starts to gather each layer during the sum that the layer needs."""

    def __init__(self, mesh: Any, *, waits_inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.summed = nn.ModuleList(_Summed(mesh) for _ in range(3))
        self.mlps = _Mlps()
        self.waits_inside = waits_inside

    def forward(self, x: Tensor) -> Tensor:
        ys, works = [], []
        for summed, layer in zip(self.summed, self.mlps.layers):
            y, work = summed(x)
            if isinstance(layer, FSDPModule):
                layer.unshard(async_op=True)
            ys.append(y)
            works.append(work)
        if not self.waits_inside:
            for work in works:
                work.wait()
            works = [None] * len(works)
        return self.mlps(ys, works)


def _keep_layers(shard: Shard, model: Any) -> None:
    for layer in model.mlps.layers:
        shard(layer, reshard_after_forward=False)
    shard(model.mlps)


def _gathered_ahead(rank: int, world_size: int) -> None:
    for waits_inside in (False, True):
        _train_gathered_ahead(_Ahead(world_mesh(), waits_inside=waits_inside))


def _train_gathered_ahead(model: nn.Module) -> None:
    ours, theirs = (replicate(each) for each in sharded_alike(_keep_layers, model))
    optims = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (ours, theirs)]
    for step in range(3):
        losses = []
        for model, optim in zip((ours, theirs), optims):
            loss = model(own_rows(step)).sum()
            loss.backward()
            losses.append({"loss": loss.detach()})
            with implicit_replication():
                optim.step()
            optim.zero_grad()
        assert_same(*losses, f"step {step}")
        assert_same(params_of(ours), params_of(theirs), f"parameters after step {step}")


def test_unshard_async(ranks: Ranks) -> None:
    """`TestFullyShardUnshardMultiProcess.test_unshard_async`, with the wait inside and outside of the unit."""
    ranks(2).run(_gathered_ahead)
