"""Train on a changing number of ranks: nodes leave and join, and training resumes from the newest checkpoint.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 1:3 --nproc-per-node 1 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint localhost:29400 \
        examples/elastic.py --folder run

This starts one of up to three nodes; run the same command in other terminals, at any time, to start the others. When a
node is lost, the remaining ranks raise an error within seconds, and torchrun restarts them with the new number of
ranks. It does the same when a node joins. (Without the variable, a joining node waits for an address that torchrun of
torch 2.13 does not publish to it.) A step is the same on any number of ranks, except for the order of its sums: the
batch is split into microbatches, which the ranks share.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from llama import Llama, LlamaConfig
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from train_llama import load_corpus, mean_over_ranks, say, start_distributed

import graphshard

MICROBATCHES = 6  # per step; 1, 2, 3 or 6 ranks share them evenly


def main() -> None:
    args = parse_args()
    device = start_distributed()
    rank, size = dist.get_rank(), dist.get_world_size()
    if MICROBATCHES % size:
        raise SystemExit(f"{MICROBATCHES} microbatches cannot be shared evenly by {size} ranks")
    torch.manual_seed(0)
    with device:
        model = model_of(args)
    mesh = init_device_mesh(device.type, (size,))
    graphshard.compile(model, mesh, backend=args.backend, artifact=args.artifact)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    corpus = load_corpus()
    begin = resume(model, optim, args.folder)
    for step in range(begin, args.steps):
        mine = range(rank, MICROBATCHES, size)
        loss = torch.zeros((), device=device)
        for index in mine:
            # Gradients accumulate on each rank and are reduced once.
            model.set_requires_gradient_sync(index == mine[-1])
            part = model(*microbatch(corpus, step, index, args, device)) / len(mine)
            part.backward()
            loss += part.detach()
        optim.step()
        optim.zero_grad()
        report(step + 1, mean_over_ranks(loss), args.folder)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            path = args.folder / f"step-{step + 1}"
            graphshard.checkpoint.save_checkpoint(path, model, optim, extra={"step": step + 1}, keep=3)
    dist.destroy_process_group()


def model_of(args: argparse.Namespace) -> Llama:
    return Llama(LlamaConfig(layers=args.layers, dim=args.dim, heads=max(1, args.dim // 64), seq=args.seq))


def resume(model: torch.nn.Module, optim: torch.optim.Optimizer, folder: Path) -> int:
    """Load the newest complete checkpoint, written by any number of ranks, and return its step."""
    newest = graphshard.checkpoint.latest_checkpoint(folder)
    if newest is None:
        return 0
    extra, _ = graphshard.checkpoint.load_checkpoint(newest, model, optim)
    say(f"{dist.get_world_size()} ranks go on from {newest}")
    return int(extra["step"])


def microbatch(
    corpus: Tensor, step: int, index: int, args: argparse.Namespace, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, which depend only on step and number, not on the rank."""
    generator = torch.Generator().manual_seed(MICROBATCHES * step + index)
    starts = torch.randint(len(corpus) - args.seq, (args.batch,), generator=generator)
    windows = torch.stack([corpus[i : i + args.seq + 1] for i in starts.tolist()]).to(device, torch.int64)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def report(step: int, loss: float, folder: Path) -> None:
    """Print a step, and append it to `steps.jsonl`."""
    size = dist.get_world_size()
    say(f"step {step:4}  loss {loss:.4f}  on {size} ranks")
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "steps.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "loss": loss, "ranks": size}) + "\n")


def export(args: argparse.Namespace) -> None:
    """Write the file for `--artifact`: no process group, no GPU, and one file for every number of ranks."""
    with torch.device("meta"):
        model = model_of(args)
    tokens = torch.zeros(args.batch, args.seq, dtype=torch.int64)
    graphshard.export(
        model,
        [(size,) for size in (1, 2, 3, 6)],
        args.export,
        example_inputs=(tokens, tokens),
        backend=args.backend,
        accumulate=True,
        threads=1,  # per rank, as torchrun sets them
        device="cpu",
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small Llama on a changing number of ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--folder", type=Path, default=Path("run"), help="folder of checkpoints and steps.jsonl")
    add("--steps", type=int, default=200)
    add("--save-every", type=int, default=5, metavar="N", help="steps between checkpoints")
    add("--export", type=Path, metavar="FILE", help="write programs for 1, 2, 3 and 6 ranks, and exit")
    add("--artifact", type=Path, metavar="FILE", help="run these programs instead of compiling")
    add("--backend", choices=["inductor", "eager"], default="inductor")
    add("--layers", type=int, default=2)
    add("--dim", type=int, default=64)
    add("--batch", type=int, default=2, help="sequences per microbatch")
    add("--seq", type=int, default=32, help="bytes per sequence")
    args = parser.parse_args()
    if args.export:
        export(args)
        raise SystemExit(0)
    return args


if __name__ == "__main__":
    main()
    os._exit(0)  # see train_llama.py
