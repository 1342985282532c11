"""Measure the collectives of the live process group, as programs call them."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from graphshard.cost.profile import Link, Network
from graphshard.cost.profile_checks import KINDS
from graphshard.ir.graph import c10d
from graphshard.ir.plan import SMALL
from graphshard.measure.chip import slowest
from graphshard.measure.timing import seconds_together
from graphshard.runtime.gloo import all_gather_coalesced

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
    inside: dict[str, Link]
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


def _speed(link: Link) -> float:
    """Bytes/s of a message of a megabyte."""
    return 2**20 / (link.latency + 2**20 / link.bandwidth)


def measure_links(device: str, show: Callable[[str], None]) -> Links:
    """Measure once; all ranks of the default process group call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Links(1, dict.fromkeys(KINDS, Link(1e9, 1e-4, 0.0)), {"isolated": _of_ranks(1e9)}, 0.0)
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


def _link(kind: str, device: str, group: dist.ProcessGroup) -> Link:
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
