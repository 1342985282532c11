"""Measure what one rank's chip computes and moves, while all ranks do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from graphshard.measure.timing import seconds_of

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
