"""Part "delays": how late NCCL's kernels start at normal and at high priority of their stream, from traces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from benchmarks.gpu.settings import POLICY, Setup, Size, stepper
from benchmarks.gpu.table import Emit, Row
from benchmarks.gpu.workers import said
from tests.ranks import RankPool

_LIMIT = 120.0
_WARMUP = 3


def measure(setup: Setup, emit: Emit, folder: Path) -> None:
    """Trace a step at each priority, on all GPUs or on two ranks of one.

    Args:
        folder: for the traces.
    """
    number = max(torch.cuda.device_count(), 2)
    size = setup.sizes()[0]
    for priority in ("normal", "high"):
        row = Row("delays", f"{size}, {number} ranks", f"{priority} priority of collectives")
        path = str(folder / f"trace_{priority}.json")
        try:
            with RankPool() as pool:
                ranks = pool.world(number, "gloo" if setup.is_dry else "nccl")
                ranks.run(_traced, setup, size, priority == "high", path, timeout=_LIMIT)
        except Exception as error:
            emit(replace(row, failed=True, note=said(error).splitlines()[0]))
            continue
        emit(summary(launch_delays(json.loads(Path(path).read_text())["traceEvents"]), row, on_cpu=setup.is_dry))


def _traced(rank: int, world_size: int, setup: Setup, size: Size, high: bool, path: str) -> None:
    options = None
    if not setup.is_dry:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high)
    group = dist.new_group(pg_options=options)
    mesh = DeviceMesh.from_group(group, setup.device)
    model = graphshard.compile(size.model(setup.device), mesh, mp_policy=POLICY, backend=setup.backend)
    step = stepper(model, size.tokens(setup.device, seed=rank), torch.enable_grad)
    for _ in range(_WARMUP):
        step()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if not setup.is_dry:
        torch.cuda.synchronize()
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        step()
        if not setup.is_dry:
            torch.cuda.synchronize()
    if rank == 0:
        profile.export_chrome_trace(path)


def launch_delays(events: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return for each kernel of NCCL the seconds from its launch, or the end of the one before it, to its start.

    That includes the time in which its inputs are computed, which is the same at both priorities.
    """
    events = [event for event in events if "correlation" in event.get("args", {})]
    launched = {e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    kernels = [e for e in events if e.get("cat") == "kernel" and e["name"].startswith("nccl")]
    until: dict[Any, float] = {}
    found = []
    for kernel in sorted(kernels, key=lambda kernel: float(kernel["ts"])):
        stream, start = kernel["args"].get("stream"), kernel["ts"]
        if (launch := launched.get(kernel["args"]["correlation"])) is not None:
            found.append(max(start - max(launch, until.get(stream, launch)), 0.0) * 1e-6)
        until[stream] = start + kernel["dur"]
    return found


def summary(delays: list[float], row: Row, *, on_cpu: bool) -> Row:
    """Return the row of one priority; `step` is the median delay."""
    if not delays:
        note = "a CPU has no kernels of NCCL to time" if on_cpu else "the trace has no kernels of NCCL"
        return replace(row, failed=not on_cpu, note=note)
    note = f"median delay of {len(delays)} kernels of NCCL, at most {max(delays) * 1e3:.2f} ms"
    return replace(row, step=median(delays), note=note)
