"""Partial-sum gradients on the tensor axis, of parameters sharded there: reduced once, as in FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import graphshard
from tests.distributed.tensor_parallel import data_of, mesh_of, placed
from tests.distributed.twins import BF16, FP32, assert_same, fsdp2, grads_of, local, params_of
from tests.ranks import Ranks


class Scaled(nn.Module):
    """Each rank of the tensor axis has different rows, and DTensor gathers their scale itself.

    The gradient of the whole scale is therefore the sum over a rank's rows.
    """

    def __init__(self, tp: DeviceMesh, dim: int, rows: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tp = tp
        self.scale = nn.Parameter(distribute_tensor(torch.randn(rows, 6), tp, [Shard(dim)]))
        self.shift = nn.Parameter(distribute_tensor(torch.randn(rows, 6), tp, [Shard(dim)]))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = DTensor.from_local(x, self.tp, [Shard(0)], run_check=False)
        y = torch.tanh(rows * self.scale * 1.7 + self.shift)
        return self.head(y.to_local()).square().mean()


def _pair(mesh: DeviceMesh, dim: int, policy: MixedPrecisionPolicy = FP32, rows: int = 4) -> list[Any]:
    ours = graphshard.compile(Scaled(mesh["tp"], dim, rows), mesh, backend="eager", mp_policy=policy)
    return [ours, fsdp2(Scaled(mesh["tp"], dim, rows), data_of(mesh), mp_policy=policy)]


def _step(pair: list[Any], step: int, number: int, rows: int = 4) -> None:
    """Run backward for some microbatches, of which the last one reduces."""
    rank = torch.distributed.get_rank()
    for microbatch in range(number):
        for model in pair:
            torch.manual_seed(100 * step + 10 * microbatch + rank)
            model.set_requires_gradient_sync(microbatch == number - 1)
            model(torch.randn(5, rows, 6)).backward()


def _microbatches(rank: int, world_size: int, dim: int, number: int, policy: MixedPrecisionPolicy) -> None:
    pair = _pair(mesh_of(world_size // 2, 2), dim, policy)
    for step in range(2):
        _step(pair, step, number)
        assert placed(pair[0]) == placed(pair[1])
        assert_same(*map(grads_of, pair), f"gradients of step {step}")
        for model in pair:
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
            model.zero_grad()
        assert_same(*map(params_of, pair), f"parameters of step {step}")


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("policy", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.slow
def test_microbatches(ranks: Ranks, policy: MixedPrecisionPolicy, number: int, dim: int) -> None:
    """Shards one after another and interleaved; accumulated in the compute dtype, and in the reduce dtype."""
    ranks(4).run(_microbatches, dim, number, policy)


@pytest.mark.parametrize("policy", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.quick_cases("fp32")
def test_one_data_rank(ranks: Ranks, policy: MixedPrecisionPolicy) -> None:
    """Only ranks of the tensor axis are reduced."""
    ranks(2).run(_microbatches, 0, 3, policy)


def _several_calls(rank: int, world_size: int) -> None:
    pair = _pair(mesh_of(2, 2), 0)
    for model in pair:
        torch.manual_seed(rank)
        (model(torch.randn(5, 4, 6)) + model(torch.randn(5, 4, 6))).backward()
    assert_same(*map(grads_of, pair), "gradients of two calls")


@pytest.mark.slow
def test_several_calls_in_one_backward(ranks: Ranks) -> None:
    ranks(4).run(_several_calls)


def _uneven(rank: int, world_size: int) -> None:
    for number in (1, 3):
        pair = _pair(mesh_of(2, 2), 0, rows=5)
        _step(pair, 0, number, rows=5)
        if number == 1:
            assert_same(*map(grads_of, pair), "gradients")
        for (name, ours), theirs in zip(grads_of(pair[0]).items(), grads_of(pair[1]).values(), strict=True):
            torch.testing.assert_close(local(ours), local(theirs), msg=name)


def test_uneven_shards(ranks: Ranks) -> None:
    """DTensor pads them: each microbatch reduces separately, which rounds differently than FSDP2's total."""
    ranks(4).run(_uneven)
