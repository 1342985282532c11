"""Optimizers that need whole matrices, written as people write them for one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Shampoo(Optimizer):
    """Shampoo: factors of other shapes than the parameter's, and a count that is an int."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    rows, columns = param.shape
                    state["left"], state["right"] = torch.eye(rows), torch.eye(columns)
                    state["steps"] = 0
                state["left"] += param.grad @ param.grad.T
                state["right"] += param.grad.T @ param.grad
                state["steps"] += 1
                update = torch.linalg.solve(state["left"], param.grad) @ torch.linalg.inv(state["right"])
                param.sub_(update, alpha=group["lr"] / state["steps"])


class MoonlightMuon(Optimizer):
    """Muon for matrices and AdamW for the rest, in one class, as Moonlight's and dion's.

    State says from the start which of both a parameter gets, groups count steps, heads of an attention's projection are
    updated separately, and so are experts of a batch.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.02, heads: int = 1) -> None:
        params = list(params)
        super().__init__(params, {"lr": lr, "step": 0})
        self.heads, self.updates = heads, 0
        for param in params:
            self.state[param]["use_muon"] = param.ndim >= 2

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.updates += 1
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                moment = state.setdefault("momentum_buffer", torch.zeros_like(param))
                moment.lerp_(param.grad, 0.05)
                if state["use_muon"]:
                    heads = self.heads if param.shape[-2] % self.heads == 0 else 1
                    update = torch.cat([_orthogonal(piece) for piece in moment.chunk(heads, -2)], -2)
                else:
                    square = state.setdefault("square", torch.zeros_like(param))
                    square.lerp_(param.grad.square(), 0.01)
                    update = moment / (square.sqrt() + 1e-8)
                param.add_(update, alpha=-group["lr"] / group["step"])


def _orthogonal(matrix: Tensor) -> Tensor:
    x = matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        x = 1.5 * x - 0.5 * x @ x.mT @ x
    return x


def matrices(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [param for param in params if param.ndim == 2]


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "muon": lambda params: torch.optim.Muon(matrices(params), lr=0.02),
    "shampoo": lambda params: Shampoo(matrices(params)),
    "moonlight": lambda params: MoonlightMuon(params, heads=2),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
}
