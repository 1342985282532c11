"""Gradients come to what a model returns in strides of their own, and are added up in their order, as in eager mode."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.distributed.nets import rows
from tests.distributed.twins import assert_same, grads_of, twins, world_mesh
from tests.ranks import Ranks


class Net(nn.Module):
    """Returns activations, of which the loss is made outside, transposed."""

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


def _steps(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    pair = twins(Net(), world_mesh())
    for step, (name, loss_of) in enumerate([*LOSSES.items(), *LOSSES.items()]):
        for model in pair:
            model.zero_grad()
            loss_of(*model(rows(10 * step + rank, 5, 33, 8))).backward()
        assert_same(*map(grads_of, pair), f"gradients of step {step}, {name}")
    ((installed,),) = pair[0]._graphshard.executables.known.values()
    assert len(installed.executable._backwards) <= 1 + len(LOSSES)


def test_gradients_keep_their_strides(ranks: Ranks) -> None:
    ranks(2).run(_steps)
