"""Memory and time of a training step of the example's model on gloo ranks: graphshard, FSDP2 and DDP.

    python -m benchmarks.step_memory [--steps 6] [--ranks 2] [--sizes 4,256,4,128 4,512,4,128 8,512,8,256]

A size is layers, width, sequences of a rank's batch and tokens of a sequence. Each variant has separate processes,
which take turns step by step, so that the load of a shared machine affects all alike. Memory is the peak resident
memory of a rank during a step (VmHWM), above its memory at rest, with parameters and states of AdamW in place; time is
for the slower rank. Both are medians of the steps after the second, memory of the rank with the most. malloc's cache of
freed memory is released between steps, and counts within one.

"auto 0.6" has `activation="auto"` and 0.6 of the bytes that `explain` predicts without a limit as `memory_limit`. The
last column is the plan's prediction, above shards and states, if there is a limit.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from benchmarks.giant_parameters import reset_peak
from benchmarks.step_time import BASE, VARIANTS, llama, stepper, variant, whole_stepper
from tests.helpers import resident

SIZES = ("4,256,4,128", "4,512,4,128", "8,512,8,256")
AUTO = (
    *("graphshard inductor auto 0.75", "graphshard inductor auto 0.75 compile_step"),
    *("graphshard eager auto 0.6", "graphshard eager auto 0.6 compile_step"),
)
WARM = 2


def made(name: str, size: tuple[int, int, int, int], batch: Tensor) -> nn.Module:
    """Return the model of a variant."""
    layers, dim, _, seq = size
    model = llama.Llama(llama.LlamaConfig(layers=layers, dim=dim, seq=seq))
    words = name.split()
    if "auto" not in words:
        return variant(name, model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    given: Any = {"example_inputs": (batch[0], batch[1]), "hardware": "cpu-gloo", "backend": words[1]}
    whole = graphshard.explain(model, mesh, **given).peak_memory_bytes
    limit = int(float(words[words.index("auto") + 1]) * whole)
    return graphshard.compile(model, mesh, activation="auto", memory_limit=limit, **given)


def run(
    rank: int, name: str, size: tuple[int, int, int, int], ranks: int, store: str, ends: list[tuple[Connection, ...]]
) -> None:
    """Run one rank of one variant: a step for each message, until there are none."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.manual_seed(rank)
    tokens = torch.randint(256, (2, size[2], size[3]))
    torch.manual_seed(0)
    ready = made(name, size, tokens)
    optimizer = torch.optim.AdamW(ready.parameters(), lr=1e-3)
    step = (whole_stepper if "compile_step" in name else stepper)(ready, optimizer)
    end = ends[rank][1]
    while end.recv():
        before = reset_peak()
        dist.barrier()
        began = time.perf_counter()
        step(tokens)
        end.send((time.perf_counter() - began, resident("VmHWM") - before))
    programs = graphshard.programs(ready) if name.startswith("graphshard") else []
    prediction = programs[-1].plan.prediction if programs and programs[-1].plan else None
    held = sum(3 * param.to_local().nbytes for param in ready.parameters()) if prediction else 0  # plus AdamW's two
    end.send(prediction.peak_bytes - held if prediction else 0)
    dist.destroy_process_group()


class Ranks:
    """Ranks of a variant, each of which waits for its turn."""

    def __init__(self, name: str, size: tuple[int, int, int, int], ranks: int, folder: str) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.ends = [context.Pipe() for _ in range(ranks)]
        given = (name, size, ranks, f"{folder}/{name}", self.ends)
        self.processes = torch.multiprocessing.spawn(run, given, ranks, join=False, daemon=True)

    def ask(self, more: bool) -> list[Any]:
        """Return the answer of each rank."""
        for end, _ in self.ends:
            end.send(more)
        while not all(end.poll(0.05) for end, _ in self.ends):
            self.processes.join(0)  # raises an error of a process
        return [end.recv() for end, _ in self.ends]


def measure(size: tuple[int, int, int, int], args: argparse.Namespace) -> None:
    """Print a line for each variant of one size."""
    with tempfile.TemporaryDirectory() as folder:
        variants: dict[str, Ranks] = {}
        for name in sorted(args.variants, key=lambda name: name != BASE):
            variants[name] = Ranks(name, size, args.ranks, folder)
            for _ in range(WARM):
                variants[name].ask(True)
        found: dict[str, list[list[tuple[float, int]]]] = {name: [] for name in variants}
        for _ in range(args.steps):
            for name, ranks in variants.items():
                found[name].append(ranks.ask(True))
        predicted = {name: max(ranks.ask(False)) for name, ranks in variants.items()}
    base = [float("nan")] * 2
    for name, steps in found.items():
        seconds = statistics.median(max(taken for taken, _ in ranks) for ranks in steps)
        most = max(statistics.median(bytes_ for _, bytes_ in of_rank) for of_rank in zip(*steps))
        base = [most, seconds] if name == BASE else base
        print(
            f"  {name:46}{most / 2**20:8.1f}{most / base[0]:8.2f}{1e3 * seconds:10.1f}{seconds / base[1]:8.2f}"
            + (f"{predicted[name] / 2**20:10.1f}" if predicted[name] else ""),
            flush=True,
        )


def main() -> None:
    """Print a table for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--variants", nargs="+", default=(*VARIANTS, *AUTO))
    args = parser.parse_args()
    for text in args.sizes:
        layers, dim, batch, seq = map(int, text.split(","))
        print(f"layers {layers}, dim {dim}, batch {batch} x {seq}: MiB over rest and ms, each to {BASE}; predicted MiB")
        measure((layers, dim, batch, seq), args)


if __name__ == "__main__":
    main()
