"""Reduce gradients that backwards have added up, without another backward of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from graphshard.runtime.step import Executable


def reduce_left(executable: Executable) -> None:
    """Run the reductions that the program's next backward would run, and give parameters what it would give them.

    Autograd adds the gradients to those that are there, and runs the hooks that run then.
    """
    with torch.enable_grad():
        _Left.apply(executable, *(ref.param for ref in executable.trained.values())).backward()


class _Left(torch.autograd.Function):
    """A call whose gradients are what earlier backwards left."""

    @staticmethod
    def forward(ctx: Any, executable: Executable, *params: torch.Tensor) -> torch.Tensor:
        ctx.executable = executable
        return torch.zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return (None, *ctx.executable.reduce_left())
