"""Train a small mixture of experts on Python's reference manual, with the experts distributed over the ranks.

    torchrun --standalone --nproc-per-node 2 examples/train_moe.py

Each rank of the axis `ep` has some experts of every layer, and tokens are sent to the ranks of their experts; the
counts depend on the data. A rank computes its experts in one grouped matrix product. Experts are sharded over the axis
`dp`, all other parameters over both axes. `--impl fsdp2` trains with FSDP2; the two differ only in `shard`. Runs on CPU
processes (gloo) or GPUs (NCCL).
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from train_gpt import batch, text_of_python
from train_llama import mean_over_ranks, say, start_distributed, write_json

import graphshard


@dataclass(frozen=True)
class MoeConfig:
    """Sizes of a model; each token goes to `chosen` of the experts."""

    vocab: int
    context: int = 64
    layers: int = 2
    heads: int = 4
    dim: int = 64
    hidden: int = 128
    experts: int = 8
    chosen: int = 2


class Experts(nn.Module):
    """Feed-forward layers; after `deal_out`, this rank has some of them."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.num, self.axis = config.experts, None
        self.up = nn.Parameter(torch.randn(config.experts, config.dim, config.hidden) * config.dim**-0.5)
        self.down = nn.Parameter(torch.randn(config.experts, config.hidden, config.dim) * config.hidden**-0.5)

    def deal_out(self, axis: DeviceMesh) -> None:
        """Give each rank of an axis some of the experts."""
        self.axis = axis
        for name, weight in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(distribute_tensor(weight.detach(), axis, [Shard(0)], src_data_rank=None)))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply the experts to rows [tokens, dim], sorted by expert; `counts` [experts] has the rows of each."""
        if self.axis is None:
            return self._products(rows, counts)
        group, ranks = self.axis.get_group(), self.axis.size()
        own = self.num // ranks
        arriving = wait_tensor(all_to_all_single(counts, None, None, group)).view(ranks, own)
        sent, taken = counts.view(ranks, own).sum(1).tolist(), arriving.sum(1).tolist()
        got = all_to_all_single_autograd(rows, taken, sent, group)
        # Rows arrive sorted by rank and then by expert; the product takes them by expert.
        expert = torch.arange(own, device=rows.device).repeat(ranks)
        order = expert.repeat_interleave(arriving.flatten(), output_size=sum(taken)).argsort(stable=True)
        made = self._products(got[order], arriving.sum(0))
        return all_to_all_single_autograd(made[order.argsort()], sent, taken, group)

    def _products(self, rows: Tensor, counts: Tensor) -> Tensor:
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        ends = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(F.silu(F.grouped_mm(rows, up, offs=ends)), down, offs=ends)


class Block(nn.Module):
    """Attention, then a shared feed-forward layer and the chosen experts, added to the input."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.heads, self.num, self.chosen = config.heads, config.experts, config.chosen
        self.norm1, self.norm2 = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.gate = nn.Linear(config.dim, config.experts, bias=False)
        self.shared = nn.Sequential(
            nn.Linear(config.dim, config.hidden), nn.SiLU(), nn.Linear(config.hidden, config.dim)
        )
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        rows = self.norm2(x).flatten(0, 1)
        weights, chosen = self.gate(rows).float().softmax(-1).topk(self.chosen)
        order = chosen.flatten().argsort(stable=True)
        counts = F.one_hot(chosen, self.num).sum((0, 1))
        made = self.experts(rows[order // self.chosen], counts)[order.argsort()].unflatten(0, (-1, self.chosen))
        return x + (self.shared(rows) + (made * weights.to(made.dtype).unsqueeze(-1)).sum(1)).view_as(x)


class Moe(nn.Module):
    """Language model of characters."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.characters = nn.Embedding(config.vocab, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of predicting `targets` from `tokens`, both [batch, context]."""
        x = self.characters(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def shard(model: Moe, mesh: DeviceMesh, args: argparse.Namespace) -> None:
    """Shard experts over `dp` and all other parameters over both axes, in bfloat16 with float32 sums.

    Experts see the tokens of all ranks: their gradients are sums over `ep`, divided by the number of all ranks.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if args.impl == "graphshard":
        units = ["blocks.*", "blocks.*.experts"]
        graphshard.compile(model, mesh, mp_policy=policy, units=units, backend=args.backend)
    else:
        everywhere = mesh["dp", "ep"]._flatten("dp_ep")
        for block in model.blocks:
            fully_shard(block.experts, mesh=mesh["dp"], mp_policy=policy)
            fully_shard(block, mesh=everywhere, mp_policy=policy)
        fully_shard(model, mesh=everywhere, mp_policy=policy)
    for block in model.blocks:
        block.experts.set_gradient_divide_factor(mesh.size())
        if mesh.device_type == "cpu" and mesh["dp"].size() > 1:
            block.experts.set_force_sum_reduction_for_comms(True)  # gloo cannot scale before it sums


def main() -> None:
    args = parse_args()
    device, world = start_distributed(), dist.get_world_size()
    expert_ranks = args.expert_ranks or world
    mesh = init_device_mesh(device.type, (world // expert_ranks, expert_ranks), mesh_dim_names=("dp", "ep"))

    manual = text_of_python()
    characters = {character: number for number, character in enumerate(sorted(set(manual)))}
    text = torch.tensor([characters[character] for character in manual])
    config = MoeConfig(len(characters), args.context, args.layers, dim=args.dim, hidden=2 * args.dim)
    torch.manual_seed(0)
    model = Moe(config).to(device)
    for block in model.blocks:
        block.experts.deal_out(mesh["ep"])
    shard(model, mesh, args)
    # With lists of tensors (foreach), torch takes tensors of one mesh only.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False)
    losses = []
    for step in range(args.steps):
        loss = model(*batch(text, step, args, device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
        if step % 10 == 0 or step == args.steps - 1:
            say(f"step {step:4d}   loss {losses[-1]:.4f}")
    if args.json is not None and dist.get_rank() == 0:
        write_json(args.json, {"losses": losses})
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small mixture of experts on the characters of Python's reference manual.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--impl", choices=["graphshard", "fsdp2"], default="graphshard")
    add("--backend", choices=["inductor", "eager"], default="inductor", help="backend of graphshard")
    add("--steps", type=int, default=100)
    add("--batch", type=int, default=8, help="sequences per rank and step")
    add("--context", type=int, default=64, help="characters per sequence")
    add("--layers", type=int, default=2)
    add("--dim", type=int, default=64)
    add("--lr", type=float, default=3e-3)
    add("--expert-ranks", type=int, metavar="N", help="number of ranks that share the experts (default: all)")
    add("--json", type=Path, metavar="FILE", help="write the losses")
    return parser.parse_args()


if __name__ == "__main__":
    main()
    os._exit(0)  # see train_llama.py
