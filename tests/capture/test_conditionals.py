"""What a branch of torch.cond cannot do, as both branches are computed; `tests/distributed` compares the numbers."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphshard.ir.errors import CaptureError
from tests.helpers import captured

X = torch.ones(4, 4)
Branch = Callable[["Conditional", Tensor], object]


class _Doubled(torch.autograd.Function):
    """A function of the user's, which torch's modes do not see."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 2


class Conditional(nn.Module):
    """One branch is given, the other doubles."""

    def __init__(self, branch: Branch) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))
        self.counts: list[int] = []
        self.calls = 0
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * self.w
        return torch.cond(x.sum() > 0, lambda a: self.branch(self, a), lambda a: a * 2, (hidden,))


def _count(module: Conditional, x: Tensor) -> Tensor:
    module.calls += 1
    return x + 1


def _append(module: Conditional, x: Tensor) -> Tensor:
    module.counts.append(1)
    return x + 1


def _write_buffer(module: Conditional, x: Tensor) -> Tensor:
    module.seen.add_(1)
    return x + 1


def _write_operand(module: Conditional, x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x + 1


def _hook(module: Conditional, x: Tensor) -> Tensor:
    module.w.register_hook(lambda grad: grad * 2)
    return x + 1


CANNOT: dict[str, tuple[Branch, str]] = {
    "draws": (lambda module, x: F.dropout(x), "a branch cannot draw random numbers"),
    "writes to a buffer": (_write_buffer, "write to a tensor that it has not made"),
    "writes to an operand": (_write_operand, "write to a tensor that it has not made"),
    "has a hook": (_hook, "register_hook of a tensor that it has not made"),
    "calls a function of the user's": (lambda module, x: x * _Doubled.apply(module.w), "other than torch's functions"),
    "counts": (_count, "a branch of torch.cond changes calls. Both branches are"),
    "appends": (_append, "a branch of torch.cond changes counts. Both branches are computed"),
    "returns another shape": (
        lambda module, x: x[:2] * 1,
        "shape [2, 4], strides [4, 1] and torch.float32, shape [4, 4]",
    ),
    "returns another dtype": (lambda module, x: x.double(), "they return torch.float64, shape [4, 4]"),
    "returns other strides": (
        lambda module, x: x.mT * 1,
        "strides [1, 4] and torch.float32, shape [4, 4], strides [4, 1]",
    ),
    "returns a number": (lambda module, x: 3, "they return 3 and "),
    "returns another structure": (lambda module, x: (x * 1,), "(their structures are "),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_a_branch_cannot_do(name: str) -> None:
    """The values are never those of both branches in silence."""
    branch, text = CANNOT[name]
    start = r"(?s)cannot capture Conditional\.forward at .*test_conditionals\.py:\d+.*"
    with pytest.raises(CaptureError, match=start + re.escape(text)):
        captured(Conditional(branch), (X,), world_size=1)


def test_what_a_branch_may_do() -> None:
    """Write to what it has made, give functions of the user's what it was given, return that, use no gradients."""

    def branch(module: Conditional, x: Tensor) -> Tensor:
        made = x * 1
        made.mul_(2)
        with torch.no_grad():
            scale = module.w.exp() * module.seen
        return _Doubled.apply(made) * scale + _Doubled.apply(x)

    targets = [str(node.target) for node in captured(Conditional(branch), (X,)).phases["joint"].module.graph.nodes]
    assert "aten.where.self" in targets
    captured(Conditional(lambda module, x: x), (X,), world_size=1)
    captured(Conditional(branch), (X,), grad=False, world_size=1)
