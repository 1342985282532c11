"""Compared ways to train: graphshard's, FSDP2's, `torch.compile` and DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import graphshard
from benchmarks.gpu.settings import POLICY, Setup, Step, stepper
from graphshard.cli._bench_command import with_fsdp2
from graphshard.module.compiled_module import CudaGraphsChoice
from tests.graphs import on_cpu

Make: TypeAlias = Callable[[nn.Module, DeviceMesh, torch.Tensor], Step]
"""Makes a model ready, and returns what trains a step with these tokens."""

_GRAPHS, _WHOLE, _EAGER = "graphshard, CUDA graphs", "FSDP2, compiled whole", "graphshard, backend eager"
_PAY, _ALONE = "graphshard, CUDA graphs where they pay", "torch.compile, not sharded"
# Worlds of the variants that are not measured in all.
_ONLY = {**dict.fromkeys((_GRAPHS, _PAY, _WHOLE, _EAGER), 8), _ALONE: 1}


def names(num_ranks: int) -> list[str]:
    """Return the variants to measure with this number of ranks: with 1 and 64, only the most informative."""
    return [name for name in variants(Setup.of(dry=True)) if _ONLY.get(name, num_ranks) == num_ranks]


def variants(setup: Setup) -> dict[str, Make]:
    """Return all variants by name."""
    nothing = contextlib.nullcontext

    def ours(backend: str) -> Make:
        def ready(model: nn.Module, mesh: DeviceMesh, tokens: torch.Tensor) -> Step:
            return stepper(graphshard.compile(model, mesh, mp_policy=POLICY, backend=backend), tokens, nothing)

        return ready

    def replayed(choice: CudaGraphsChoice) -> Make:
        def ready(model: nn.Module, mesh: DeviceMesh, tokens: torch.Tensor) -> Step:
            with on_cpu() if setup.is_dry else nothing():
                made = graphshard.compile(model, mesh, mp_policy=POLICY, backend=setup.backend, cuda_graphs=choice)
            return stepper(made, tokens, nothing)

        return ready

    def whole_step(model: nn.Module, mesh: DeviceMesh, tokens: torch.Tensor) -> Step:
        ready = graphshard.compile(model, mesh, mp_policy=POLICY, backend=setup.backend)
        step = graphshard.compile_step(ready, torch.optim.AdamW(ready.parameters(), lr=1e-4, fused=True))
        return lambda: step(tokens[0], tokens[1])

    def fsdp2(compiled: str) -> Make:
        def ready(model: nn.Module, mesh: DeviceMesh, tokens: torch.Tensor) -> Step:
            with_fsdp2(model, mesh, compiled=compiled, compiler=setup.compiler, mp_policy=POLICY)
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
        "FSDP2": fsdp2(""),
        "graphshard": ours(setup.backend),
        _GRAPHS: replayed(True),
        _PAY: replayed("auto"),
        "graphshard, compile_step": whole_step,
        _EAGER: ours("eager"),
        "FSDP2, compiled blocks": fsdp2("blocks"),
        _WHOLE: fsdp2("whole"),
        _ALONE: plain,
        "DDP": ddp,
    }


def _reduced_at_once(_, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, which are text here
    """Complete DDP's bucket without other ranks; an all-reduce of a fake group has no result."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer().div_(dist.get_world_size()))
    return done
