"""Compile once in one process, train on two ranks that load the file, and compare with two ranks that compile.

    python examples/export_and_load.py

needs no GPU and no download. The first process has no process group and no weights: it could be a laptop that exports
for a cluster. Every rank loads the same file, and plans and compiles nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from llama import Llama, LlamaConfig
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import graphshard

RANKS = 2


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(args.out or Path(directory) / "llama.gshard")
        start = time.perf_counter()
        with torch.device("meta"):
            model = Llama(config_of(args))
        graphshard.export(
            model,
            [(1,), (RANKS,), (4,)],  # one file for several meshes
            path,
            example_inputs=batch(args, 0, 0),
            backend=args.backend,
            threads=1,  # per rank
            device="cpu",
        )
        print(f"exported {path.name}, {path.stat().st_size / 1e6:.1f} MB, in {time.perf_counter() - start:.1f} s")
        loaded = run("load", path, args)
        compiled = run("compile", path, args)
    print(f"losses are equal: {loaded['losses'] == compiled['losses']}")
    saved = compiled["seconds"] - loaded["seconds"]
    print(f"the first step is there {saved:.1f} s earlier, {compiled['seconds'] / loaded['seconds']:.0f} times as fast")


def run(how: str, path: Path, args: argparse.Namespace) -> dict[str, object]:
    """Start the ranks, and return the result of rank 0."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.pt"
        # Inductor's cache would make the comparison unfair.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory
        store = Path(directory) / "store"
        mp.spawn(train, args=(how, path, args, store, result), nprocs=RANKS)
        found = torch.load(result)
    print(f"{how}: {found['seconds']:.1f} s to the end of the first step, losses {found['losses']}")
    return found


def train(rank: int, how: str, path: Path, args: argparse.Namespace, store: Path, result: Path) -> None:
    """Load or compile on one rank, and run a few steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    model = Llama(config_of(args))
    start = time.perf_counter()
    if how == "load":
        graphshard.load(path, model, mesh)
    else:
        graphshard.compile(model, mesh, backend=args.backend)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, seconds = [], 0.0
    for step in range(args.steps):
        loss = model(*batch(args, step, rank))
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(round(loss.item(), 6))
        seconds = seconds or time.perf_counter() - start
    if rank == 0:
        torch.save({"losses": losses, "seconds": seconds}, result)
    dist.barrier()
    dist.destroy_process_group()
    # A gloo thread frees the tensors of the last collective and needs Python for it; if Python is shutting down by
    # then, the process aborts. So exit without shutting Python down.
    os._exit(0)


def config_of(args: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(layers=args.layers, dim=args.dim, heads=max(1, args.dim // 32), seq=args.seq)


def batch(args: argparse.Namespace, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the tokens and targets of a rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 256, (args.batch, args.seq + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Export a small Llama, load it on two ranks, and compare with compiling there.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", metavar="FILE", help="path of the exported file")
    add("--backend", choices=["inductor", "eager"], default="inductor", help="backend of graphshard")
    add("--layers", type=int, default=2)
    add("--dim", type=int, default=64)
    add("--batch", type=int, default=2, help="sequences per rank and step")
    add("--seq", type=int, default=32, help="bytes per sequence")
    add("--steps", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
