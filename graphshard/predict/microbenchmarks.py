"""Seconds of a call on a device."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from graphshard.cost.profile import KINDS, Network, NodeLink
from graphshard.ir.graph import c10d
from graphshard.ir.plan import SMALL
from graphshard.runtime.gloo import all_gather_coalesced


def seconds_of(fn: Callable[[], Any], device: str, budget: float = 0.2) -> float:
    """Median of many calls, in about `budget` seconds; ranks call it as often as they like."""
    from torch.utils.benchmark import Timer  # takes a second to import

    for _ in range(3):
        fn()
    synchronize(device)
    timer = Timer("fn()", globals={"fn": fn}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=budget).median)


def seconds_together(fn: Callable[[], Any], device: str, repeats: int) -> float:
    """Median of a number of calls that is the same on all ranks: for what they do together."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        fn()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[2:])


def synchronize(device: str) -> None:
    """Wait for what the device has been told to do."""
    if device == "cuda":
        torch.cuda.synchronize()


_SQUARES = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A multiplication or attention that takes longer than this ends the series of sizes.
_LONG = 0.3


@dataclass(frozen=True)
class Chip:
    """What the slowest rank reaches.

    Attributes:
        launch: seconds of a kernel with nothing to do.
        memory, host: bytes/s, within device memory and from the host.
        vector: elementwise operations/s.
        matmul, attention: FLOP/s by dtype.
    """

    launch: float
    memory: float
    host: float
    vector: float
    matmul: dict[str, float]
    attention: dict[str, float]

    def better(self, other: Chip) -> Chip:
        """The best of both, number by number."""
        return Chip(
            min(self.launch, other.launch),
            max(self.memory, other.memory),
            max(self.host, other.host),
            max(self.vector, other.vector),
            {dtype: max(speed, other.matmul[dtype]) for dtype, speed in self.matmul.items()},
            {dtype: max(speed, other.attention[dtype]) for dtype, speed in self.attention.items()},
        )


def measure_chip(device: str, show: Callable[[str], None]) -> Chip:
    """Measure once; all ranks of the default process group call it."""
    show("kernel launch")
    launch = slowest(_launch_seconds(device), device)
    matmul, attention = {}, {}
    for dtype in _DTYPES:
        label = str(dtype).removeprefix("torch.")
        show(f"multiplication in {label}")
        matmul[label] = -slowest(-_matmul_speed(device, dtype, launch), device)
        show(f"attention in {label}")
        attention[label] = -slowest(-_attention_speed(device, dtype, launch), device)
    show("memory, elementwise operations, host")
    memory = -slowest(-_memory_bandwidth(device), device)
    vector = -slowest(-_vector_speed(device, launch), device)
    host = -slowest(-_host_bandwidth(device), device)
    return Chip(launch, memory, host, vector, matmul, attention)


def slowest(value: float, device: str) -> float:
    """The largest value of all ranks."""
    if not dist.is_initialized():
        return value
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def _launch_seconds(device: str) -> float:
    x = torch.zeros(1, device=device)
    return seconds_of(lambda: x + 1, device)


