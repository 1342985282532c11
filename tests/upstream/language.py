"""A small language model whose head can be called separately."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.distributed.nets import Block

VOCAB = 9  # uneven: one rank has more rows


class Language(nn.Module):
    """A small language model; forward calls the head optionally."""

    def __init__(self, *, tied: bool = False, checkpointed: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList(_wrapped(Block(8, 12), checkpointed) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, hidden: bool = False) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return x if hidden else self.head(x)


def _wrapped(block: nn.Module, how: str) -> nn.Module:
    if how == "composable":
        composable_checkpoint(block)
    return checkpoint_wrapper(block) if how == "wrapper" else block


def tokens(step: int) -> Tensor:
    seed = 10 * step + torch.distributed.get_rank()
    return torch.randint(VOCAB, (2, 6), generator=torch.Generator().manual_seed(seed))


def language_loss(model: nn.Module, step: int) -> Tensor:
    return F.cross_entropy(model(tokens(step)).flatten(0, 1).float(), tokens(step).flatten())
