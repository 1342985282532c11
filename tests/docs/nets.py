"""Small models for the manual's code blocks; hidden blocks of a page import them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of a `Transformer`."""

    layers: int = 2
    dim: int = 8
    vocab: int = 16


def batch(size: int = 4, length: int = 3, vocab: int = 16) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of one rank."""
    tokens, targets = torch.randint(0, vocab, (2, size, length)).unbind()
    return tokens, targets


class Block(nn.Module):
    """A layer without attention: the pages are about parameters and collectives."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Transformer(nn.Module):
    """A small language model: `model(tokens, targets)` is the loss, `model.encode(tokens)` the head's input."""

    def __init__(self, config: Config = Config()) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config.dim) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)

    def init_weights(self) -> None:
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.encode(tokens))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Mlp(nn.Module):
    """Residual layers with dropout: `model(x)` is a number."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * dim, dim))
            for _ in range(2)
        )
        self.head = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).sum()
