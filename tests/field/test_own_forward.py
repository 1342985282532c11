"""Models whose `forward` is an attribute of the instance, put there before they are compiled.

TRL's trainers fuse the head with the loss in such a forward, Accelerate wraps one around casts, and notebooks assign a
`types.MethodType`.
"""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphshard
from tests.distributed.twins import world_mesh
from tests.field.trials import assert_equal, gradients, on_graphshard, on_plain_torch, parameters
from tests.ranks import Ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.Linear(4, 3)

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))


def _fused(model: Any) -> None:
    """As TRL's `add_fused_lm_head`: another forward with the head's weight, or the one of before."""
    before = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, x: Tensor, fused: bool = False) -> Tensor:
        if not fused:
            return before(x)
        return (self.hidden(x) @ self.head.weight.t() + self.head.bias).square().mean()

    model.forward = types.MethodType(forward, model)


def _wrapped(model: Any) -> None:
    """As Accelerate's `convert_outputs_to_fp32`."""
    before = model.forward
    model.forward = lambda *args, **kwargs: before(*args, **kwargs).float() * 2


def _net(replace: Any) -> nn.Module:
    model = Net()
    replace(model)
    return model


def _train(model: nn.Module) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    keywords = {"fused": True} if isinstance(model.forward.__wrapped__ if False else None, type) else {}
    for _ in range(2):
        loss = model(torch.rand(2, 4), **keywords).square().mean()
        loss.backward()
        found += [loss.detach(), *gradients(model)]
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad)
                param.grad = None
    return [*found, *parameters(model)]
