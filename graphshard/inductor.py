"""Compile a region: with Inductor, or as the ATen operators it consists of."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any, Literal

import torch
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard._torch import use_boxed_calls
from graphshard.lower import Boxed, Compiler, reshape_views
from graphshard.program import Region

log = logging.getLogger(__name__)

Backend = Literal["inductor", "eager"]


def compiler_for(backend: Backend) -> Compiler:
    """The function that makes a region callable."""
    return compile_inductor if backend == "inductor" else compile_eager


def compile_eager(region: Region, name: str) -> Boxed:
    """Run the region's ATen operators one by one, freeing each value at its last use."""
    graph = copy.deepcopy(region.module.graph)
    reshape_views(graph)
    use_boxed_calls(graph)
    return GraphModule(region.module, graph)


def compile_inductor(region: Region, name: str) -> Boxed:
    """Compile the region with Inductor; on failure run its ATen operators, with a warning that names it."""
    try:
        module, inputs = _decompose(region.module)
        # Random numbers come from torch's generators, in program order, as in eager mode.
        with config.patch(fallback_random=True):
            compiled: Boxed = compile_fx_inner(module, inputs)
        return compiled
    except Exception as error:
        warnings.warn(
            f"Inductor cannot compile {name} ({region.key}); it runs as plain ATen operators. "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
        log.debug("%s:\n%s", name, region.text, exc_info=True)
        return compile_eager(region, name)


def _decompose(module: GraphModule) -> tuple[GraphModule, list[Any]]:
    """Inductor's decompositions, with the strides of the outputs pinned: the next region relies on them."""
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        decomposed = make_fx(module, select_decomp_table(), tracing_mode="real")(*inputs)
    (old,), (output,) = (m.graph.find_nodes(op="output") for m in (module, decomposed))
    output.meta["user_visible_output_idxs"] = list(range(len(old.args[0])))
    output.meta["original_output_strides"] = [node.meta["val"].stride() for node in old.args[0]]
    return decomposed, inputs
