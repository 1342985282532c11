"""Measure this machine and write its profile: `graphshard calibrate`.

    torchrun --nproc-per-node 8 -m graphshard calibrate --out machine.json     the ranks and links that training has
    graphshard calibrate --out machine.json                                    starts local ranks itself

All ranks measure at the same time, because that is how they will run; the slowest rank counts. Chips, memory and links
are shared with all other processes, so a busy machine gives a slow profile.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from graphshard.cost.profile import (
    KINDS,
    AttentionSpeed,
    MatmulRate,
    Network,
    NodeLink,
    Profile,
    load_profile,
    profile_of_gpu,
)
from graphshard.errors import ArgumentError
from graphshard.ir.graph import c10d
from graphshard.ir.plan import SMALL
from graphshard.runtime.collective_launches import all_gather_coalesced
from graphshard.utils.argument_validation import check_count, path_of, write_given
from graphshard.utils.progress import progress
from graphshard.utils.text import say

# That one machine can start.
_MOST_RANKS = 1024
# Rounds of measurements: a machine that others use is slow at times.
ROUNDS = {"cpu": 3, "cuda": 1}
# Sizes of square products.
_SQUARES = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A product that takes longer than this ends the series of sizes.
_LONG = 0.3
# Bytes of the full tensors of collectives.
_SIZES = {"cpu": (2**12, 2**16, 2**20, 2**24), "cuda": (2**12, 2**16, 2**20, 2**24, 2**28)}
# Bytes of a shard, among which packing may be worth its copies.
_SHARDS = tuple(2**power for power in range(12, 21))
_REPEATS = 7
# The runtime's gathers.
_GATHER: dict[str, Callable[..., list[torch.Tensor]]] = {
    "cpu": all_gather_coalesced,
    "cuda": c10d.all_gather_into_tensor_coalesced,
}
_COALESCED = 8
_LESS_IS_BETTER = ("kernel_seconds", "contention", "pack_below", "step.inside", "step.outside")
# Part of a gather's time for which products are measured beside it: they may take several times as long.
_BESIDE = 0.2
# Compute that stands still would never end.
MOST_CONTENTION = 0.95


def run(args: argparse.Namespace) -> int:
    """Measure and write; rank 0 writes."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device cuda: torch.cuda.is_available() is False here.")
    out = path_of("--out", args.out, "a file to write")
    if out.is_dir():
        raise ArgumentError(f"--out must be a file to write, got the directory {args.out!r}.")
    if args.ranks is not None:
        check_count("--ranks", args.ranks, most=_MOST_RANKS)
    ranks = args.ranks or (torch.cuda.device_count() if device == "cuda" else 2)
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
        with progress("graphshard calibrate", lines=True) as show:
            profile = calibrate(device, args.name or out.stem, show)
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_given("--out", args.out, profile.to_json())
            say(f"{args.out}: profile {profile.name}, hash {profile.hash[:12]}")
    finally:
        if started:
            dist.destroy_process_group()
    return 0


