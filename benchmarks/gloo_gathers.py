"""Reproduce a heap corruption: several functional all-gathers in flight on gloo. Needs torch alone, for a bug report.

    python benchmarks/gloo_gathers.py [--runs 10] [--rounds 1500]

Each run is two new processes that repeatedly gather seven tensors at once. With the functional operator
(`_c10d_functional.all_gather_into_tensor`) some runs die of SIGSEGV, or of SIGABRT with "malloc(): unaligned tcache
chunk detected" and the like; with `torch.distributed.all_gather_into_tensor` on the same tensors, none does. graphshard
launches the latter on gloo (`graphshard/runtime/collective_launches.py`).
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

SIZES = (256, 512, 65536, 262144, 700000, 256, 1000)
WORLD_SIZE = 2
Wait = Callable[[], object]


def functional(shard: torch.Tensor) -> Wait:
    """Launch the functional operator."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    full = torch.ops._c10d_functional.all_gather_into_tensor(shard, WORLD_SIZE, group)
    return lambda: torch.ops._c10d_functional.wait_tensor(full)


def plain(shard: torch.Tensor) -> Wait:
    """Launch the collective that FSDP2 calls."""
    full = shard.new_empty(WORLD_SIZE * len(shard))
    work = dist.all_gather_into_tensor(full, shard, async_op=True)
    return lambda: (work.wait(), full)


LAUNCHES = {"_c10d_functional": functional, "torch.distributed": plain}


def run(rank: int, name: str, rounds: int, store: str) -> None:
    """Run one rank: gathers of all sizes in flight at once, then all waits."""
    warnings.simplefilter("ignore", FutureWarning)  # newer names of the same function
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    for _ in range(rounds):
        waits = []
        for size in SIZES:
            waits.append(LAUNCHES[name](torch.full((2 * size,), float(rank))))
            _ = [torch.empty(2) for _ in range(50)]  # small allocations, as a training step makes
        for wait in waits:
            wait()
    dist.destroy_process_group()


def main() -> None:
    """Run all variants, interleaved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=1500)
    args = parser.parse_args()
    print(f"torch {torch.__version__}")
    dead = dict.fromkeys(LAUNCHES, 0)
    for _ in range(args.runs):
        for name in LAUNCHES:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    torch.multiprocessing.spawn(run, (name, args.rounds, f"{folder}/store"), WORLD_SIZE)
                except torch.multiprocessing.ProcessExitedException as error:
                    dead[name] += 1
                    print(f"{name}: {error}")
    for name, count in dead.items():
        print(f"{name:20} {count} of {args.runs} runs died")


if __name__ == "__main__":
    main()
