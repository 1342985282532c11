"""What random programs are made of: small modules that take and return values of one shape.

Each is made for a width and a `Piece` of `random_programs`, whose `size` and `flag` choose among its variants. Values
are of shape [batch, length, width], tokens of [batch, length]; both batch and length may be dynamic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB = 11
REENTRANT = 2  # the variant of "checkpoint" with use_reentrant=True
KINDS: dict[str, type[nn.Module]] = {}


def kind(name: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a module as what `Piece.kind` may name."""

    def register(cls: type[nn.Module]) -> type[nn.Module]:
        KINDS[name] = cls
        return cls

    return register


@kind("linear")
class _Linear(nn.Module):
    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, size + 1, bias=flag)
        self.down = nn.Linear(size + 1, width, bias=not flag)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


@kind("conv")
class _Conv(nn.Module):
    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        kernel = 2 * (size % 2) + 1
        self.conv = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width if flag else 1)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return F.gelu(self.conv(x.transpose(1, 2))).transpose(1, 2)


@kind("norm")
class _Norm(nn.Module):
    """Layer norm, RMS norm or group norm."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.variant = size % 3
        makers: list[Callable[[], nn.Module]] = [
            lambda: nn.LayerNorm(width, bias=flag),
            lambda: nn.RMSNorm(width, eps=1e-5),
            lambda: nn.GroupNorm(1, width, affine=flag),
        ]
        self.norm = makers[self.variant]()

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2) if self.variant == 2 else self.norm(x)


@kind("batch_norm")
class _BatchNorm(nn.Module):
    """Writes its buffers. FSDP2 cannot do it in bfloat16 on a CPU: the generator has it in float32 only."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, momentum=0.3 if flag else 0.1)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


@kind("embedding")
class _Embedding(nn.Module):
    """Rows of a table by tokens: as an embedding, by indexing, by gather, by index_select."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.variant = size % 4
        self.table = nn.Embedding(VOCAB, width, padding_idx=0 if flag and self.variant == 0 else None)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        weight, width = self.table.weight, x.shape[-1]
        if self.variant == 0:
            return x + self.table(tokens)
        if self.variant == 1:
            return x * weight[tokens]
        if self.variant == 2:
            index = tokens.reshape(-1, 1).expand(-1, width)
            return x + weight.gather(0, index).view(*tokens.shape, width)
        return x + weight.index_select(0, tokens.flatten()).unflatten(0, tokens.shape)


@kind("einsum")
class _Einsum(nn.Module):
    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, size + 1, width) / width)
        self.flag = flag

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        if self.flag:
            return torch.einsum("blw,whv,blv->blw", x, self.weight, x.sin())
        return torch.einsum("blw,whv->blhv", x, self.weight).sum(2)


@kind("put")
class _Put(nn.Module):
    """Values written into others by index: index_put, index_add, scatter_add, a slice."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.variant = size % 4
        self.flag = flag
        self.weight = nn.Parameter(torch.randn(VOCAB, width))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        index = tokens.flatten()
        if self.variant == 0:
            table = self.weight.index_put((index,), rows, accumulate=True)
        elif self.variant == 1:
            table = self.weight.index_add(0, index, rows, alpha=0.5)
        elif self.variant == 2:
            table = self.weight.scatter_add(0, index.unsqueeze(1).expand_as(rows), rows)
        else:
            table = self.weight.clone()
            table[index % 3] = rows.mean(0)
        return (table.tanh() if self.flag else table)[tokens]


@kind("views")
class _Views(nn.Module):
    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.variant = size % 6
        self.flag = flag

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        if self.variant == 0:
            y = x.flip(-1)
        elif self.variant == 1:
            y = torch.cat([x[..., 1:], x[..., :1]], -1)
        elif self.variant == 2:
            y = torch.roll(x, 1, 1)
        elif self.variant == 3:
            y = x.transpose(0, 1).reshape(x.shape[1], -1).reshape(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1)
        elif self.variant == 4:
            y = torch.stack([part.squeeze(-1) for part in x.split(1, -1)], -1)
        else:
            y = x.mean(1, keepdim=True).expand_as(x)
        return y.contiguous() if self.flag else y


@kind("weights")
class _Weights(nn.Module):
    """Views of parameters, and one parameter used several times."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.variant = size % 4
        self.flag = flag
        self.weight = nn.Parameter(torch.randn(width, 3 * width) / width)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        a, b, c = self.weight.chunk(3, 1)
        if self.variant == 0:
            y = x @ a + (x @ b).sin() @ c.t()
        elif self.variant == 1:
            y = x @ a + x.cos() @ a + x.sin() @ a.t()
        elif self.variant == 2:
            y = x * self.weight[0, : x.shape[-1]] + self.weight.t()[1]
        else:
            y = F.linear(x, self.weight.view(3, -1, x.shape[-1]).sum(0))
        return y + (self.weight.square().mean() if self.flag else 0)


@kind("in_place")
class _InPlace(nn.Module):
    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.variant = size % 5
        self.flag = flag

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        y = x * 1.5 if self.flag else x.clone()
        if self.variant == 0:
            y.mul_(x.cos())
        elif self.variant == 1:
            y[:, 0] += x[:, -1]
        elif self.variant == 2:
            y.masked_fill_(tokens.unsqueeze(-1) > VOCAB // 2, 0.25)
        elif self.variant == 3:
            y.select(-1, 0).copy_(x.sum(-1))
        else:
            y.view(-1).add_(1).clamp_(-1, 2)
        return y


@kind("attention")
class _Attention(nn.Module):
    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=flag)
        self.causal = flag
        self.by_hand = size % 2 == 1

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        if not self.by_hand:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).squeeze(1)
        scores = q @ k.transpose(-1, -2)
        if self.causal:
            scores = scores + torch.full(scores.shape[-2:], -1e4, dtype=scores.dtype).triu(1)
        return (scores.softmax(-1) @ v).squeeze(1)


@kind("multihead")
class _Multihead(nn.Module):
    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, dropout=0.1 * (size % 2), batch_first=True)
        self.flag = flag

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.flag)[0]


@kind("encoder")
class _Encoder(nn.Module):
    """With norm_first, dropout sees values that are not contiguous."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            width, 1, size + 1, dropout=0.1 * (size % 3), norm_first=flag, batch_first=size % 2 == 0
        )

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.layer(x)


