"""Tensor parallelism with plain tensors and explicit collectives, as Megatron's, sharded over the data axis.

Its process groups are no axes of the mesh that FSDP2 and graphshard are given.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard
from tests.distributed.twins import assert_same, fsdp2, params_of
from tests.ranks import Ranks

WIDTH = 4


class Enter(torch.autograd.Function):
    """The same on all ranks of a group, whose gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)  # in place
        return grad, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return functional.wait_tensor(functional.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Gather(torch.autograd.Function):
    """All rows of the ranks, whose gradients are summed, and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return functional.wait_tensor(functional.all_gather_tensor(x, 0, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return functional.wait_tensor(functional.reduce_scatter_tensor(grad, "sum", 0, ctx.group)), None


class Block(nn.Module):
    """An MLP whose hidden features are of one rank of a group each."""

    def __init__(self, group: Any, by_rows: bool) -> None:
        super().__init__()
        self.group, self.by_rows = group, by_rows
        place, size = dist.get_rank(group), dist.get_world_size(group)
        self.up, self.down = (nn.Parameter(torch.randn(WIDTH, 6).chunk(size, 1)[place].clone()) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        enter: Any = Gather if self.by_rows else Enter
        h = F.silu(enter.apply(self.norm(x), self.group) @ self.up) @ self.down.T
        h = Leave.apply(h, self.group)
        return x + (h.chunk(dist.get_world_size(self.group))[0] if self.by_rows else h)


class Net(nn.Module):
    def __init__(self, groups: list[Any], *, broadcasts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(group, bool(number % 2)) for number, group in enumerate(groups))
        self.broadcasts = broadcasts

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.broadcasts:
            x = x + functional.wait_tensor(functional.broadcast(x.detach(), 0, self.layers[0].group))
        return x.square().mean()


def _train(model: nn.Module, mesh: DeviceMesh) -> dict[str, Tensor]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), {}
    for step in range(2):
        torch.manual_seed(10 * step + mesh["dp"].get_local_rank())
        loss = model(torch.rand(2, WIDTH))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
    return found


def _trains(rank: int, world_size: int, broadcasts: bool) -> None:
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    groups = [mesh.get_group("tp"), pairs[mesh["dp"].get_local_rank()], *[dist.group.WORLD][: world_size - 2]]
    ours, theirs = (Net(groups, broadcasts=broadcasts) for _ in range(2))
    graphshard.compile(ours, mesh["dp"], backend="eager")
    assert_same(_train(ours, mesh), _train(fsdp2(theirs, mesh["dp"]), mesh), "losses")
    assert_same(params_of(ours), params_of(theirs), "parameters")
    if not broadcasts:
        (program,) = graphshard.programs(ours)
        names = [axis.name for axis in program.mesh.axes]
        assert names == (["dp", "tp", "model 2"] if world_size > 2 else ["dp", "model 1"])


@pytest.mark.slow
def test_groups_become_axes(ranks: Ranks) -> None:
    """Groups with the same ranks are one axis."""
    ranks(2).run(_trains, False)


@pytest.mark.slow
@pytest.mark.parametrize("broadcasts", [False, True])
def test_groups_of_four_ranks(ranks: Ranks, broadcasts: bool) -> None:
    """A broadcast is no axis' collective: it splits the model."""
    ranks(4).run(_trains, broadcasts)
