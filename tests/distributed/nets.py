"""Small nets and training loops for tests of sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import graphshard
from graphshard.ir.plan import Plan
from tests.distributed.twins import grads_of, params_of

Placement = Callable[[nn.Parameter], Shard | None]


def largest_dim(param: nn.Parameter) -> Shard:
    """Shard along the largest dim, as a negative index."""
    sizes = list(param.shape)
    return Shard(sizes.index(max(sizes)) - len(sizes))


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, dim: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.stem = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(2))
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tied(nn.Module):
    """Weights tied across units and within one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(Block(5, 5) for _ in range(3))
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[1].down.weight = self.blocks[1].up.weight
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for block in self.blocks:
            y = block(y)
        return self.head(y)


def rows(rank: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (5, 4)), generator=torch.Generator().manual_seed(rank))


def train(model: nn.Module, inputs: list[Tensor], lr: float = 0.1) -> dict[str, Any]:
    """Train with SGD on this rank's inputs; return losses, and final gradients and parameters."""
    optim = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    losses = []
    for x in inputs:
        optim.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optim.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **params_of(model), **{f"grad {n}": g for n, g in grads_of(model).items()}}


def full(values: dict[str, Any]) -> dict[str, Any]:
    return {n: v.full_tensor().detach() if isinstance(v, DTensor) else v for n, v in values.items()}


def data_parallel(model: nn.Module, step_inputs: list[list[Tensor]], lr: float = 0.1) -> dict[str, Any]:
    """Train the same steps without sharding: the gradient is the mean over the ranks' inputs."""
    optim = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    for inputs in step_inputs:
        optim.zero_grad()
        for x in inputs:
            (model(x).float().square().mean() / len(inputs)).backward()
        optim.step()
    return {**params_of(model), **{f"grad {n}": g for n, g in grads_of(model).items()}}


def hashes_agree(model: nn.Module) -> None:
    """Check that every rank has the same plan of the same graph."""
    plans = [p.plan.hash for p in graphshard.programs(model) if isinstance(p.plan, Plan)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, plans)
    assert plans
    assert all(other == plans for other in everyone)
