"""Measure this machine and write its profile: `graphshard calibrate`.

    torchrun --nproc-per-node 8 -m graphshard calibrate --out machine.json     the ranks and links that training has
    graphshard calibrate --out machine.json                                    starts local ranks itself

All ranks measure at the same time, because that is how they will run; the slowest rank counts. Chips, memory and links
are shared with whatever else runs here, so a busy machine gives a slow profile.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graphshard.calibrate_links import measure_links
from graphshard.calibrate_timing import seconds_of
from graphshard.errors import ArgumentError
from graphshard.files import write_text
from graphshard.profile import Profile, Protocol, Rate, builtin_profiles, load_profile
from graphshard.progress import progress

DESCRIPTION = (
    "Measure matrix multiplication, attention, memory, kernel launches and collectives, and write a profile for "
    "graphshard explain --hardware FILE. Under torchrun the live ranks are measured; alone, local ranks are started."
)
_SQUARES = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A multiplication or attention that takes longer than this ends the series of sizes.
_LONG = 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument("--out", required=True, metavar="FILE", help="the profile to write")
    parser.add_argument("--name", help="name of the machine in tables (default: the file's)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument(
        "--ranks",
        type=int,
        help="local ranks to start without torchrun (default: every GPU, or 2 on a CPU; 1: no links)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure and write; rank 0 writes."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device cuda: torch.cuda.is_available() is False here.")
    ranks = args.ranks or (torch.cuda.device_count() if device == "cuda" else 2)
    if ranks < 1:
        raise ArgumentError(f"--ranks must be positive, got {args.ranks}.")
    if "RANK" not in os.environ and ranks > 1:
        launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "graphshard")
        options = ["--out", args.out, "--device", device, *(["--name", args.name] if args.name else [])]
        return subprocess.run([sys.executable, "-m", *launcher, "calibrate", *options], check=False).returncode
    started = "RANK" in os.environ and not dist.is_initialized()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if started:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        with progress("graphshard calibrate") as show:
            profile = calibrate(device, args.name or Path(args.out).stem, show)
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_text(Path(args.out), profile.to_json())
            print(f"{args.out}: profile {profile.name}, hash {profile.hash[:12]}")
    finally:
        if started:
            dist.destroy_process_group()
    return 0


def calibrate(device: str, name: str, show: Callable[[str], None] = lambda _: None) -> Profile:
    """Measure the machine with all ranks of the default process group, or alone if there is none.

    Args:
        device: "cpu" or "cuda".
        name: of the profile.
        show: told what is being measured.
    """
    sources: dict[str, str] = {}

    def note(path: str, value: float, source: str) -> float:
        """The slowest rank's: rates are the smallest, times the largest."""
        sources[path] = source
        return value

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    here = f"measured, {ranks} ranks at once, slowest"
    show("kernel launch")
    launch = slowest(_launch_seconds(device), device)
    show("memory")
    bandwidth = -slowest(-_memory_bandwidth(device), device)
    known = _known(device)
    rates = {}
    for dtype in _DTYPES:
        label = str(dtype).removeprefix("torch.")
        show(f"multiplication in {label}")
        speed = -slowest(-_matmul_speed(device, dtype, launch), device)
        show(f"attention in {label}")
        attention = min(-slowest(-_attention_speed(device, dtype, launch), device), speed)
        peak = known.rate(label).peak if known is not None else speed
        rates[label] = Rate(
            note(
                f"rates.{label}.peak", peak, known.sources[f"rates.{label}.peak"] if known else f"{here}: best product"
            ),
            note(f"rates.{label}.matmul", speed / peak, f"{here}: best of several square products"),
            note(f"rates.{label}.attention", attention / peak, f"{here}: causal attention, forward and backward"),
        )
    show("elementwise operations")
    vector = -slowest(-_vector_speed(device, launch), device)
    show("host")
    host = -slowest(-_host_bandwidth(device), device)
    nodes, links, outside = measure_links(device, show, slowest)
    for kind, link in links.items():
        for field in ("bandwidth", "latency", "tensor_seconds"):
            note(f"inside.{kind}.{field}", getattr(link, field), links_source(ranks // nodes))
    for network in outside:
        note(f"outside.{network}", outside[network], "measured" if nodes > 1 else "assumed: as inside; one node here")
    for field in ("base", "inside", "outside"):
        note(f"protocols.0.{field}", 0.0, "part of the measured latency")
    note("protocols.0.fraction", 1.0, "part of the measured bandwidth")
    local = max(ranks // nodes, 1)
    return Profile(
        name=name,
        title=f"{name}: {_chip(device)}",
        device=device,
        memory_capacity=note("memory_capacity", _capacity(device, local), "reported by the system, per rank"),
        memory_bandwidth=note("memory_bandwidth", bandwidth, f"{here}: reads and writes of an addition"),
        host_bandwidth=note("host_bandwidth", host, f"{here}: copy from the host"),
        kernel_seconds=note("kernel_seconds", launch, f"{here}: addition to one element"),
        vector=note("vector", vector, f"{here}: geometric mean of multiplication and exponential"),
        units=int(note("units", 0, "not modelled: rates are of whole products")),
        split=int(note("split", 0, "not modelled")),
        ranks_per_node=int(note("ranks_per_node", local, "as measured")),
        rates=rates,
        tiles=(),
        protocols=(Protocol("measured", 0.0, 0.0, 0.0, 1.0),),
        inside=links,
        outside=outside,
        made={
            "torch": str(torch.__version__),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "ranks": ranks,
            "threads": torch.get_num_threads(),
        },
        sources=sources,
    )


def links_source(ranks: int) -> str:
    """Where the numbers of links are from."""
    return f"measured with {ranks} ranks, slowest" if ranks > 1 else "assumed: not measured, one rank"


def slowest(value: float, device: str) -> float:
    """The largest value of all ranks."""
    if not dist.is_initialized():
        return value
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def _launch_seconds(device: str) -> float:
    x = torch.zeros(1, device=device)
    return seconds_of(lambda: x.add_(1), device)


def _memory_bandwidth(device: str) -> float:
    """Bytes/s that an addition reads and writes, far beyond caches."""
    x = torch.zeros(2**26 if device == "cuda" else 2**25, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / seconds_of(lambda: torch.add(x, 1, out=y), device)


def _matmul_speed(device: str, dtype: torch.dtype, launch: float) -> float:
    """FLOP/s of the best square product."""
    best = 0.0
    for size in _SQUARES[device]:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        seconds = seconds_of(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
        best = max(best, 2 * size**3 / max(seconds - launch, seconds / 2))
        if seconds > _LONG:
            break
    return best


def _attention_speed(device: str, dtype: torch.dtype, launch: float) -> float:
    """FLOP/s of causal attention, forward and backward: seven multiplications of half of the pairs."""
    batch, heads, length, dim = (4, 16, 2048, 128) if device == "cuda" else (1, 4, 512, 64)
    q, k, v = (torch.randn(batch, heads, length, dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    out = torch.empty_like(q)

    def step() -> None:
        result = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(result, (q, k, v), out)

    seconds = seconds_of(step, device)
    return 7 * batch * heads * length**2 * dim / max(seconds - 2 * launch, seconds / 2)


def _vector_speed(device: str, launch: float) -> float:
    """Operations/s on data in the cache."""
    x = torch.rand(2**22 if device == "cuda" else 2**16, device=device)
    y = torch.empty_like(x)
    speeds = []
    operations: tuple[Callable[[], Any], ...] = (lambda: torch.mul(x, x, out=y), lambda: torch.exp(x, out=y))
    for operation in operations:
        seconds = seconds_of(operation, device)
        speeds.append(x.numel() / max(seconds - launch, seconds / 10))
    return math.sqrt(speeds[0] * speeds[1])


def _host_bandwidth(device: str) -> float:
    x = torch.zeros(2**24, pin_memory=device == "cuda")
    y = torch.empty_like(x, device=device, pin_memory=False)
    return x.nbytes / seconds_of(lambda: y.copy_(x, non_blocking=True), device)


def _capacity(device: str, ranks: int) -> int:
    if device == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def _chip(device: str) -> str:
    if device == "cuda":
        return f"{dist.get_world_size() if dist.is_initialized() else 1} x {torch.cuda.get_device_name()}"
    return f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, gloo"


def _known(device: str) -> Profile | None:
    """The data sheet of this GPU, for its peaks."""
    if device != "cuda":
        return None
    chip = torch.cuda.get_device_name().lower()
    return next((load_profile(name) for name in builtin_profiles() if name in chip), None)
