"""torchao's optimizers with eight-bit, four-bit and float8 states update shards like FSDP2's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphshard
from tests.distributed.extended import plain_parts
from tests.distributed.nets import rows
from tests.distributed.twins import assert_same, params_of, twins, world_mesh
from tests.ranks import Ranks

STATES = {"Adam8bit": "OptimState8bit", "AdamW4bit": "OptimState4bit", "AdamWFp8": "OptimStateFp8"}


class Wide(nn.Module):
    """Shards of 4,096 elements, from which torchao compresses states; biases and the head have fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 128) for _ in range(2))
        self.head = nn.Linear(128, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(sum(block(x).relu() for block in self.blocks))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _steps(rank: int, world_size: int, name: str, whole: bool) -> None:
    import torchao.optim

    pair = twins(Wide(), world_mesh())
    optims = [getattr(torchao.optim, name)(model.parameters(), lr=1e-2) for model in pair]
    whole_step = graphshard.compile_step(pair[0], optims[0], _loss)
    with torch.compiler.set_stance("force_eager"):  # otherwise Inductor compiles the step for each shape
        for step in range(3):
            for model, optim in zip(pair, optims):
                x = rows(10 * step + rank, 4, 64)
                if whole and model is pair[0]:
                    whole_step(x)
                    continue
                _loss(model, x).backward()
                optim.step()
                optim.zero_grad()
            assert_same(*map(params_of, pair), f"step {step}")
    states = [
        {
            f"{param} {key} {part}": piece
            for param, value in params_of(model).items()
            for key, state in optim.state[value].items()
            for part, piece in plain_parts(state).items()
        }
        for model, optim in zip(pair, optims)
    ]
    assert_same(*states, "states")
    average = optims[0].state[pair[0].blocks[0].weight]["exp_avg"]
    assert isinstance(average, DTensor)
    assert type(average.to_local()).__name__ == STATES[name]


@pytest.mark.parametrize(("name", "whole"), [*((name, False) for name in STATES), ("Adam8bit", True)])
@pytest.mark.quick_cases("Adam8bit-False")
def test_low_bit_states(ranks: Ranks, name: str, whole: bool) -> None:
    """Parameters and states, bit for bit; also with `compile_step`."""
    ranks(2).run(_steps, name, whole)
