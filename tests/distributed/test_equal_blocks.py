"""Nine equal blocks, of which compile captures five if possible, match FSDP2 whatever happens between the blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.twins import assert_same, grads_of, twins, world_mesh
from tests.ranks import Ranks

NUM = 9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor, scale: Any = 1.0, means: list[Tensor] | None = None) -> Tensor:
        x = x + torch.tanh(self.linear(self.norm(x))) * scale
        if means is not None:
            means.append(x.mean())
        return x


class Stack(nn.Module):
    """A stack whose forward is chosen by name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.layers = nn.ModuleList(Block() for _ in range(NUM))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, more = FORWARDS[self.name](self.layers, x)
        return self.head(x).sum() + more


def _hidden(layers: nn.ModuleList, x: Tensor) -> Any:
    found = [x := block(x) for block in layers]
    return x, sum(one.pow(2).mean() for one in found)


def _middle(layers: nn.ModuleList, x: Tensor) -> Any:
    found = [x := block(x) for block in layers]
    return x, found[4].sum() * 3


def _stacked(layers: nn.ModuleList, x: Tensor) -> Any:
    return torch.stack([x := block(x) for block in layers]).mean(0), 0.0


def _every_third(layers: nn.ModuleList, x: Tensor) -> Any:
    first = x
    for index, block in enumerate(layers):
        x = block(x) + (first if index % 3 == 2 else 0.0)
    return x, 0.0


def _mirrored(layers: nn.ModuleList, x: Tensor) -> Any:
    held = []
    for index, block in enumerate(layers):
        if index < NUM // 2:
            held.append(x)
        elif held:
            x = x + held.pop()
        x = block(x)
    return x, 0.0


def _two_back(layers: nn.ModuleList, x: Tensor) -> Any:
    before = x
    for block in layers:
        x, before = block(x) + 0.5 * before, x
    return x, 0.0


def _by_number(layers: nn.ModuleList, x: Tensor) -> Any:
    for index, block in enumerate(layers):
        x = block(x, 1.0 + index)
    return x, 0.0


def _by_tensor(layers: nn.ModuleList, x: Tensor) -> Any:
    for block, scale in zip(layers, torch.arange(1.0, 1.0 + NUM)):
        x = block(x, scale)
    return x, 0.0


def _swapped(layers: nn.ModuleList, x: Tensor) -> Any:
    for index in (0, 1, 2, 5, 4, 3, 6, 7, 8):
        x = layers[index](x)
    return x, 0.0


def _reversed(layers: nn.ModuleList, x: Tensor) -> Any:
    for block in reversed(layers):
        x = block(x)
    return x, 0.0


def _twice(layers: nn.ModuleList, x: Tensor) -> Any:
    for block in (*layers, *layers):
        x = block(x)
    return x, 0.0


def _detached(layers: nn.ModuleList, x: Tensor) -> Any:
    for index, block in enumerate(layers):
        x = block(x).detach() if index == 4 else block(x)
    return x, 0.0


def _appending(layers: nn.ModuleList, x: Tensor) -> Any:
    means: list[Tensor] = []
    for block in layers:
        x = block(x, 1.0, means)
    return x, sum(means)


def _summed(layers: nn.ModuleList, x: Tensor) -> Any:
    total = x.sum() * 0
    for block in layers:
        x = block(x)
        total = total + x.mean()
    return x, total


FORWARDS = {
    "hidden states": _hidden,
    "one from the middle": _middle,
    "stacked": _stacked,
    "every third": _every_third,
    "mirrored": _mirrored,
    "two back": _two_back,
    "by number": _by_number,
    "by tensor": _by_tensor,
    "swapped": _swapped,
    "reversed": _reversed,
    "twice": _twice,
    "detached": _detached,
    "appending": _appending,
    "summed": _summed,
}


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.quick_cases("detached")
def test_code_between_blocks(ranks: Ranks, name: str) -> None:
    ranks(2).run(_trains, name)


def _trains(rank: int, world_size: int, name: str) -> None:
    torch.manual_seed(0)
    ours, theirs = twins(Stack(name), world_mesh())
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(4, 8)
        ours(x).backward()
        theirs(x).backward()
        assert_same(grads_of(ours), grads_of(theirs), f"step {step}")
        for model in (ours, theirs):
            model.zero_grad()
