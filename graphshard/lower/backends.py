"""What regions are lowered with: Inductor, or nothing."""

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
    """What `lower` compiles regions with."""
    return _all_eager if backend == "eager" else _inductors


def begin_compiling(backend: Backend, device: torch.device) -> None:
    """Start what a backend does once before it compiles, beside other work; returns at once.

    It takes a few seconds of a core with an empty cache, and one otherwise. Where regions were kept nothing is begun:
    there may be nothing to compile.
    """
    if backend != "inductor":
        return
    if device.type == "cuda":
        from graphshard.lower import triton_internals

        triton_internals.begin()
    elif not store_here():
        from graphshard.lower import cpu_internals

        cpu_internals.begin()


def _all_eager(regions: dict[str, Region], show: Callable[[str], None]) -> Compiled:
    for name, region in regions.items():
        yield name, compile_eager(region)


def _inductors(regions: dict[str, Region], show: Callable[[str], None]) -> Compiled:
    """What was kept, and then what has to be compiled."""
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