def calibrate(device: str, name: str, show: Callable[[str], None] = lambda _: None) -> Profile:
    """Measure the machine with all ranks of the default process group, or alone; the name is the profile's."""
    local, nodes = _ranks_and_nodes()
    ranks, rounds = local * nodes, ROUNDS[device]
    measured = []
    for number in range(1, rounds + 1):

        def show_round(text: str, counted: str = f" ({number} of {rounds})" if rounds > 1 else "") -> None:
            show(text + counted)

        measured.append(measure_chip(device, show_round) | measure_links(device, show_round))
    best = best_of(measured)
    here = f"measured, {ranks} ranks at once, slowest" + (f"; best of {rounds} rounds" if rounds > 1 else "")
    of_links = f"measured with {local} ranks, slowest" if local > 1 else "assumed: not measured, one rank"
    taken = "CPU time of all threads in a gather" if device == "cpu" else "products beside a gather"
    rates: dict[str, MatmulRate] = {}
    # Values of the profile and their sources.
    numbers: dict[str, tuple[Any, str]] = {
        "memory_capacity": (_capacity(device, local), "reported by the system, per rank"),
        "memory_bandwidth": (best["memory_bandwidth"], f"{here}: reads and writes of an addition"),
        "host_bandwidth": (best["host_bandwidth"], f"{here}: copy from the host"),
        "kernel_seconds": (best["kernel_seconds"], f"{here}: addition to one element"),
        "vector": (best["vector"], f"{here}: geometric mean of multiplication and exponential"),
        "ranks_per_node": (local, "as measured"),
        "rates": (rates, f"{here}: causal attention, forward and backward"),
        "inside": ({kind: best[f"inside.{kind}"] for kind in KINDS}, of_links),
        "outside": ({"isolated": best["outside.isolated"]}, "part of the bandwidth of a rank"),
        "contention": (best["contention"], f"{here}: {taken}" if ranks > 1 else of_links),
        "pack_below": (best["pack_below"], of_links),
    }
    # All that is not modeled of a measured machine, such as tiles and protocols, is as in the profile of one.
    like = load_profile("cpu-gloo")
    sources = {path: source for path, source in like.sources.items() if path.partition(".")[0] not in numbers}
    sources |= {name: source for name, (_, source) in numbers.items()}
    sources |= {f"inside.{kind}.switched": "part of the measured bandwidth" for kind in KINDS}
    sources["outside.isolated.bandwidth"] = "measured" if nodes > 1 else "assumed: as inside; one node here"
    (ring,) = like.protocols
    ring = replace(ring, inside=best["step.inside"], outside=best["step.outside"])
    sources["protocols.0.inside"] = of_links if local > 2 else "part of the measured latency"
    sources["protocols.0.outside"] = "measured" if nodes > 1 else "assumed: as inside; one node here"
    known = profile_of_gpu(torch.cuda.get_device_name(), _capacity(device, local)) if device == "cuda" else None
    for dtype in map(_name_of, _DTYPES):
        # Relative to the data sheet's peaks, if it is known.
        speed, product = best[f"matmul.{dtype}"], f"{here}: products of several sizes"
        peak = known.rate(dtype).peak if known is not None else speed
        attention = min(best[f"attention.{dtype}"], speed) / peak
        rates[dtype] = MatmulRate(peak, speed / peak, {"flash": AttentionSpeed(attention, attention)})
        sources[f"rates.{dtype}.peak"] = known.sources[f"rates.{dtype}.peak"] if known else product
        sources[f"rates.{dtype}.matmul"] = product
    made = {
        "torch": str(torch.__version__),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "ranks": ranks,
        "threads": torch.get_num_threads(),
    }
    title, values = f"{name}: {_title(device)}", {name: value for name, (value, _) in numbers.items()}
    return replace(like, name=name, title=title, device=device, protocols=(ring,), **values, made=made, sources=sources)


def best_of(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the best of several measurements, number by number and link by link."""

    def rank(name: str, value: Any) -> float:
        if isinstance(value, NodeLink):
            return 2**20 / (value.latency + 2**20 / value.bandwidth)  # bytes/s of a message of a megabyte
        if isinstance(value, Network):
            return value.of_rank
        return -value if name in _LESS_IS_BETTER else float(value)

    return {name: max((each[name] for each in rounds), key=functools.partial(rank, name)) for name in rounds[0]}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ranks_and_nodes() -> tuple[int, int]:
    """Return the ranks of a node, and the nodes; one of each without a process group, whatever launched this."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    nodes = max(ranks // int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks))), 1)
    return ranks // nodes, nodes


def _capacity(device: str, ranks: int) -> int:
    if device == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def _title(device: str) -> str:
    if device == "cuda":
        return f"{dist.get_world_size() if dist.is_initialized() else 1} x {torch.cuda.get_device_name()}"
    return f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, gloo"


def seconds_of(fn: Callable[[], Any], device: str, budget: float = 0.2) -> float:
    """Return the median of many calls, in about `budget` seconds; ranks make different numbers of calls."""
    from torch.utils.benchmark import Timer  # takes a second to import

    for _ in range(3):
        fn()
    _synchronize(device)
    timer = Timer("fn()", globals={"fn": fn}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=budget).median)


