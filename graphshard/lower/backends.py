"""What regions are lowered with: Inductor, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from graphshard.ir.program import Region
from graphshard.lower.operators import compile_eager
from graphshard.lower.regions import Compiled, Compiler

Backend = Literal["inductor", "eager"]


def compiler_for(backend: Backend) -> Compiler:
    """What `lower` compiles regions with."""
    if backend == "eager":
        return _all_eager
    from graphshard.lower import inductor  # takes seconds to import, and not every process needs it

    return inductor.compile_all


def begin_compiling(backend: Backend, device: torch.device) -> None:
    """Start what a backend does once before it compiles, beside other work; returns at once.

    It takes a few seconds of a core with an empty cache, and one otherwise.
    """
    if backend == "inductor" and device.type == "cpu":
        from graphshard.lower import cpp_internals

        cpp_internals.begin()


def _all_eager(regions: dict[str, Region], show: Callable[[str], None]) -> Compiled:
    for name, region in regions.items():
        yield name, compile_eager(region)
