"""Microseconds per call to find its program and to evaluate the guards.

guards      state that forward read: attributes, hooks, globals, inputs
modes       training mode of each submodule
signature   the other keys of a program: modes, dtypes of parameters and others

    python -m benchmarks.guards [--layers 2 32]

The example's Llama on one rank; the median of many checks of an unchanged model, as in training.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.module._call_checks import ModuleTree
from graphshard.module.compiled_module import CompiledModule

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from llama import Llama, LlamaConfig


def main() -> None:
    """Print a line per depth."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 32])
    parser.add_argument("--looks", type=int, default=2000)
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for layers in options.layers:
        model = Llama(LlamaConfig(layers=layers, dim=16, heads=2, seq=8))
        graphshard.compile(model, init_device_mesh("cpu", (1,)), backend="eager")
        tokens = torch.zeros(1, 8, dtype=torch.long)
        model(tokens, tokens).backward()
        assert isinstance(model, CompiledModule)
        ((installed,),) = model._graphshard.executables.known.values()
        modules = sum(1 for _ in model.modules())
        scope = {"module": model, "args": (tokens, tokens), "kwargs": {}}
        tracer = model._graphshard.tracer
        looks = {
            "guards": lambda: installed.guard.change(scope),  # noqa: B023 - called at once
            "modes": ModuleTree(model).modes,
            "signature": lambda: hash(tracer.signature(model)),  # noqa: B023 - called at once
        }
        times = (f"{name} {_microseconds(look, options.looks):.0f} us" for name, look in looks.items())
        print(f"{layers} layers, {modules} modules: {', '.join(times)}")
    dist.destroy_process_group()


def _microseconds(look: Callable[[], object], looks: int) -> float:
    seconds = []
    for _ in range(looks):
        start = time.perf_counter()
        look()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


if __name__ == "__main__":
    main()
