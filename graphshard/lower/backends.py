"""What regions are lowered with: Inductor, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from graphshard.ir.program import Region
from graphshard.lower.operators import compile_eager
from graphshard.lower.regions import Boxed, Compiler

Backend = Literal["inductor", "eager"]


def compiler_for(backend: Backend) -> Compiler:
    """What `lower` compiles regions with."""
    if backend == "eager":
        return _all_eager
    from graphshard.lower import inductor  # takes seconds to import, and not every process needs it

    return inductor.compile_all


def _all_eager(regions: dict[str, Region], show: Callable[[str], None]) -> Iterator[tuple[str, Boxed]]:
    for name, region in regions.items():
        yield name, compile_eager(region)
