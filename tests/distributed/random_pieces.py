"""Building blocks of random programs: small modules that take and return values of one shape.

Each is built for a width and a `Piece` of `random_programs`, whose `size` and `flag` select a variant. Values are
[batch, length, width], tokens [batch, length]; batch and length may be dynamic. Pure operators are in
`random_operators`; this file has state, autograd functions and hooks, modes, checkpointed regions, and parameters that
are frozen or unused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.random_operators import KINDS, VOCAB, Linear, Varied, kind

__all__ = ["KINDS", "REENTRANT", "VOCAB", "Saving"]

REENTRANT = 2  # the variant of "checkpoint" with use_reentrant=True


@kind("buffer")
class _Buffer(Varied):
    """Buffers that forward reads and writes."""

    variants = 4

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__(width, size, flag)
        self.register_buffer("mean", torch.zeros(width), persistent=flag)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        y = x + self.mean.cos() * self.calls
        if self.variant == 0:
            self.mean.lerp_(x.detach().float().mean((0, 1)).to(self.mean), 0.1)
        elif self.variant == 1:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean((0, 1)))
        elif self.variant == 2:
            self.mean = self.mean * 0.5 + x.detach().sum((0, 1)).to(self.mean)
        else:
            self.mean[0] = 0.5
        self.calls += 1
        return y * (1 + 0.1 * self.mean)


class _Steeper(torch.autograd.Function):
    """A function whose backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Saving(torch.autograd.Function):
    """A function that saves tensors, with two inputs and two outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x.sin(), x * y

    @staticmethod
    def backward(ctx: Any, by_sin: Tensor, by_product: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return by_sin * x.cos() + by_product * y.tanh(), by_product * x.sum((0, 1), keepdim=True).expand_as(x)


class _Rounding(torch.autograd.Function):
    """A straight-through estimator, in the style of setup_context."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


@kind("function")
class _Function(Varied):
    """Custom autograd functions, on values or parameters."""

    variants = 3

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__(width, size, flag)
        self.weight = nn.Parameter(torch.randn(width)) if flag else None

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        factor = x if self.weight is None else self.weight.expand_as(x)
        if self.variant == 0:
            return _Steeper.apply(factor, 3.0) * x
        if self.variant == 1:
            a, b = Saving.apply(x, factor)
            return a - b
        return _Rounding.apply(x) + _Rounding.apply(factor)


@kind("tensor_hook")
class _TensorHook(Varied):
    variants = 3

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__(width, size, flag)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad and self.variant == 0:
            y.register_hook(lambda grad: grad * 0.2)
        elif y.requires_grad and self.variant == 1:
            y.register_hook(lambda grad: grad.clamp(-0.01, 0.01) + x.detach())
        elif y.requires_grad:
            y.register_hook(lambda grad: grad / (1 + grad.norm()))
            y.register_hook(lambda grad: grad + 1)
        return y.tanh() + (y if self.flag else 0)


@kind("module_hook")
class _ModuleHook(nn.Module):
    """Forward hooks of a module that is not a unit; they change inputs or outputs."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=flag)
        variant = size % 3
        if variant == 0:
            self.linear.register_forward_hook(lambda module, args, output: output * 0.5 + args[0])
        elif variant == 1:
            self.linear.register_forward_pre_hook(lambda module, args: (args[0].tanh(),))
        else:
            self.linear.register_forward_hook(
                lambda module, args, kwargs, output: output + kwargs["input"], with_kwargs=True
            )
        self.by_name = variant == 2

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.linear(input=x) if self.by_name else self.linear(x)


@kind("attribute")
class _Attribute(nn.Module):
    """Numbers in attributes, which a training loop may change between steps."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = 1.0 + size
        self.activation = torch.tanh if flag else F.relu

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.activation(self.linear(x)) * self.scale


@kind("detached")
class _Detached(Varied):
    """Parts without gradients: detach, no_grad, a branch on grad mode, and inference of a teacher."""

    variants = 3

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__(width, size, flag)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        if self.variant == 0:
            return self.linear(x - x.detach().mean(0, keepdim=True))
        with torch.no_grad():
            target = self.linear(x) if self.flag else x.abs()
        if self.variant == 1:
            return self.linear(x) - target
        return x * target.softmax(-1)


@kind("autocast")
class _Autocast(nn.Module):
    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=flag)
        self.again = size % 2 == 1

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(x)
            if self.again:
                y = self.linear(y.relu())
        return y.to(x.dtype)


@kind("penalty")
class _Penalty(Varied):
    """A gradient penalty: a gradient is a part of the value."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__(width, size, flag)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.linear(x)
        inside = x if x.requires_grad else x.detach().requires_grad_()
        y = self.linear(inside).tanh()
        (grad,) = torch.autograd.grad(y.sum(), inside, create_graph=True)
        return y + (grad.square() if self.flag else grad)


@kind("checkpoint")
class _Checkpoint(nn.Module):
    """A checkpointed region of a unit."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.inner = Linear(width, size, flag)
        self.reentrant = size % 3 == REENTRANT
        self.variant = size % 3

    def _run(self, x: Tensor, tokens: Tensor) -> Tensor:
        y = self.inner(x, tokens)
        return F.dropout(y, 0.3, self.training) if self.variant == 1 else y + x.sin()

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        if self.reentrant and not x.requires_grad:
            return self._run(x, tokens)
        return checkpoint(self._run, x, tokens, use_reentrant=self.reentrant)


@kind("low_rank")
class _LowRank(nn.Module):
    """A frozen weight and its trainable correction."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=flag).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(size + 1, width) / width)
        self.up = nn.Parameter(torch.randn(width, size + 1))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


@kind("unused")
class _Unused(Varied):
    """Parameters that are never used, or only without gradients."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__(width, size, flag)
        self.never = nn.Parameter(torch.randn(size + 1, width))
        self.cut = nn.Linear(width, width)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + self.cut(x).detach() if self.flag else x