def _memory_bandwidth(device: str) -> float:
    """Bytes/s that an addition reads and writes, far beyond caches."""
    x = torch.zeros(2**26 if device == "cuda" else 2**25, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / seconds_of(lambda: torch.add(x, 1, out=y), device)


def _matmul_speed(device: str, dtype: torch.dtype, launch: float) -> float:
    """FLOP/s of square products: the best on GPUs, where what small ones lose is modelled, and the median on CPUs."""
    speeds = []
    for size in _SQUARES[device]:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        seconds = seconds_of(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
        speeds.append(2 * size**3 / max(seconds - launch, seconds / 2))
        if seconds > _LONG:
            break
    return max(speeds) if device == "cuda" else median(speeds)


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


# Bytes of the full tensors.
_SIZES = {"cpu": (2**12, 2**16, 2**20, 2**24), "cuda": (2**12, 2**16, 2**20, 2**24, 2**28)}
# Bytes of a shard, among which packing may be worth its copies.
_SHARDS = tuple(2**power for power in range(12, 21))
_REPEATS = 7
_COALESCED = 8
# Compute that stands still would never end.
MOST_CONTENTION = 0.95


@dataclass(frozen=True)
class Links:
    """What the slowest rank reaches.

    Attributes:
        nodes: how many there are.
        inside: links inside a node by kind of collective.
        outside: by the name of the network model.
        contention, pack_below: see `Profile`.
    """

    nodes: int
    inside: dict[str, NodeLink]
    outside: dict[str, Network]
    contention: float
    pack_below: float = SMALL

    def better(self, other: Links) -> Links:
        """The best of both, link by link."""
        inside = {kind: max(link, other.inside[kind], key=_speed) for kind, link in self.inside.items()}
        outside = {
            name: max(network, other.outside[name], key=lambda found: found.of_rank)
            for name, network in self.outside.items()
        }
        contention, pack_below = min(self.contention, other.contention), min(self.pack_below, other.pack_below)
        return Links(self.nodes, inside, outside, contention, pack_below)


def _speed(link: NodeLink) -> float:
    """Bytes/s of a message of a megabyte."""
    return 2**20 / (link.latency + 2**20 / link.bandwidth)


def measure_links(device: str, show: Callable[[str], None]) -> Links:
    """Measure once; all ranks of the default process group call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Links(1, dict.fromkeys(KINDS, NodeLink(1e9, 1e-4, 0.0)), {"isolated": _of_ranks(1e9)}, 0.0)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size())))
    nodes = dist.get_world_size() // local
    world = dist.group.WORLD
    assert world is not None
    group, _ = dist.new_subgroups(local) if nodes > 1 else (world, [])
    inside = {}
    for kind in KINDS:
        show(f"{kind} of {local} ranks")
        inside[kind] = _link(kind, device, group)
    bandwidth = inside["gather"].bandwidth
    if nodes > 1:
        show("gather between nodes")
        bandwidth = _link("gather", device, world).bandwidth / local
    contention = slowest(_contention(world), device) if device == "cpu" else 0.0
    show("packed gathers")
    return Links(nodes, inside, {"isolated": _of_ranks(bandwidth)}, contention, _pack_below(device, group))


def _of_ranks(bandwidth: float) -> Network:
    """A network by what a rank reaches, cards, switches and all."""
    return Network(1.0, bandwidth, 1.0, 1, 1.0)


def _pack_below(device: str, group: dist.ProcessGroup) -> float:
    """The least bytes of a shard at which tensors that are copied into one buffer, and out of it, arrive later."""
    for size in _SHARDS:
        full = size * group.size()
        apart, packed = (
            slowest(seconds_together(call(full, _COALESCED, device, group), device, _REPEATS), device)
            for call in (functools.partial(_call, "gather"), _packed_call)
        )
        if packed > apart:
            break
    return float(size)


def _packed_call(num_bytes: int, num_tensors: int, device: str, group: dist.ProcessGroup) -> Callable[[], Any]:
    """As a gather of `_call`, in one buffer, with the copies on either side."""
    ranks = group.size()
    shards = [torch.zeros(num_bytes // 4 // ranks, device=device) for _ in range(num_tensors)]
    gather = _gather(device)

    def call() -> list[torch.Tensor]:
        (buffer,) = gather([torch.cat(shards)], ranks, group.group_name)
        rows = c10d.wait_tensor(buffer).view(ranks, -1)
        return [piece.contiguous() for piece in rows.split(shards[0].numel(), 1)]

    return call


def _gather(device: str) -> Callable[..., list[torch.Tensor]]:
    """As the runtime gathers."""
    return all_gather_coalesced if device == "cpu" else c10d.all_gather_into_tensor_coalesced


def _contention(group: dist.ProcessGroup) -> float:
    """Share of a rank's threads that gloo's take while a collective is under way."""
    gather = _call("gather", _SIZES["cpu"][-1], 1, "cpu", group)
    gather()
    start, used = time.perf_counter(), time.process_time()
    for _ in range(_REPEATS):
        gather()
    taken = (time.process_time() - used) / (time.perf_counter() - start)
    return min(taken / torch.get_num_threads(), MOST_CONTENTION)


def _link(kind: str, device: str, group: dist.ProcessGroup) -> NodeLink:
    """Latency and bandwidth that fit the times of several sizes."""
    ranks = group.size()
    times = []
    for size in _SIZES[device]:
        seconds = seconds_together(_call(kind, size, 1, device, group), device, _REPEATS)
        times.append(slowest(seconds, device))
    latency, per_byte = fit(_SIZES[device], times)
    rounds = 2 if kind == "all_reduce" else 1
    extra = 0.0
    if kind in ("gather", "reduce"):
        size = _SIZES[device][1]
        several = slowest(seconds_together(_call(kind, size, _COALESCED, device, group), device, _REPEATS), device)
        extra = max((several - latency - _COALESCED * size * per_byte) / (_COALESCED - 1), 0.0)
    return NodeLink(rounds * (ranks - 1) / ranks / per_byte, latency, extra)


def fit(sizes: tuple[int, ...], times: list[float]) -> tuple[float, float]:
    """Latency and seconds per byte with the least relative error; neither is negative."""
    rows = np.array([[1 / t, size / t] for size, t in zip(sizes, times)])
    latency, per_byte = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)[0]
    if latency < 0 or per_byte <= 0:
        latency, per_byte = min(times), max(times) / max(sizes)
    return float(latency), float(per_byte)


def _call(kind: str, num_bytes: int, num_tensors: int, device: str, group: dist.ProcessGroup) -> Callable[[], Any]:
    """One collective of float32 tensors with `num_bytes` each in full, and its wait."""
    ranks, name = group.size(), group.group_name
    full = [torch.zeros(num_bytes // 4 // ranks * ranks, device=device) for _ in range(num_tensors)]
    shards = [tensor[: tensor.numel() // ranks].clone() for tensor in full]
    split = [shards[0].numel()] * ranks
    gather = _gather(device)
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
