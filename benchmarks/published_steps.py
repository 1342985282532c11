"""Published training steps with their sources, and their models on the meta device."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import llama

Checkpointing = Literal["none", "op", "not mlp", "full", "whole"]
Backend = Literal["eager", "compiled", "xla"]


@dataclass(frozen=True)
class Row:
    """One published step.

    Attributes:
        source: group of the row.
        model: of `MODELS`.
        ranks: GPUs, all of them shards.
        batch, seq: of one rank's microbatch.
        microbatches: that an optimizer step accumulates.
        checkpointing: "op" saves every second product and attention, as torchtitan does; "not mlp" all products except
            those in the feed-forward layers, as MaxText's `save_dot_except_mlp`; "full" only blocks' inputs; "whole"
            also recomputes the last product of a block, which has no reader, as torch before 2.1.
        backend: what ran the operators.
        machine: a profile, and the name of its network.
        seconds: of an optimizer step.
        ranks_per_node: if it differs from the profile.
        attention: the kernel, one with a speed in the profiles.
    """

    source: str
    model: str
    ranks: int
    batch: int
    seq: int
    microbatches: int
    checkpointing: Checkpointing
    backend: Backend
    machine: str
    seconds: float
    ranks_per_node: int = 8
    attention: str = "flash"

    @property
    def setup(self) -> tuple[object, ...]:
        """Return the setup shared by variants: model, tokens and machine, without ranks, checkpointing and backend."""
        return self.source, self.model, self.batch, self.seq, self.microbatches, self.machine

    def __str__(self) -> str:
        """Return a short name for the table."""
        times = f" x {self.microbatches}" if self.microbatches > 1 else ""
        what = f"{self.model}, {self.ranks} x {self.machine}, {self.batch} x {self.seq}{times}"
        return f"{what}, {self.checkpointing}, {self.backend}"


def _per_second(tokens_per_second: float, batch: int, seq: int, microbatches: int = 1) -> float:
    """Return the seconds of a step, from the tokens per second of one GPU."""
    return batch * seq * microbatches / tokens_per_second


# torchtitan docs/performance.md of 2024, at 0413364: tokens/s of a GPU, on 64 A100 80 GB.
_TITAN_A100 = "torchtitan A100"
# torchtitan benchmarks/llama3_h100_202412_torchtitan.md: H100 with HBM2e of 2.4 TB/s, at 500 W, 400 Gb/s for each GPU.
_TITAN_H100 = "torchtitan H100"
# NGC's recipe 25.01.1 for MaxText, table of its page.
_MAXTEXT = "MaxText"
# KempnerForge benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md: nodes of 4 H200.
_KEMPNER = "KempnerForge"
# llm-foundry scripts/train/benchmarking/README.md at 061f2c7: FSDP1, amp_bf16; tokens over tokens/s. The software is
# inferred: attention was Triton's or FlashAttention 1 (`attn_impl` of submit_benchmarks.py and sweep.py there), except
# for 7B on 128 (`attn_impl flash` of sweep.py, with flash-attn 2). torch was older than 2.1, which ends recomputation
# after the last reader, except for 128.
_MPT_A100, _MPT_H100 = "llm-foundry A100", "llm-foundry H100"

ROWS = (
    Row(_TITAN_A100, "llama3-8b", 64, 1, 8192, 1, "op", "eager", "a100", _per_second(2973, 1, 8192)),
    Row(_TITAN_A100, "llama3-70b", 64, 1, 8192, 1, "full", "eager", "a100", _per_second(331, 1, 8192)),
    Row(_TITAN_A100, "llama2-13b", 64, 2, 4096, 1, "none", "eager", "a100", _per_second(2162, 2, 4096)),
    Row(_TITAN_A100, "llama2-13b", 64, 2, 4096, 1, "op", "eager", "a100", _per_second(1904, 2, 4096)),
    Row(_TITAN_A100, "llama2-70b", 64, 1, 4096, 1, "op", "eager", "a100", _per_second(355, 1, 4096)),
    Row(_TITAN_A100, "llama2-70b", 64, 2, 4096, 1, "full", "eager", "a100", _per_second(353, 2, 4096)),
    Row(_TITAN_H100, "llama3-8b", 8, 2, 8192, 1, "op", "eager", "h100-hbm2e", _per_second(5762, 2, 8192)),
    Row(_TITAN_H100, "llama3-8b", 8, 2, 8192, 1, "op", "compiled", "h100-hbm2e", _per_second(6667, 2, 8192)),
    Row(_TITAN_H100, "llama3-8b", 128, 2, 8192, 1, "op", "eager", "h100-hbm2e", _per_second(5605, 2, 8192)),
    Row(_TITAN_H100, "llama3-8b", 128, 2, 8192, 1, "op", "compiled", "h100-hbm2e", _per_second(6514, 2, 8192)),
    Row(_MAXTEXT, "llama2-70b", 256, 2, 4096, 1, "not mlp", "xla", "h100", 7.153, attention="cudnn"),
    Row(_MAXTEXT, "llama3-70b", 128, 2, 8192, 1, "full", "xla", "h100", 15.570, attention="cudnn"),
    Row(_KEMPNER, "llama3-8b", 1, 4, 4096, 2, "full", "compiled", "h200", 3.129, 4),
    Row(_KEMPNER, "llama3-8b", 2, 4, 4096, 2, "full", "compiled", "h200", _per_second(18728 / 2, 4, 4096, 2), 4),
    Row(_KEMPNER, "llama3-8b", 4, 4, 4096, 2, "full", "compiled", "h200", 3.362, 4),
    Row(_KEMPNER, "llama3-14.8b", 8, 4, 4096, 4, "full", "eager", "h200", _per_second(35405 / 8, 4, 4096, 4), 4),
    Row(_MPT_A100, "mpt-1b", 8, 14, 2048, 4, "none", "eager", "a100", 917504 / 164109, attention="flash1"),
    Row(_MPT_A100, "mpt-3b", 8, 10, 2048, 2, "none", "eager", "a100", 327680 / 86491, attention="flash1"),
    Row(_MPT_A100, "mpt-7b", 8, 6, 2048, 2, "none", "eager", "a100", 5.295, attention="flash1"),
    Row(_MPT_A100, "mpt-7b", 8, 16, 4096, 2, "whole", "eager", "a100", 1048576 / 29472, attention="flash1"),
    Row(_MPT_A100, "mpt-13b", 8, 2, 2048, 3, "none", "eager", "a100", 5.432, attention="flash1"),
    Row(_MPT_A100, "mpt-30b", 8, 3, 2048, 21, "whole", "eager", "a100", 1032192 / 7330, attention="flash1"),
    Row(_MPT_H100, "mpt-1b", 8, 14, 2048, 1, "none", "eager", "h100", 0.631, attention="flash1"),
    Row(_MPT_H100, "mpt-1b", 16, 20, 2048, 1, "none", "eager", "h100", 655360 / 736596, attention="flash1"),
    Row(_MPT_H100, "mpt-1b", 64, 20, 2048, 1, "none", "eager", "h100", 2621440 / 2841754, attention="flash1"),
    Row(_MPT_H100, "mpt-3b", 16, 10, 2048, 3, "none", "eager", "h100", 983040 / 386285, attention="flash1"),
    Row(_MPT_H100, "mpt-3b", 64, 6, 2048, 3, "none", "eager", "h100", 2359296 / 1441663, attention="flash1"),
    Row(_MPT_H100, "mpt-7b", 8, 6, 2048, 1, "none", "eager", "h100", 1.155, attention="flash1"),
    Row(_MPT_H100, "mpt-7b", 128, 6, 2048, 1, "none", "eager", "h100", 1.173),
    Row(_MPT_H100, "mpt-7b", 8, 8, 8192, 2, "whole", "eager", "h100", 18.900, attention="flash1"),
    Row(_MPT_H100, "mpt-13b", 8, 2, 2048, 1, "none", "eager", "h100", 32768 / 38336, attention="flash1"),
    Row(_MPT_H100, "mpt-13b", 64, 2, 2048, 1, "none", "eager", "h100", 262144 / 307209, attention="flash1"),
    Row(_MPT_H100, "mpt-30b", 32, 14, 2048, 3, "whole", "eager", "h100", 2752512 / 73860, attention="flash1"),
    Row(_MPT_H100, "mpt-30b", 128, 8, 2048, 1, "full", "eager", "h100", 7.451, attention="flash1"),
    Row(_MPT_H100, "mpt-70b", 64, 8, 2048, 4, "whole", "eager", "h100", 4194304 / 66523, attention="flash1"),
)


class ComplexAttention(llama.Attention):
    """Attention that rotates pairs as complex numbers, as torchtitan does: fewer kernels in eager mode."""

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate values of shape (batch, heads, seq, head_dim)."""
        turns = torch.complex(self.cos, self.sin)
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class MptBlock(nn.Module):
    """Block of MPT: layer norms, one product for query, key and value, a GELU of four widths; biases everywhere.

    Args:
        unpads: it passes attention a list of the tokens that are not padding, as for FlashAttention's kernels of
            sequences of different lengths (`flash_attn_fn` in llmfoundry/models/layers/attention.py at 5e85bd6), though
            there is no padding: query, key and value are copied row by row, and the result is put into zeros.
    """

    def __init__(self, dim: int, heads: int, *, unpads: bool) -> None:
        super().__init__()
        self.heads, self.unpads = heads, unpads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        if self.unpads:
            rows = torch.arange(x.shape[0] * x.shape[1], device=x.device)
            parts = [part.flatten(0, 1).index_select(0, rows).view_as(x) for part in parts]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        if self.unpads:
            attended = torch.zeros_like(x).flatten(0, 1).index_copy(0, rows, attended.flatten(0, 1)).view_as(x)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Mpt(nn.Module):
    """MPT with learned positions; the token table is also the head."""

    def __init__(self, layers: int, dim: int, heads: int, seq: int, *, unpads: bool, vocab: int = 50368) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab, dim), nn.Embedding(seq, dim)
        self.layers = nn.ModuleList(MptBlock(dim, heads, unpads=unpads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


_LLAMA3 = {"kv_heads": 8, "vocab": 128256}
LLAMAS = {
    "llama3-8b": {"layers": 32, "dim": 4096, "heads": 32, "hidden": 14336, **_LLAMA3},
    "llama3-14.8b": {"layers": 40, "dim": 5120, "heads": 40, "hidden": 17920, **_LLAMA3},
    "llama3-70b": {"layers": 80, "dim": 8192, "heads": 64, "hidden": 28672, **_LLAMA3},
    "llama2-13b": {"layers": 40, "dim": 5120, "heads": 40, "hidden": 13824, "vocab": 32000},
    "llama2-70b": {"layers": 80, "dim": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672, "vocab": 32000},
}
# Layers, width and heads.
MPTS = {
    "mpt-1b": (24, 2048, 16),
    "mpt-3b": (32, 2560, 20),
    "mpt-7b": (32, 4096, 32),
    "mpt-13b": (40, 5120, 40),
    "mpt-30b": (48, 7168, 56),
    "mpt-70b": (80, 8192, 64),
}


def model_of(row: Row) -> nn.Module:
    """Return the model on the meta device."""
    with torch.device("meta"):
        if row.model in MPTS:
            return Mpt(*MPTS[row.model], row.seq, unpads=row.attention == "flash")
        model = llama.Llama(llama.LlamaConfig(seq=row.seq, **LLAMAS[row.model]))
    if row.source in (_TITAN_A100, _TITAN_H100):
        for module in model.modules():
            if isinstance(module, llama.Attention):
                module.__class__ = ComplexAttention
    return model
