"""Predicted against measured: step time and peak memory of the example's model on gloo ranks, three sizes.

    torchrun --nproc-per-node 2 -m graphshard calibrate --out machine.json
    python benchmarks/predicted.py --hardware machine.json [--steps 15] [--backend inductor] [--ranks 2] [--memory]
                                   [--auto 0.7]

Predictions are `explain`'s, which include temporaries of regions. Measurements are the median step of the slowest rank,
with fused AdamW, and the peak of a rank's tensors: parameters, buffers and optimizer state, plus the allocations of a
step that the profiler sees.

A shared machine runs at a fraction of its speed at times. So a matrix product is timed on all ranks before and after
each step, and only steps count during which its speed was within 10 % of the profile's ("steps": how many of all; if
none were in five minutes, all count and the speed is shown). `--memory` measures no times. `--auto` decides what is
saved, with this fraction of the bytes predicted without a limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import graphshard

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import llama

SIZES = (
    {"layers": 4, "dim": 256, "batch": 4, "seq": 128},
    {"layers": 4, "dim": 512, "batch": 4, "seq": 128},
    {"layers": 8, "dim": 512, "batch": 8, "seq": 256},
)


PROBE = 1024  # rows and columns
NEAR = 0.1
LONGEST = 300.0  # seconds of steps


def probe() -> float:
    """Return the current FLOP/s of the slowest rank."""
    a, b = torch.rand(PROBE, PROBE), torch.rand(PROBE, PROBE)
    a @ b
    began = time.perf_counter()
    for _ in range(3):
        a @ b
    taken = torch.tensor((time.perf_counter() - began) / 3)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return 2 * PROBE**3 / taken.item()


def peak_of(step: Callable[[], None], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the peak bytes of live tensors in a step."""
    states = (t for state in optimizer.state.values() for t in state.values())
    held = [*model.parameters(), *model.buffers(), *states]
    total = sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in held)
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text("utf-8"))["traceEvents"]
    memory = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    return total + max(itertools.accumulate(change for _, change in memory))


def explained(
    size: dict[str, int], mesh: tuple[int, ...], tokens: torch.Tensor, given: dict[str, Any]
) -> graphshard.Explanation:
    """Return the prediction of a step."""
    with torch.device("meta"):
        model = llama.Llama(llama.LlamaConfig(layers=size["layers"], dim=size["dim"], seq=size["seq"]))
    return graphshard.explain(model, mesh, example_inputs=(tokens[0], tokens[1]), **given)


def run(rank: int, args: argparse.Namespace, size: dict[str, int], store: str) -> None:
    """Train one model on one rank, and print on rank 0."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    mesh = init_device_mesh("cpu", (args.ranks,))
    torch.manual_seed(0)
    model = llama.Llama(llama.LlamaConfig(layers=size["layers"], dim=size["dim"], seq=size["seq"]))
    tokens = torch.randint(256, (2, size["batch"], size["seq"]))
    given = {"hardware": args.hardware or "cpu-gloo", "backend": args.backend}
    if args.auto:
        whole = explained(size, (args.ranks,), tokens, given).peak_memory_bytes
        given |= {"activation": "auto", "memory_limit": int(args.auto * whole)}
    model = graphshard.compile(model, mesh, **given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        model(tokens[0], tokens[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    speed = graphshard.profiling.load_profile(args.hardware or "cpu-gloo").rate("float32").peak
    times, near, speeds = [], [], [probe()]
    while not args.memory and len(near) < args.steps and sum(times) < LONGEST:
        dist.barrier()
        began = time.perf_counter()
        step()
        taken = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        times.append(taken.item())
        speeds.append(probe())
        if all(abs(found / speed - 1) < NEAR for found in speeds[-2:]):
            near.append(times[-1])
    peak = peak_of(step, model, optimizer)
    if rank == 0:
        predicted = explained(size, (args.ranks,), tokens, given)
        what = f"{', '.join(f'{name} {value}' for name, value in size.items()):40}"
        seconds, counted = "", ""
        if times:
            median = statistics.median(near or times)
            step = predicted.step_time_s
            counted = f"{len(near)}/{len(times)}" if near else f"at {statistics.median(speeds) / speed:.0%}"
            seconds = f"{step * 1e3:10.1f}{median * 1e3:10.1f}{step / median - 1:+9.0%}"
        bytes_ = predicted.peak_memory_bytes
        owners = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in predicted.memory.items() if size)
        print(
            f"{what}{seconds:29}{bytes_ / 2**20:10.1f}{peak / 2**20:10.1f}{bytes_ / peak - 1:+9.1%}{counted:>10}\n"
            f"    at the peak, MiB: {owners}",
            flush=True,
        )
    dist.destroy_process_group()


def main() -> None:
    """Measure each size in separate processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", help="profile of this machine (default: as compile)")
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--steps", type=int, default=15, help="number of steps that count")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--memory", action="store_true", help="measure peaks only")
    parser.add_argument("--auto", type=float, help='activation="auto" under that part of the predicted peak')
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=range(len(SIZES)), help="indices of sizes (default: all)"
    )
    args = parser.parse_args()
    print(f"{'':40}{'step, ms':>29}{'peak, MiB':>29}")
    print(
        f"{'':40}{'predicted':>10}{'measured':>10}{'error':>9}{'predicted':>10}{'measured':>10}{'error':>9}{'steps':>10}"
    )
    for size in (SIZES[index] for index in args.sizes):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(run, (args, size, f"{folder}/store"), args.ranks)


if __name__ == "__main__":
    main()
