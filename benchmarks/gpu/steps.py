"""Part "steps": graphshard beside FSDP2, compiled FSDP2, `torch.compile` and DDP, taking turns in one process.

As rank 0 of 8 and of 64 with torch's fake process group, compute, copies and memory are those of such a rank, and
communication takes no time. What is gathered there has no meaning, so losses have none.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import graphshard
from benchmarks.gpu.settings import POLICY, WORLDS, Setup, Size, Step, stepper, world
from benchmarks.gpu.table import Emit, Row
from graphshard.module.replaying import CudaGraphsChoice
from graphshard.runtime.recording import Clock, clock_of
from tests.graphs import on_cpu

_WARMUP = 2


def measure(setup: Setup, emit: Emit, seconds: float) -> None:
    """All settings, those that say most first; those for which no time is left are named.

    Args:
        seconds: for all of them. A setting begins while as many are left as the longest one took.
    """
    # Several variants compile the same functions; torch would go on without compiling, with a word in the log.
    torch._dynamo.config.recompile_limit = 64
    end = time.monotonic() + seconds
    longest = 0.0
    seen: set[Size] = set()
    for size, num_ranks in settings(setup):
        began = time.monotonic()
        row = Row("steps", f"{size}, {ranks(num_ranks)}")
        if began + longest > end:
            emit(replace(row, note="left out: no time"))
            continue
        print(row.setting, flush=True)
        try:
            with world(setup, num_ranks) as mesh:
                _setting(setup, size, mesh, row, emit, note="" if size not in seen else "Inductor's cache is warm")
        except Exception as error:
            emit(replace(row, failed=True, note=said(error)))
        seen.add(size)
        _forget(setup)
        longest = max(longest, time.monotonic() - began)


def settings(setup: Setup) -> Iterator[tuple[Size, int]]:
    """A rank of eight first, with the largest size first; in a dry run each size and each world once."""
    sizes = setup.sizes()[::-1]
    if setup.is_dry:
        yield from zip(sizes, WORLDS, strict=True)
        return
    one, eight, more = WORLDS
    yield from ((size, num_ranks) for num_ranks in (eight, one, more) for size in sizes)


def ranks(number: int) -> str:
    """As rows say it."""
    return "one rank" if number == 1 else f"rank 0 of {number}"


def said(error: BaseException) -> str:
    """An error in a line of the table; the traceback goes to the log."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error)[:200]}"


def variants(setup: Setup) -> dict[str, Callable[[nn.Module, DeviceMesh, torch.Tensor], Step]]:
    """Ways to make a model ready, and to train a step with it, by name."""
    nothing = contextlib.nullcontext

    def ours(backend: str) -> Callable[[nn.Module, DeviceMesh, torch.Tensor], Step]:
        def ready(model: nn.Module, mesh: DeviceMesh, tokens: torch.Tensor) -> Step:
            return stepper(graphshard.compile(model, mesh, mp_policy=POLICY, backend=backend), tokens, nothing)

        return ready

    def replayed(choice: CudaGraphsChoice) -> Callable[[nn.Module, DeviceMesh, torch.Tensor], Step]:
        def ready(model: nn.Module, mesh: DeviceMesh, tokens: torch.Tensor) -> Step:
            with on_cpu() if setup.is_dry else nothing():
                made = graphshard.compile(model, mesh, mp_policy=POLICY, backend=setup.backend, cuda_graphs=choice)
            return stepper(made, tokens, nothing)

        return ready

    def whole_step(model: nn.Module, mesh: DeviceMesh, tokens: torch.Tensor) -> Step:
        ready = graphshard.compile(model, mesh, mp_policy=POLICY, backend=setup.backend)
        step = graphshard.compile_step(ready, torch.optim.AdamW(ready.parameters(), lr=1e-4, fused=True))
        return lambda: step(tokens[0], tokens[1])

    def fsdp2(compiled: str) -> Callable[[nn.Module, DeviceMesh, torch.Tensor], Step]:
        def ready(model: nn.Module, mesh: DeviceMesh, tokens: torch.Tensor) -> Step:
            for block in model.layers:
                if compiled == "blocks":
                    block.compile(backend=setup.compiler)
                fully_shard(block, mesh=mesh, mp_policy=POLICY)
            fully_shard(model, mesh=mesh, mp_policy=POLICY)
            if compiled == "whole":
                model.compile(backend=setup.compiler)
            return stepper(model, tokens, nothing)

        return ready

    def plain(model: nn.Module, mesh: DeviceMesh, tokens: torch.Tensor) -> Step:
        model.compile(backend=setup.compiler)
        return stepper(model, tokens, setup.autocast)

    def ddp(model: nn.Module, mesh: DeviceMesh, tokens: torch.Tensor) -> Step:
        replicated = DistributedDataParallel(model, process_group=mesh.get_group())
        if mesh.size() > 1:
            replicated.register_comm_hook(None, _reduced_at_once)
        return stepper(replicated, tokens, setup.autocast)

    return {
        "FSDP2": fsdp2("nothing"),
        "graphshard": ours(setup.backend),
        "graphshard, CUDA graphs": replayed(True),
        "graphshard, CUDA graphs where they pay": replayed("auto"),
        "graphshard, compile_step": whole_step,
        "graphshard, backend eager": ours("eager"),
        "FSDP2, compiled blocks": fsdp2("blocks"),
        "FSDP2, compiled whole": fsdp2("whole"),
        "torch.compile, not sharded": plain,
        "DDP": ddp,
    }


