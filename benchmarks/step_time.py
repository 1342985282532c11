"""Seconds of a training step of the example's model on gloo ranks: graphshard, FSDP2 and DDP, interleaved.

    python benchmarks/step_time.py [--steps 30] [--layers 4] [--dim 256] [--batch 4] [--seq 128] [--ranks 2]
                                   [--fused] [--simple-fsdp .../torchtitan/experiments/graph_trainer/simple_fsdp.py]

All variants live in the same processes and take turns, step by step, so that the load of a shared machine affects all
alike. Prints medians of the slowest rank, quartiles, ratios to eager FSDP2, and the processor time of all threads of a
rank, which is the time of a step if each rank has one core and never waits.

"kept" has `reshard_after_forward=False`: full parameters stay from forward to backward, which saves a gather of each.
Without communication, each rank trains the model alone, by torch.compile or in eager mode; "by itself" is the same with
graphshard, close to a lower limit for all variants of that backend. Communication alone is one gather and one reduction
of each block, and of the rest, in sequence as graphshard sends them, without any compute.

"FSDP2 compiled whole" is FSDP2 with torch.compile around the model, which breaks the graph at FSDP2's hooks.
torchtitan's SimpleFSDP, under torch.compile as a whole, is included if `--simple-fsdp` names its file in torchtitan, in
whose environment this must then run.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import graphshard
from graphshard.cli import _bench_command
from graphshard.cli._bench_command import alternate, with_fsdp2
from graphshard.ir.graph import c10d
from graphshard.ir.plan import EXCHANGE_RANKS
from graphshard.runtime.collective_launches import add_up, all_gather, exchange

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import llama

VARIANTS = (
    *("graphshard inductor", "graphshard inductor compile_step", "graphshard inductor compile_step kept"),
    "graphshard inductor compile_step by itself",
    *("graphshard eager", "graphshard eager compile_step", "graphshard eager compile_step kept"),
    *("FSDP2", "FSDP2 compiled blocks", "FSDP2 compiled whole", "DDP", "no communication", "no communication eager"),
    "communication alone",
)
BASE, SIMPLE, ALONE = "FSDP2", "SimpleFSDP", "communication alone"


def variant(name: str, model: nn.Module, simple_fsdp: Path | None = None) -> nn.Module:
    """Return the model prepared for the variant of this name.

    Args:
        simple_fsdp: the file that SimpleFSDP is in.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if name.startswith("graphshard"):
        if name.endswith("by itself"):
            mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ranks", "itself"))["itself"]
        return graphshard.compile(model, mesh, backend=name.split()[1], reshard_after_forward="kept" not in name)
    if name == "DDP":
        return DistributedDataParallel(model)
    if name.startswith("no communication"):
        if not name.endswith("eager"):
            model.compile()
        return model
    if name == SIMPLE:
        assert simple_fsdp is not None
        model = _loaded(simple_fsdp).data_parallel(model, mesh, mode="fully_shard")
        model.compile(fullgraph=True)
        return model
    return with_fsdp2(model, mesh, compiled=name.rpartition(" ")[2] if " compiled " in name else "")


def _loaded(path: Path) -> Any:
    """Return the module of a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(rank: int, args: argparse.Namespace, store: str) -> None:
    """Run one rank: all variants take turns."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    torch.manual_seed(0)
    sizes = {"layers": args.layers, "dim": args.dim, "seq": args.seq}
    model = llama.Llama(llama.LlamaConfig(**sizes))
    torch.manual_seed(rank)
    batches = [torch.randint(256, (2, args.batch, args.seq)) for _ in range(4)]
    steps: dict[str, Callable[[torch.Tensor], float]] = {}
    for name in (*args.variants, *([SIMPLE] if args.simple_fsdp else [])):
        if name == ALONE:
            steps[name] = communicator(model)
            continue
        ready = variant(name, copy.deepcopy(model), args.simple_fsdp)
        optimizer = torch.optim.AdamW(ready.parameters(), lr=1e-3, fused=True if args.fused else None)
        steps[name] = (whole_stepper if "compile_step" in name else stepper)(ready, optimizer)
    turns = {name: lambda number, step=step: step(batches[number % len(batches)]) for name, step in steps.items()}
    found = {name: times[args.warmup :] for name, times in alternate(turns, args.warmup + args.steps, "cpu").items()}
    if rank == 0:
        show(found)
    dist.destroy_process_group()


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], float]:
    """Return a function that trains one step and returns the loss."""
    step = _bench_command.stepper(model, optimizer)
    return lambda batch: step(batch[0], batch[1]).item()


def whole_stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], float]:
    """Return a function that trains one step with `compile_step`."""
    step = graphshard.compile_step(model, optimizer)
    return lambda batch: step(batch[0], batch[1]).item()


def communicator(model: llama.Llama) -> Callable[[torch.Tensor], float]:
    """Return a function with the communication of a step that keeps parameters, as graphshard sends it."""
    group, size = dist.group.WORLD.group_name, dist.get_world_size()
    blocks = [sum(param.numel() for param in block.parameters()) for block in model.layers]
    numbers = [sum(param.numel() for param in model.parameters()) - sum(blocks), *blocks]
    full = [torch.zeros(size, number // size) for number in numbers]

    def step(batch: torch.Tensor) -> float:
        for gathered in full:
            c10d.wait_tensor(all_gather(gathered[:1], size, group))
        for gradient in full:
            if size == EXCHANGE_RANKS:
                received = c10d.wait_tensor(exchange(gradient, "avg", 2, group, copies=False))
                add_up(received, gradient, "avg", 2, group)
            else:
                c10d.wait_tensor(c10d.reduce_scatter_tensor(gradient, "avg", size, group))
        return 0.0

    return step


def show(found: dict[str, list[tuple[float, float]]]) -> None:
    """Print the table, of seconds and of processor time."""
    base = statistics.median(seconds for seconds, _ in found.get(BASE) or next(iter(found.values())))
    print(f"{'':39}{'median ms':>10}{'quartiles':>18}{'to ' + BASE:>10}{'processor ms':>14}")
    for name, times in found.items():
        low, middle, high = statistics.quantiles([seconds for seconds, _ in times], n=4)
        processor = statistics.median(used for _, used in times) * 1e3
        print(f"{name:39}{middle * 1e3:10.1f}{low * 1e3:9.1f}{high * 1e3:9.1f}{middle / base:10.2f}{processor:14.1f}")


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("steps", 30), ("warmup", 3), ("layers", 4), ("dim", 256), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True) for all variants")
    parser.add_argument("--simple-fsdp", type=Path, help="path of torchtitan's simple_fsdp.py")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (args, f"{folder}/store"), args.ranks)


if __name__ == "__main__":
    main()
