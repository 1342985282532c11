"""Backends of regions: Inductor, or operators one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from graphshard.ir.program import Region
from graphshard.lower.eager import compile_eager, compile_operators, runs_as_it_is
from graphshard.lower.region_store import store_here
from graphshard.lower.regions import Compiled, Compiler

Backend = Literal["inductor", "eager"]


def compiler_for(backend: Backend) -> Compiler:
    """Return the compiler that `lower` takes."""
    return _compile_eager if backend == "eager" else _compile_inductor


def begin_compiling(backend: Backend, device: torch.device) -> None:
    """Start in a thread what a backend does once before it compiles: a few seconds of a core with an empty cache.

    Where code of regions was kept nothing is begun: there may be nothing to compile.
    """
    if backend != "inductor" or store_here().has(device.type):
        return
    if device.type == "cuda":
        from graphshard.lower._batch_compile import TRITON_COMPILER

        TRITON_COMPILER.begin()
    else:
        from graphshard.lower._background_warmup import VECTOR_INSTRUCTIONS

        VECTOR_INSTRUCTIONS.begin()


def _compile_eager(regions: dict[str, Region], show: Callable[[str], None]) -> Compiled:
    yield from ((name, compile_eager(region)) for name, region in regions.items())


def _compile_inductor(regions: dict[str, Region], show: Callable[[str], None]) -> Compiled:
    """Yield the regions that were kept, and compile the others."""
    store, missing = store_here(), {}
    for name, region in regions.items():
        if runs_as_it_is(region.module):
            yield name, compile_operators(region)
        elif (found := store.find(region)) is not None:
            yield name, found
        else:
            missing[name] = region
    if missing:
        from graphshard.lower import inductor  # takes a second to import, and not every process needs it

        yield from inductor.compile_all(missing, show)
