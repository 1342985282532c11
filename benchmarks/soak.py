"""Growth of memory, file descriptors and threads of two ranks in a long run.

    python -m benchmarks.soak                      # 3,000 steps, 300 models, 20 GB of gathers
    python -m benchmarks.soak --steps 300 --models 30 --gigabytes 2

Steps have random shapes, modes, accumulation and state dicts, the same on both ranks. Models are compiled, trained for
a step and deleted. At the end, `unshard` gathers parameters of 16 MB until gloo has transferred the given gigabytes.
Prints a line for each tenth of a part, and whether its last third holds more than the middle one; `--slack` MB are
allowed.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import graphshard
from tests.distributed.nets import Net
from tests.distributed.twins import world_mesh
from tests.ranks import RankPool

SHAPES = ((1, 4), (3, 4), (5, 4))
PAGE = os.sysconf("SC_PAGE_SIZE")


class Held(NamedTuple):
    """Resources of a process at a point of a part: resident MB, file descriptors, threads of Python and of Linux."""

    part: str
    done: int
    megabytes: float
    descriptors: int
    threads: int
    tasks: int


def held(part: str, done: int) -> Held:
    """Return the current resources of this process."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 1e6
    descriptors, tasks = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
    return Held(part, done, resident, descriptors, threading.active_count(), tasks)


def soak(rank: int, world_size: int, steps: int, models: int, gigabytes: float) -> list[Held]:
    """Run everything on one rank."""
    torch.set_num_threads(1)
    found = []
    for part, run, count in (("steps", _steps, steps), ("models", _models, models), ("gathers", _gathers, gigabytes)):
        rounds = run(count)
        total = next(rounds)
        for done in rounds:
            if done * 10 // total > (done - 1) * 10 // total:
                found.append(held(part, done))
                if rank == 0:
                    print(*found[-1], flush=True, file=sys.stderr)
    return found


def _steps(count: int) -> Iterator[int]:
    """Train steps of one model; yield the number of steps, then the number of completed ones."""
    yield count
    chance = random.Random(0)
    torch.manual_seed(0)
    model = graphshard.compile(Net(), world_mesh(), backend="eager", max_captures=64)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for done in range(1, count + 1):
        model.train(chance.random() < 0.8)
        microbatches = chance.choice((1, 1, 2))
        for index in range(microbatches):
            model.set_requires_gradient_sync(index == microbatches - 1)
            x = torch.randn(chance.choice(SHAPES))
            if chance.random() < 0.1:
                with torch.no_grad():
                    model(x)
            model(x).square().mean().backward()
        optim.step()
        optim.zero_grad(set_to_none=chance.random() < 0.5)
        if chance.random() < 0.05:
            model.load_state_dict(model.state_dict())
        if chance.random() < 0.05:
            optim.load_state_dict(optim.state_dict())
        yield done


def _models(count: int) -> Iterator[int]:
    """Compile models, train them for a step and delete them."""
    yield count
    for done in range(1, count + 1):
        model = graphshard.compile(Net(), world_mesh(), backend="eager")
        model(torch.randn(2, 4)).square().mean().backward()
        del model
        yield done


def _gathers(gigabytes: float) -> Iterator[int]:
    """Gather parameters of 16 MB with `unshard` and free them."""
    model: Any = graphshard.compile(nn.Linear(2048, 2048, bias=False), world_mesh(), backend="eager")
    total = max(10, round(gigabytes * 1e9 / (4 * 2048 * 2048)))
    yield total
    for done in range(1, total + 1):
        model.unshard(units=["*"])
        model.reshard(units=["*"])
        yield done


def grown(found: list[Held], slack: float) -> list[str]:
    """Return the growth from the middle to the last third of a part, by medians; the first third fills caches."""
    said = []
    for part in dict.fromkeys(each.part for each in found):
        values = [each for each in found if each.part == part]
        third = len(values) // 3
        for name, allowed in (("megabytes", slack), ("descriptors", 0), ("threads", 0), ("tasks", 0)):
            before, after = (
                statistics.median(getattr(v, name) for v in vs) for vs in (values[third:-third], values[-third:])
            )
            if after - before > allowed:
                said.append(f"{part}: {name} {before:.1f} -> {after:.1f}")
    return said


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the number of quantities that grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument(
        "--gigabytes", type=float, default=20.0, help="gigabytes of full tensors that each rank gathers"
    )
    parser.add_argument("--slack", type=float, default=8.0, help="MB of growth to allow")
    args = parser.parse_args(arguments)
    begin = time.monotonic()
    with RankPool() as pool:
        ranks = pool.run(2, soak, args.steps, args.models, args.gigabytes, timeout=24 * 3600.0, grace=10.0)
    print("rank part       done     MB  descriptors  threads  tasks")
    for rank, found in enumerate(ranks):
        for each in found:
            print(f"{rank:4} {each.part:8} {each.done:6} {each.megabytes:6.1f} {each.descriptors:12} ", end="")
            print(f"{each.threads:8} {each.tasks:6}")
    said = [f"rank {rank}: {text}" for rank, found in enumerate(ranks) for text in grown(found, args.slack)]
    print(*(said or ["nothing has grown"]), sep="\n")
    print(f"{time.monotonic() - begin:.0f} s")
    return len(said)


if __name__ == "__main__":
    sys.exit(main() > 0)
