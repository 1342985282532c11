"""Python and autograd overhead of a step, without the code of programs: microseconds of CPU time per parameter.

    python -m benchmarks.step_python [--layers 40] [--rounds 15] [--profile]

Reading parameters, the signature of a call, checks, autograd, making gradients DTensors: everything outside of
executors, which return the results of an earlier step. The parameters are the ones that the last layers add, in torch's
fake process group. Numbers are from the best round, because the machine may be shared. `--profile` lists the functions
instead.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphshard
from graphshard.ir.program import Phase
from graphshard.runtime.bound_program import BoundProgram
from tests.helpers import Blocks

FEW = 5


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    if args.profile:
        step, _ = _replayed(args.layers)
        with cProfile.Profile() as profile:
            for _ in range(args.rounds):
                step()
        pstats.Stats(profile).sort_stats("tottime").print_stats(24)
    else:
        few, many = (_measured(layers, args.rounds) for layers in (FEW, args.layers + FEW))
        for name in many:
            print(f"{name:10}{(many[name] - few[name]) / (2 * args.layers) * 1e6:8.2f} us for a parameter")
    dist.destroy_process_group()


def _measured(layers: int, rounds: int) -> dict[str, float]:
    """Return the seconds of a call, and of its backward with zeroing."""
    _, parts = _replayed(layers)
    best = {"forward": float("inf"), "backward": float("inf")}
    for _ in range(rounds):
        start = time.thread_time()
        loss = parts[0]()
        middle = time.thread_time()
        parts[1](loss)
        end = time.thread_time()
        best = {"forward": min(best["forward"], middle - start), "backward": min(best["backward"], end - middle)}
    return best | {"both": sum(best.values())}


def _replayed(layers: int) -> tuple[Callable[[], None], tuple[Callable[[], torch.Tensor], Callable[[Any], None]]]:
    """Return a step whose programs return earlier results, and its two parts."""
    model = graphshard.compile(Blocks(layers, bias=True), init_device_mesh("cpu", (2,)), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, code = torch.ones(2, 4), BoundProgram.code
    kept: dict[Any, Any] = {}

    def replay(codes: BoundProgram, phase: Phase) -> Callable[[list[Any]], Any]:
        if phase.module not in kept:
            run = code(codes, phase)
            return lambda inputs: kept.setdefault(phase.module, run(inputs))
        return lambda _: kept[phase.module]

    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.zero_grad()

    mock.patch.object(BoundProgram, "code", replay).start()
    for _ in range(3):
        backward(model(x))
    return lambda: backward(model(x)), (lambda: model(x), backward)


if __name__ == "__main__":
    main()
