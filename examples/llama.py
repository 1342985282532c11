"""Llama-style language model in plain PyTorch: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

Only `_normal_` knows about parallelism: it draws the same numbers for a sharded parameter as for a full one. A block
takes and returns one tensor and keeps its rotary tables to itself, so a mixed precision policy casts nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a model. `kv_heads` below `heads` gives grouped-query attention; `seq` is the input limit."""

    layers: int = 4
    dim: int = 256
    heads: int = 4
    kv_heads: int | None = None
    hidden: int | None = None
    seq: int = 256
    vocab: int = 256
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim {self.dim} is not a multiple of 2 * heads, with heads {self.heads}")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.num_kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward layer: 8/3 of `dim`, as in Llama, rounded up to a multiple of 64."""
        return self.hidden or -(-8 * self.dim // (3 * 64)) * 64


class RMSNorm(nn.Module):
    """Scale to unit root mean square, computed in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        kv_dim = config.num_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        # Not persistent: init_weights recomputes the table, so checkpoints need not store it.
        self.register_buffer("cos", torch.empty(config.seq, config.head_dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(config.seq, config.head_dim // 2), persistent=False)

    def init_rotary(self) -> None:
        """Fill the rotary tables, which `to_empty` leaves without values."""
        config, device = self.config, self.cos.device
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        positions = torch.arange(config.seq, dtype=torch.float32, device=device)
        angles = torch.outer(positions, config.rope_theta**-exponents)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate `(batch, heads, seq, head_dim)` by position, in float32."""
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        heads = (-1, self.config.head_dim)
        q, k, v = (w(x).unflatten(-1, heads).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = self.rotate(q), self.rotate(k)
        grouped = self.config.num_kv_heads != self.config.heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Transformer layer, the unit of sharding."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Whole model. If created on the meta device, call `to_empty(...)` and `init_weights()`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Set every parameter and buffer from torch's global random state."""
        # Weights that write into the residual stream start smaller, so that depth does not change its variance.
        residual = (2 * self.config.layers) ** -0.5
        for name, module in self.named_modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, Attention):
                module.init_rotary()
            elif isinstance(module, nn.Embedding):
                # Close to 1: the first norm divides by it, and multiplies the gradient by the same factor.
                _normal_(module.weight, std=0.5)
            elif isinstance(module, nn.Linear):
                scale = residual if name.endswith(("wo", "down")) else 1.0
                _normal_(module.weight, std=0.02 * scale)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits for `tokens` of shape (batch, seq); with `targets`, the mean cross-entropy in float32."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _normal_(parameter: Tensor, std: float) -> None:
    """Fill with normal noise; a shard gets its part of the full parameter's values for the same seed."""
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device).normal_(std=std)
    if isinstance(parameter, DTensor):
        # Every rank draws the same numbers: no source rank, no communication.
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)