def seconds_together(fn: Callable[[], Any], device: str, repeats: int) -> float:
    """Return the median of a number of calls that is the same on all ranks, for collective ones."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        fn()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[2:])


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def slowest(seconds: float, device: str) -> float:
    """Return the largest value of all ranks."""
    if not dist.is_initialized():
        return seconds
    tensor = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def measure_chip(device: str, show: Callable[[str], None]) -> dict[str, Any]:
    """Measure compute and memory of the slowest rank: numbers by name; `matmul` and `attention` are FLOP/s."""

    def least(speed: float) -> float:
        return -slowest(-speed, device)

    show("kernel launch")
    one = torch.zeros(1, device=device)
    launch = slowest(seconds_of(lambda: one + 1, device), device)
    found = {"kernel_seconds": launch}
    for dtype in _DTYPES:
        label = _name_of(dtype)
        show(f"multiplication in {label}")
        found[f"matmul.{label}"] = least(_matmul_speed(device, dtype, launch))
        show(f"attention in {label}")
        found[f"attention.{label}"] = least(_attention_speed(device, dtype, launch))
    show("memory, elementwise operations, host")
    # An addition far beyond caches, and a copy from the host.
    x = torch.zeros(2**26 if device == "cuda" else 2**25, device=device)
    y = torch.empty_like(x)
    found["memory_bandwidth"] = least(2 * x.nbytes / seconds_of(lambda: torch.add(x, 1, out=y), device))
    found["vector"] = least(_vector_speed(device, launch))
    host = torch.zeros(2**24, pin_memory=device == "cuda")
    here = torch.empty_like(host, device=device, pin_memory=False)
    found["host_bandwidth"] = least(host.nbytes / seconds_of(lambda: here.copy_(host, non_blocking=True), device))
    return found


def _matmul_speed(device: str, dtype: torch.dtype, launch: float) -> float:
    """Return FLOP/s of square products: the best on GPUs, where small ones are modeled, and the median on CPUs."""
    speeds = []
    for size in _SQUARES[device]:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        seconds = seconds_of(functools.partial(torch.matmul, a, b), device)
        speeds.append(2 * size**3 / max(seconds - launch, seconds / 2))
        if seconds > _LONG:
            break
    return max(speeds) if device == "cuda" else median(speeds)


def _attention_speed(device: str, dtype: torch.dtype, launch: float) -> float:
    """Return FLOP/s of causal attention, forward and backward: seven multiplications of half of the pairs."""
    batch, heads, length, dim = (4, 16, 2048, 128) if device == "cuda" else (1, 4, 512, 64)
    q, k, v = (torch.randn(batch, heads, length, dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    out = torch.empty_like(q)

    def step() -> None:
        result = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(result, (q, k, v), out)

    seconds = seconds_of(step, device)
    return 7 * batch * heads * length**2 * dim / max(seconds - 2 * launch, seconds / 2)


def _vector_speed(device: str, launch: float) -> float:
    """Return operations/s on data in the cache: the geometric mean of a cheap and an expensive one."""
    x = torch.rand(2**22 if device == "cuda" else 2**16, device=device)
    y = torch.empty_like(x)
    times = seconds_of(lambda: torch.mul(x, x, out=y), device), seconds_of(lambda: torch.exp(x, out=y), device)
    speeds = [x.numel() / max(seconds - launch, seconds / 10) for seconds in times]
    return math.sqrt(math.prod(speeds))


def measure_links(device: str, show: Callable[[str], None]) -> dict[str, Any]:
    """Measure communication of the slowest rank, by name in the profile; all ranks of the default group call it."""
    local, nodes = _ranks_and_nodes()
    if local * nodes == 1:
        inside = {f"inside.{kind}": NodeLink(1e9, 1e-4, 0.0) for kind in KINDS}
        steps = {"step.inside": 0.0, "step.outside": 0.0}
        others = {"outside.isolated": _of_ranks(1e9), "contention": 0.0, "pack_below": float(SMALL)}
        return {**inside, **steps, **others}
    world = dist.group.WORLD
    assert world is not None
    group, _ = dist.new_subgroups(local) if nodes > 1 else (world, [])
    found: dict[str, Any] = {}
    show("latency by ranks")
    step = _step(local, device)
    for kind in KINDS:
        show(f"{kind} of {local} ranks")
        link, rounds = _link(kind, device, group), 2 if kind == "all_reduce" else 1
        # A ring's steps are the protocol's; what else passes before the first byte is the link's.
        found[f"inside.{kind}"] = replace(link, latency=max(link.latency - rounds * (local - 1) * step, 0.0))
    bandwidth, far = found["inside.gather"].bandwidth, step
    if nodes > 1:
        show("gather between nodes")
        link = _link("gather", device, world)
        bandwidth = link.bandwidth / local
        near = found["inside.gather"].latency + (local * nodes - nodes) * step
        far = max(link.latency - near, 0.0) / (nodes - 1)
    found |= {"step.inside": step, "step.outside": far, "outside.isolated": _of_ranks(bandwidth)}
    show("compute beside a gather")
    contention = _threads_of_gather(world) if device == "cpu" else _lost_beside_gather(device, world)
    found["contention"] = slowest(contention, device)
    show("packed gathers")
    found["pack_below"] = _pack_below(device, world)
    return found


def _step(local: int, device: str) -> float:
    """Return the seconds that a small gather takes longer for each further rank of a node; 0 if two ranks are all."""
    counts = [ranks for ranks in range(2, local + 1) if local % ranks == 0]
    if len(counts) < 2:
        return 0.0
    times = []
    for ranks in counts:
        group, _ = dist.new_subgroups(ranks)
        call = _call("gather", _SIZES[device][0], 1, device, group)
        times.append(slowest(seconds_together(call, device, _REPEATS), device))
    return max(float(np.polyfit(counts, times, 1)[0]), 0.0)


def _of_ranks(bandwidth: float) -> Network:
    return Network(1.0, bandwidth, 1.0, 1, 1.0)


def _link(kind: str, device: str, group: dist.ProcessGroup) -> NodeLink:

    def measured(size: int, num_tensors: int) -> float:
        return slowest(seconds_together(_call(kind, size, num_tensors, device, group), device, _REPEATS), device)

    ranks, sizes = group.size(), _SIZES[device]
    latency, per_byte = fit(sizes, [measured(size, 1) for size in sizes])
    rounds = 2 if kind == "all_reduce" else 1
    extra = 0.0
    if kind in ("gather", "reduce"):
        several = measured(sizes[1], _COALESCED)
        extra = max((several - latency - _COALESCED * sizes[1] * per_byte) / (_COALESCED - 1), 0.0)
    return NodeLink(rounds * (ranks - 1) / ranks / per_byte, latency, extra)


def fit(sizes: tuple[int, ...], times: list[float]) -> tuple[float, float]:
    """Return latency and seconds per byte with the least relative error; neither is negative."""
    rows = np.array([[1 / t, size / t] for size, t in zip(sizes, times)])
    latency, per_byte = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)[0]
    if latency < 0 or per_byte <= 0:
        latency, per_byte = min(times), max(times) / max(sizes)
    return float(latency), float(per_byte)


def _call(kind: str, num_bytes: int, num_tensors: int, device: str, group: dist.ProcessGroup) -> Callable[[], Any]:
    """Return one collective of float32 tensors with `num_bytes` each in full, and its wait."""
    ranks, name = group.size(), group.group_name
    full = [torch.zeros(num_bytes // 4 // ranks * ranks, device=device) for _ in range(num_tensors)]
    shards = [tensor[: tensor.numel() // ranks].clone() for tensor in full]
    split = [shards[0].numel()] * ranks
    gather = _GATHER[device]
    start: dict[str, Callable[[], Any]] = {
        "gather": lambda: gather(shards, ranks, name),
        "reduce": lambda: c10d.reduce_scatter_tensor_coalesced(full, "sum", ranks, name),
        "all_reduce": lambda: c10d.all_reduce_coalesced(full, "sum", name),
        "all_to_all": lambda: [c10d.all_to_all_single(tensor, split, split, name) for tensor in full],
    }

    def call() -> None:
        for result in start[kind]():
            c10d.wait_tensor(result)

    return call


def _threads_of_gather(group: dist.ProcessGroup) -> float:
    """Return the share of a rank's threads that gloo's take during a collective.

    Times of products on a few shared cores say less: they differ by more than that from call to call.
    """
    gather = _call("gather", _SIZES["cpu"][-1], 1, "cpu", group)
    gather()
    start, used = time.perf_counter(), time.process_time()
    for _ in range(_REPEATS):
        gather()
    taken = (time.process_time() - used) / (time.perf_counter() - start)
    return min(taken / torch.get_num_threads(), MOST_CONTENTION)


def _lost_beside_gather(device: str, group: dist.ProcessGroup) -> float:
    """Return the share of compute that is lost while a gather is under way: products take longer beside it."""
    size = _SQUARES[device][1]
    a = torch.randn(size, size, device=device)
    shard = torch.zeros(_SIZES[device][-1] // 4 // group.size(), device=device)

    def gather() -> list[torch.Tensor]:
        return _GATHER[device]([shard], group.size(), group.group_name)

    def gathered() -> None:
        c10d.wait_tensor(gather()[0])

    def products() -> None:
        for _ in range(count):
            torch.mm(a, a)

    def beside() -> float:
        (pending,) = gather()
        start = time.perf_counter()
        products()
        if device == "cuda":
            torch.cuda.current_stream().synchronize()  # of compute; the gather has its own stream
        seconds = time.perf_counter() - start
        c10d.wait_tensor(pending)
        return seconds

    count = 1
    alone = slowest(seconds_together(products, device, _REPEATS), device)
    count = max(int(_BESIDE * slowest(seconds_together(gathered, device, _REPEATS), device) / alone), 1)
    alone = seconds_together(products, device, _REPEATS)
    with_gather = median(beside() for _ in range(_REPEATS))
    return min(max(1 - alone / with_gather, 0.0), MOST_CONTENTION)


def _pack_below(device: str, group: dist.ProcessGroup) -> float:
    """Return the least bytes of a shard at which tensors packed into one buffer arrive later."""
    for size in _SHARDS:
        full = size * group.size()
        separate, packed = (
            slowest(seconds_together(call(full, _COALESCED, device, group), device, _REPEATS), device)
            for call in (functools.partial(_call, "gather"), _packed_call)
        )
        if packed > separate:
            break
    return float(size)


def _packed_call(num_bytes: int, num_tensors: int, device: str, group: dist.ProcessGroup) -> Callable[[], Any]:
    """Return a gather as of `_call`, in one buffer, with the copies on either side."""
    ranks = group.size()
    shards = [torch.zeros(num_bytes // 4 // ranks, device=device) for _ in range(num_tensors)]
    gather = _GATHER[device]

    def call() -> list[torch.Tensor]:
        (buffer,) = gather([torch.cat(shards)], ranks, group.group_name)
        rows = c10d.wait_tensor(buffer).view(ranks, -1)
        return [piece.contiguous() for piece in rows.split(shards[0].numel(), 1)]

    return call
