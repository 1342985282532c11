"""Measure the collectives of the live process group, as programs call them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from graphshard.calibrate_timing import seconds_together
from graphshard.gloo import all_gather_coalesced
from graphshard.graph import c10d
from graphshard.profile import KINDS, Link

# Bytes of the full tensors.
_SIZES = {"cpu": (2**12, 2**16, 2**20, 2**24), "cuda": (2**12, 2**16, 2**20, 2**24, 2**28)}
_REPEATS = 7
_COALESCED = 8

Slowest = Callable[[float, str], float]


def measure_links(
    device: str, show: Callable[[str], None], slowest: Slowest
) -> tuple[int, dict[str, Link], dict[str, float]]:
    """Number of nodes, links inside a node by kind of collective, and bytes/s of a rank between nodes.

    Args:
        slowest: the largest value of all ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 1, dict.fromkeys(KINDS, Link(1e9, 1e-4, 0.0)), {"isolated": 1e9}
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size())))
    nodes = dist.get_world_size() // local
    group = dist.group.WORLD
    if nodes > 1:
        group, _ = dist.new_subgroups(local)
    assert group is not None
    links = {}
    for kind in KINDS:
        show(f"{kind} of {local} ranks")
        links[kind] = _link(kind, device, group, slowest)
    if nodes == 1:
        return nodes, links, {"isolated": links["gather"].bandwidth}
    show("gather between nodes")
    assert dist.group.WORLD is not None
    bandwidth = _link("gather", device, dist.group.WORLD, slowest).bandwidth
    return nodes, links, {"isolated": bandwidth / local}


def _link(kind: str, device: str, group: dist.ProcessGroup, slowest: Slowest) -> Link:
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
    return Link(rounds * (ranks - 1) / ranks / per_byte, latency, extra)


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
    gather = all_gather_coalesced if device == "cpu" else c10d.all_gather_into_tensor_coalesced  # as the runtime does
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
