"""Strides of output gradients: gradients keep the caller's strides and sum in their memory order, as in eager mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.nets import rows
from tests.distributed.twins import assert_same, grads_of, twins, world_mesh
from tests.ranks import Ranks


class Net(nn.Module):
    """Returns activations, from which the caller computes a loss after a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x).transpose(1, 2).contiguous().transpose(1, 2)
        return self.second(self.norm(x)), x


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "contiguous": lambda y, x: (y.contiguous() * x.contiguous()).square().mean(),
    "transposed": lambda y, x: y.transpose(1, 2).contiguous().tanh().mean() + x.sum() / 7,
    "expanded": lambda y, x: y.sum() / 3 + x.mean(1).square().mean(),
    "a part": lambda y, x: y[:, :2].square().mean() + x[..., 1].sum(),
}


class Grouped(nn.Module):
    """The backward kernel of group norm requires contiguous gradients, so autograd makes them contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.GroupNorm(1, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.second(x), x


class Batched(nn.Module):
    """Batch norm adds in the memory order of the gradient, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.second(x), x


NETS = {"layer norm": Net, "group norm": Grouped, "batch norm": Batched}


def _steps(rank: int, world_size: int, net: str) -> None:
    torch.manual_seed(0)
    pair = twins(NETS[net](), world_mesh())
    for step, (name, loss_of) in enumerate([*LOSSES.items(), *LOSSES.items()]):
        for model in pair:
            model.zero_grad()
            loss_of(*model(rows(10 * step + rank, 5, 33, 8))).backward()
        assert_same(*map(grads_of, pair), f"gradients of step {step}, {name}")
    (installed,) = pair[0]._graphshard.executables.programs
    assert len(installed.executable._backwards) <= 1 + len(LOSSES)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.quick_cases("layer norm")
def test_gradients_keep_their_strides(ranks: Ranks, net: str) -> None:
    ranks(2).run(_steps, net)
