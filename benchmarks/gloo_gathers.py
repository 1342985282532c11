"""How often overlapping all-gathers kill a pair of gloo ranks: torch's functional ones, and those graphshard launches.

    python benchmarks/gloo_gathers.py [--runs 10] [--rounds 1500]

Each run is two fresh processes; a dead one (SIGSEGV, or SIGABRT with "malloc(): unaligned tcache chunk") counts.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist

from graphshard.ir.graph import c10d
from graphshard.runtime.gloo import all_gather

SIZES = (256, 512, 65536, 262144, 700000, 256, 1000)
LAUNCHES = {"torch, functional": c10d.all_gather_into_tensor.default, "graphshard": all_gather}


def run(rank: int, name: str, rounds: int, store: str) -> None:
    """One rank: gathers of all sizes under way at once, then all waits."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    for _ in range(rounds):
        gathered = []
        for size in SIZES:
            gathered.append(LAUNCHES[name](torch.full((2 * size,), float(rank)), 2, group))
            _ = [torch.empty(2) for _ in range(50)]  # small allocations, as a training step makes
        for tensor in gathered:
            c10d.wait_tensor(tensor)
    dist.destroy_process_group()


def main() -> None:
    """All runs, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=1500)
    args = parser.parse_args()
    dead = dict.fromkeys(LAUNCHES, 0)
    for _ in range(args.runs):
        for name in LAUNCHES:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    torch.multiprocessing.spawn(run, (name, args.rounds, f"{folder}/store"), 2)
                except torch.multiprocessing.ProcessExitedException:
                    dead[name] += 1
    for name, count in dead.items():
        print(f"{name:20} {count} of {args.runs} runs died")


if __name__ == "__main__":
    main()