def _reduced_at_once(_, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, which are text here
    """What DDP does with a bucket where there is nobody to send it to; an all-reduce of a fake group has no result."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer().div_(dist.get_world_size()))
    return done


@dataclass
class _Ready:
    """A variant that has trained its first steps.

    Attributes:
        held: bytes that it keeps between steps.
    """

    step: Step
    row: Row
    held: int = 0
    times: list[float] = field(default_factory=list)


def _setting(setup: Setup, size: Size, mesh: DeviceMesh, row: Row, emit: Emit, note: str) -> None:
    clock = clock_of(torch.device(setup.device))
    ready = []
    for name, make in variants(setup).items():
        if name.startswith("torch.compile") and mesh.size() > 1:
            continue  # it is as on one rank
        row = replace(row, variant=name, note=note)
        print(f"  {name}", flush=True)
        try:
            ready.append(_first_steps(setup, size, mesh, make, row, clock))
        except Exception as error:
            emit(replace(row, failed=True, note=said(error)))
            _forget(setup)
    print(f"  {setup.turns} turns of {len(ready)}", flush=True)
    for _ in range(setup.turns):
        for variant in ready:
            clock.finish()
            began = clock.stamp()
            for _ in range(setup.steps):
                variant.step()
            ended = clock.stamp()
            clock.finish()
            variant.times.append(clock.seconds(began, ended) / setup.steps)
    for variant in ready:
        peak = _peak(setup, variant)
        emit(replace(variant.row, step=median(variant.times), peak=peak, kernels=_kernels(setup, variant.step)))


def _first_steps(
    setup: Setup, size: Size, mesh: DeviceMesh, make: Callable[..., Step], row: Row, clock: Clock
) -> _Ready:
    _forget(setup)
    before = _allocated(setup)
    model, tokens = size.model(setup.device), size.tokens(setup.device)
    clock.finish()
    began = time.perf_counter()
    step = make(model, mesh, tokens)
    loss = step()
    clock.finish()
    first = time.perf_counter() - began
    if mesh.size() == 1 and not torch.isfinite(loss):
        raise ValueError(f"the loss of the first step is {loss.item()}")
    for _ in range(_WARMUP):
        step()
    clock.finish()
    del model, loss
    gc.collect()
    return _Ready(step, replace(row, first=first), _allocated(setup) - before)


def _allocated(setup: Setup) -> int:
    return 0 if setup.is_dry else torch.cuda.memory_allocated()


def _peak(setup: Setup, variant: _Ready) -> int | None:
    """Most bytes in a step: what the variant keeps, and what a step has beyond; the others' are not counted."""
    if setup.is_dry:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    variant.step()
    torch.cuda.synchronize()
    return variant.held + torch.cuda.max_memory_allocated() - before


def _kernels(setup: Setup, step: Step) -> int | None:
    """How many kernels a step runs on the GPU, without copies and fills by the driver."""
    if setup.is_dry:
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return num_kernels(profile.events())


def num_kernels(events: Any) -> int:
    """Of a profiler's events."""
    names = [event.name for event in events if event.device_type == DeviceType.CUDA]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names)


def _forget(setup: Setup) -> None:
    gc.collect()
    if not setup.is_dry:
        torch.cuda.empty_cache()
