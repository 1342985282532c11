"""PyTorch's FSDP2 example, with `fully_shard` or with `graphshard.compile`.

    torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py
    torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py --impl fsdp2

It covers the features of FSDP2's example: a model created on the meta device and initialized as shards, mixed
precision, manual prefetch, checkpoints of the whole state in one file, and resuming from the newest one. The model
reverses a sequence of numbers. Runs on CPU processes (gloo) or GPUs (NCCL).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from train_llama import as_float, mean_over_ranks, say, start_distributed, write_json

import graphshard

NUMBERS, LENGTH = 32, 16
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Layer(nn.Module):
    """Attention to all positions, and a feed-forward layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.attention_norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.feed_forward(x)


class Transformer(nn.Module):
    """Transformer that returns logits for every position, of shape (batch, length, numbers)."""

    def __init__(self, layers: int, dim: int, heads: int) -> None:
        super().__init__()
        self.numbers = nn.Embedding(NUMBERS, dim)
        self.places = nn.Embedding(LENGTH, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, NUMBERS, bias=False)

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Embedding, nn.Linear, nn.LayerNorm)):
                module.reset_parameters()

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.numbers(numbers) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main() -> None:
    args = parse_args()
    device = start_distributed()
    with torch.device("meta"):
        model = Transformer(args.layers, args.dim, heads=4)
    shard(model, args)
    model.to_empty(device=device)
    torch.manual_seed(0)
    model.reset_parameters()
    if args.prefetch:
        prefetch_by_hand(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    first = load(model, optimizer, args.checkpoint)
    losses, norms = [], []
    for step in range(first, first + args.steps):
        numbers = batch(step, args, device)
        if args.prefetch:
            model.unshard()  # while the batch is being copied
        loss = F.cross_entropy(model(numbers).float().flatten(0, 1), numbers.flip(1).flatten())
        loss.backward()
        norms.append(as_float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
        say(f"step {step + 1:4}  loss {losses[-1]:.4f}")
    save(model, optimizer, first + args.steps, args.checkpoint)
    if args.json and dist.get_rank() == 0:
        write_json(args.json, {"first": first, "losses": losses, "norms": norms})
    dist.destroy_process_group()


def shard(model: Transformer, args: argparse.Namespace) -> nn.Module:
    """Shard the model over all ranks, in place."""
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if args.mixed_precision:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if args.impl == "graphshard":
        return graphshard.compile(model, mesh, mp_policy=policy, backend=args.backend)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def prefetch_by_hand(model: Transformer) -> None:
    """Prefetch the next two layers in every layer: the following ones in forward, the preceding ones in backward."""
    layers = list(model.layers)
    assert all(isinstance(layer, FSDPModule) for layer in layers)
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 3])
        layer.set_modules_to_backward_prefetch(layers[max(0, index - 2) : index][::-1])


def batch(step: int, args: argparse.Namespace, device: torch.device) -> Tensor:
    """Return this rank's numbers, of shape (batch, length)."""
    generator = torch.Generator().manual_seed(step)
    numbers = torch.randint(NUMBERS, (dist.get_world_size(), args.batch, LENGTH), generator=generator)
    return numbers[dist.get_rank()].to(device)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, folder: Path | None) -> None:
    """Write everything to one file on rank 0, which plain PyTorch can read."""
    if folder is None:
        return
    weights, state = get_state_dict(model, optimizer, options=WHOLE)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"model": weights, "optimizer": state, "step": step}, folder / f"{step:08}.pt")


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path | None) -> int:
    """Load every rank's shards from the newest file, and return its step."""
    found = sorted(folder.glob("*.pt")) if folder else []
    if not found:
        return 0
    content = torch.load(found[-1], mmap=True, weights_only=True, map_location="cpu")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )
    return int(content["step"])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small transformer with fully_shard or with graphshard.compile.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--impl", choices=["graphshard", "fsdp2"], default="graphshard")
    add("--backend", choices=["inductor", "eager"], default="inductor", help="backend of graphshard")
    add("--prefetch", action="store_true", help="prefetch manually")
    add("--mixed-precision", action="store_true", help="compute in bfloat16, reduce gradients in float32")
    add(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="resume from the newest file in this folder, and write one at the end",
    )
    add("--steps", type=int, default=100)
    add("--layers", type=int, default=4)
    add("--dim", type=int, default=64)
    add("--batch", type=int, default=32, help="sequences per rank")
    add("--lr", type=float, default=3e-3)
    add("--json", type=Path, metavar="FILE", help="write the losses")
    return parser.parse_args()


if __name__ == "__main__":
    main()
    os._exit(0)  # see train_llama.py
