"""Train a small character-level GPT, modeled on nanoGPT, on Python's reference manual.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py

It shows the usual parts of such a script with graphshard: tied embeddings, dropout, weight decay for matrices only,
gradient accumulation, a warm-up, a validation loss, and a checkpoint in one file. `--impl fsdp2` trains with FSDP2; the
two differ only in `shard`. Runs on CPU processes (gloo) or GPUs (NCCL).
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_llama import as_float, mean_over_ranks, say, start_distributed, write_json

import graphshard


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a model."""

    vocab: int
    context: int = 64
    layers: int = 4
    heads: int = 4
    dim: int = 128
    dropout: float = 0.1


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.norm1 = nn.LayerNorm(config.dim, bias=False)
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.norm2 = nn.LayerNorm(config.dim, bias=False)
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.down = nn.Linear(4 * config.dim, config.dim, bias=False)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Language model of characters, whose embedding is also the head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.characters = nn.Embedding(config.vocab, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim, bias=False)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * config.layers) if residual else 0.02)
        self.head.weight = self.characters.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of `targets`, both of shape (batch, length)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.characters(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def main() -> None:
    args = parse_args()
    device = start_distributed()
    torch.manual_seed(0)
    text = text_of_python()
    letters = sorted(set(text))
    numbers = torch.tensor([letters.index(letter) for letter in text])
    split = len(numbers) * 9 // 10
    with device:
        model = GPT(GPTConfig(len(letters), layers=args.layers, dim=args.dim))
    model = shard(model, args)
    optimizer = optimizer_of(model)
    torch.manual_seed(1 + dist.get_rank())  # dropout differs between ranks
    losses: dict[str, list[float]] = {"train": [], "validation": [], "norm": []}
    for step in range(args.steps):
        if step % args.evaluate_every == 0:
            losses["validation"].append(evaluate(model, numbers[split:], args, device))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 10)
        total = torch.zeros((), device=device)
        for index in range(args.accumulate):
            model.set_requires_gradient_sync(index == args.accumulate - 1)
            loss = model(*batch(numbers[:split], step * args.accumulate + index, args, device)) / args.accumulate
            loss.backward()
            total += loss.detach()
        losses["norm"].append(as_float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses["train"].append(mean_over_ranks(total))
        say(f"step {step + 1:4}  loss {losses['train'][-1]:.4f}  validation {losses['validation'][-1]:.4f}")
    if args.save:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)  # whole on rank 0, empty on the others
        if dist.get_rank() == 0:
            torch.save(weights, args.save)
    if args.json and dist.get_rank() == 0:
        write_json(args.json, losses)
    dist.destroy_process_group()


def shard(model: GPT, args: argparse.Namespace) -> nn.Module:
    """Shard the model over all ranks, in place."""
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
    if args.impl == "graphshard":
        return graphshard.compile(model, mesh, backend=args.backend)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices and without it for norms."""
    matrices = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99))


@torch.no_grad()
def evaluate(model: nn.Module, numbers: Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """Return the mean loss of four validation batches."""
    model.eval()
    total = torch.zeros((), device=device)
    for index in range(4):
        total += model(*batch(numbers, index, args, device)) / 4
    model.train()
    model.reshard()  # FSDP2 keeps the root gathered after a forward without backward
    return mean_over_ranks(total)


def batch(numbers: Tensor, index: int, args: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return this rank's part of batch `index`: tokens and next tokens."""
    generator = torch.Generator().manual_seed(index)
    starts = torch.randint(len(numbers) - args.context, (dist.get_world_size(), args.batch), generator=generator)
    windows = torch.stack([numbers[i : i + args.context + 1] for i in starts[dist.get_rank()].tolist()]).to(device)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def text_of_python() -> str:
    """Return `help()`'s text about the language, which every Python installation has."""
    return "\n".join(topics[name] for name in sorted(topics))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on the characters of Python's reference manual.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--impl", choices=["graphshard", "fsdp2"], default="graphshard")
    add("--backend", choices=["inductor", "eager"], default="inductor", help="backend of graphshard")
    add("--steps", type=int, default=200)
    add("--accumulate", type=int, default=2, help="microbatches per step")
    add("--batch", type=int, default=8, help="sequences per rank and microbatch")
    add("--context", type=int, default=64, help="characters per sequence, at most 64")
    add("--evaluate-every", type=int, default=50, metavar="N", help="steps between validations")
    add("--layers", type=int, default=4)
    add("--dim", type=int, default=128)
    add("--lr", type=float, default=1e-3)
    add("--save", type=Path, metavar="FILE", help="write the weights as one file, for plain PyTorch")
    add("--json", type=Path, metavar="FILE", help="write the losses")
    return parser.parse_args()


if __name__ == "__main__":
    main()
    os._exit(0)  # see train_llama.py
