"""What regions are lowered with: Inductor, or nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Literal

from torch.fx import GraphModule

from graphshard._torch import use_boxed_calls
from graphshard.lower import Boxed, Compiler, reshape_views
from graphshard.program import Region

Backend = Literal["inductor", "eager"]


def compiler_for(backend: Backend) -> Compiler:
    """What `lower` compiles regions with."""
    if backend == "eager":
        return _all_eager
    from graphshard import inductor  # takes seconds to import, and not every process needs it

    return inductor.compile_all


def _all_eager(regions: dict[str, Region], show: Callable[[str], None]) -> Iterator[tuple[str, Boxed]]:
    for name, region in regions.items():
        yield name, compile_eager(region)


def compile_eager(region: Region) -> Boxed:
    """Run the region's ATen operators one by one, freeing each value at its last use."""
    graph = copy.deepcopy(region.module.graph)
    reshape_views(graph)
    use_boxed_calls(graph)
    forward: Boxed = GraphModule(region.module, graph).forward
    return forward
