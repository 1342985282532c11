"""Small models to export, with the features of programs: tied weights, buffers, dropout, constants, repeated blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram

WIDTH, TOKENS = 8, 16


class Block(nn.Module):
    """A residual block with BatchNorm and dropout, and three uses of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 12)
        self.norm = nn.BatchNorm1d(12)
        self.down = nn.Linear(12, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(torch.tanh(self.norm(self.up(x))))
        return x * torch.sigmoid(self.gate(x)) + F.dropout(hidden, 0.25, self.training)


class Net(nn.Module):
    """Tied embeddings, repeated blocks, one of which runs twice, a Sequential, and a frozen parameter."""

    scale: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.0, WIDTH), requires_grad=False)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.linspace(1.0, 2.0, WIDTH), persistent=False)
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, WIDTH), persistent=False)

    def forward(self, tokens: Tensor, *, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.mlp(self.blocks[0](x)) * self.frozen * self.scale + self.shift + torch.tensor([0.5, 0.25]).repeat(4)
        with torch.no_grad():
            penalty = x.mean()
        return F.cross_entropy(self.head(x), targets) + penalty


def batch() -> dict[str, Any]:
    """Draw the inputs of a call of `Net`."""
    return {"tokens": torch.randint(0, TOKENS, (6,)), "targets": torch.randint(0, TOKENS, (6,))}


class Wide(nn.Module):
    """A model of float inputs whose graph names no dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def rows(count: int = 5) -> dict[str, Any]:
    """Draw the inputs of a call of `Wide`."""
    return {"x": torch.randn(count, 4)}


def exported(model: nn.Module, inputs: Callable[[], dict[str, Any]], **options: Any) -> ExportedProgram:
    """Export a model for training, with keyword inputs."""
    return torch.export.export(model, (), inputs(), **options)


def narrowed(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy with parameters of another dtype, and unchanged buffers."""
    copied = copy.deepcopy(model)
    for param in copied.parameters():
        param.data = param.data.to(dtype)
    return copied


def save_net(path: Path) -> None:
    """Write a program of `Net`, as a process without graphshard does."""
    torch.manual_seed(0)
    torch.export.save(exported(Net(), batch), path)


if __name__ == "__main__":
    import sys

    save_net(Path(sys.argv[1]))