@kind("dropout")
class _Dropout(nn.Module):
    """Random numbers: dropout of contiguous and other values, of channels, noise."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.variant = size % 5
        self.dropout = nn.Dropout(0.25 if flag else 0.5)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        if self.variant == 0:
            return self.dropout(x)
        if self.variant == 1:
            return self.dropout(x.transpose(1, 2)).transpose(1, 2)
        if self.variant == 2:
            return F.dropout1d(x, 0.5, self.training)
        if self.variant == 3:
            return x + 0.1 * torch.randn_like(x) + torch.rand(x.shape[-1], dtype=x.dtype)
        return self.dropout(x[..., :1]) + x.expand(2, *x.shape)[1]


@kind("buffer")
class _Buffer(nn.Module):
    """Buffers that forward reads and writes."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.variant = size % 4
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
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class _Saving(torch.autograd.Function):
    """Saves what it needs; has two inputs and two outputs."""

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
class _Function(nn.Module):
    """Custom autograd functions, on values or parameters."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.variant = size % 3
        self.weight = nn.Parameter(torch.randn(width)) if flag else None

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        factor = x if self.weight is None else self.weight.expand_as(x)
        if self.variant == 0:
            return _Steeper.apply(factor, 3.0) * x
        if self.variant == 1:
            a, b = _Saving.apply(x, factor)
            return a - b
        return _Rounding.apply(x) + _Rounding.apply(factor)


@kind("tensor_hook")
class _TensorHook(nn.Module):
    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.variant = size % 3
        self.flag = flag

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
    """Forward hooks of a module that is no unit, which change what goes in or comes out."""

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
    """Reads numbers of its own, which a training loop may change between steps."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = 1.0 + size
        self.activation = torch.tanh if flag else F.relu

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.activation(self.linear(x)) * self.scale


@kind("detached")
class _Detached(nn.Module):
    """Parts without gradient: detach, no_grad, a branch on grad mode, and inference of a teacher."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.variant = size % 3
        self.linear = nn.Linear(width, width)
        self.flag = flag

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
class _Penalty(nn.Module):
    """A gradient of its own as a part of the value."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.flag = flag

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.linear(x)
        inside = x if x.requires_grad else x.detach().requires_grad_()
        y = self.linear(inside).tanh()
        (grad,) = torch.autograd.grad(y.sum(), inside, create_graph=True)
        return y + (grad.square() if self.flag else grad)


@kind("linalg")
class _Linalg(nn.Module):
    """Never in bfloat16, for which LAPACK has no functions."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.variant = size % 3
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        matrix = self.weight @ self.weight.t() + torch.eye(x.shape[-1], dtype=x.dtype)
        if self.variant == 0:
            return x @ torch.linalg.inv(matrix)
        if self.variant == 1:
            return torch.linalg.solve(matrix, x.transpose(1, 2)).transpose(1, 2)
        return x @ torch.linalg.cholesky(matrix)


@kind("checkpoint")
class _Checkpoint(nn.Module):
    """A region of a unit that is computed again."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.inner = _Linear(width, size, flag)
        self.reentrant = size % 3 == REENTRANT
        self.variant = size % 3

    def _run(self, x: Tensor, tokens: Tensor) -> Tensor:
        y = self.inner(x, tokens)
        return F.dropout(y, 0.3, self.training) if self.variant == 1 else y + x.sin()

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        if self.reentrant and not x.requires_grad:
            return self._run(x, tokens)
        return checkpoint(self._run, x, tokens, use_reentrant=self.reentrant)


@kind("reduction")
class _Reduction(nn.Module):
    """Reductions and choices among values: ties and order matter to their gradients."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.variant = size % 6
        self.flag = flag

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        if self.variant == 0:
            y = x.cumsum(1) / x.shape[1]
        elif self.variant == 1:
            y = x - x.logsumexp(-1, keepdim=True)
        elif self.variant == 2:
            y = x.sort(dim=1).values
        elif self.variant == 3:
            y = torch.where(tokens.unsqueeze(-1) % 2 == 0, x, x.square())
        elif self.variant == 4:
            y = x - x.amax(1, keepdim=True) + x.max(dim=-1, keepdim=True).values
        else:
            y = x.var(1, keepdim=True) * x
        return y.clamp(-1, 1) if self.flag else y


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
class _Unused(nn.Module):
    """Holds parameters that nothing uses, or only where a gradient is not wanted."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.randn(size + 1, width))
        self.cut = nn.Linear(width, width)
        self.flag = flag

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + self.cut(x).detach() if self.flag else x
