"""Cost of checkpoints for a training step: synchronous, and while training goes on.

    python -m benchmarks.checkpoints                    # 5 MB of parameters, 16 MB of state, on two ranks
    python -m benchmarks.checkpoints --width 2048 --rounds 5

Each round trains the same steps without saving, with one `save_checkpoint`, and with one `async_save_checkpoint`, in
turn. Prints median times of the call and of the steps after it.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import graphshard
from tests.distributed.twins import world_mesh
from tests.ranks import RankPool

STEPS = 12


def cost(rank: int, world_size: int, width: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of the calls, of the steps after them, and until everything is written, by name."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(9) for layer in (nn.Linear(width, width), nn.Tanh())))
    graphshard.compile(model, world_mesh(), backend="eager")
    optim = torch.optim.AdamW(model.parameters())
    x = torch.randn(256, width)

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        model(x).square().mean().backward()
        optim.step()
        optim.zero_grad()
        dist.barrier()
        return time.perf_counter() - start

    saves: dict[str, Callable[..., Any]] = {
        "nothing": lambda *args: None,
        "save_checkpoint": graphshard.checkpoint.save_checkpoint,
        "async_save_checkpoint": graphshard.checkpoint.async_save_checkpoint,
    }
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(3):
        step()
    for number in range(rounds):
        for name, save in saves.items():
            path = folder / f"{name}-{number}"
            start = time.perf_counter()
            future = save(path, model, optim)
            found[f"{name}: call"].append(time.perf_counter() - start)
            while future is not None and not _done(future):
                found[f"{name}: step while it is written"].append(step())
            found[f"{name}: complete"].append(time.perf_counter() - start)
            found[f"{name}: step"] += [step() for _ in range(STEPS)]
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)
    return found


def _done(future: Any) -> bool:
    """Decide on all ranks together, so that they make the same number of steps."""
    done = torch.tensor(int(future.done()))
    dist.all_reduce(done, dist.ReduceOp.MIN)
    return bool(done)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, RankPool() as pool:
        found = pool.world(2).run(cost, options.width, options.rounds, Path(folder))[0]
    for name, seconds in found.items():
        print(f"{name:45} {1000 * statistics.median(seconds):9.1f} ms (median of {len(seconds)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
