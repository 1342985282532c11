"""Operators and layers of random programs; `random_pieces` has the stateful pieces and the shared base."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 11
KINDS: dict[str, type[nn.Module]] = {}


def kind(name: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a module under a name for `Piece.kind`."""

    def register(cls: type[nn.Module]) -> type[nn.Module]:
        KINDS[name] = cls
        return cls

    return register


class Varied(nn.Module):
    """A piece whose `size` selects one of its variants."""

    variants = 1

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.variant, self.flag = size % self.variants, flag


@kind("linear")
class Linear(nn.Module):
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
class _Norm(Varied):
    """Layer norm, RMS norm or group norm."""

    variants = 3

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__(width, size, flag)
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
    """Batch norm, which writes its buffers. In float32 only: FSDP2 cannot run it in bfloat16 on a CPU."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, momentum=0.3 if flag else 0.1)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


@kind("embedding")
class _Embedding(Varied):
    """Embedding lookup: as an embedding, by indexing, by gather, by index_select."""

    variants = 4

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__(width, size, flag)
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
class _Einsum(Varied):
    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__(width, size, flag)
        self.weight = nn.Parameter(torch.randn(width, size + 1, width) / width)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        if self.flag:
            return torch.einsum("blw,whv,blv->blw", x, self.weight, x.sin())
        return torch.einsum("blw,whv->blhv", x, self.weight).sum(2)


@kind("put")
class _Put(Varied):
    """Indexed writes: index_put, index_add, scatter_add, a slice."""

    variants = 4

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__(width, size, flag)
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
class _Views(Varied):
    variants = 6

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
class _Weights(Varied):
    """Views of parameters, and one parameter used several times."""

    variants = 4

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__(width, size, flag)
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
class _InPlace(Varied):
    variants = 5

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
class _Multihead(Varied):
    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__(width, size, flag)
        self.attention = nn.MultiheadAttention(width, 1, dropout=0.1 * (size % 2), batch_first=True)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.flag)[0]


@kind("encoder")
class _Encoder(nn.Module):
    """An encoder layer; with norm_first, dropout sees non-contiguous values."""

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            width, 1, size + 1, dropout=0.1 * (size % 3), norm_first=flag, batch_first=size % 2 == 0
        )

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.layer(x)


@kind("dropout")
class _Dropout(Varied):
    """Random numbers: dropout of contiguous and non-contiguous values, of channels, noise."""

    variants = 5

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__(width, size, flag)
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


@kind("linalg")
class _Linalg(Varied):
    """Linear algebra; never in bfloat16, which LAPACK lacks."""

    variants = 3

    def __init__(self, width: int, size: int, flag: bool) -> None:
        super().__init__(width, size, flag)
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        matrix = self.weight @ self.weight.t() + torch.eye(x.shape[-1], dtype=x.dtype)
        if self.variant == 0:
            return x @ torch.linalg.inv(matrix)
        if self.variant == 1:
            return torch.linalg.solve(matrix, x.transpose(1, 2)).transpose(1, 2)
        return x @ torch.linalg.cholesky(matrix)


@kind("reduction")
class _Reduction(Varied):
    """Reductions and selections: ties and order matter to their gradients."""

    variants = 6

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
