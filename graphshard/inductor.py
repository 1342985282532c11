"""Compile regions with Inductor."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from filelock import FileLock
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses import FakeTensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard.backends import compile_eager
from graphshard.graph import is_part, is_view, restride
from graphshard.lower import Boxed
from graphshard.program import Region
from graphshard.sizes import evaluate, expression, is_size, size_inputs

log = logging.getLogger(__name__)


def compile_all(regions: dict[str, Region], show: Callable[[str], None]) -> Iterator[tuple[str, Boxed]]:
    """Compile each region once per machine: its ranks start at different regions and meet in Inductor's cache."""
    names = list(regions)
    first = len(names) * _local_rank() // _local_world_size()
    locks = os.path.join(cache_dir(), "graphshard-locks")
    os.makedirs(locks, exist_ok=True)
    for done, name in enumerate(names[first:] + names[:first]):
        show(f"compile {name}, {done} of {len(names)} done")
        with FileLock(os.path.join(locks, f"{regions[name].key}.lock")):
            yield name, compile_inductor(regions[name], name)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _local_world_size() -> int:
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def compile_inductor(region: Region, name: str) -> Boxed:
    """Compile the region with Inductor; on failure run its ATen operators, with a warning that names it.

    A region of one operator, such as the copy into a packed buffer, has nothing to fuse and runs as it is.
    """
    if num_kernels(region.module) == 1:
        return _with_strides(compile_eager(region), region.module)
    try:
        # Random numbers come from torch's generators, in program order, as in eager mode.
        with config.patch(fallback_random=True):
            module, inputs = _decompose(region.module)
            compiled: Boxed = compile_fx_inner(module, inputs)
        return compiled
    except Exception as error:
        warnings.warn(
            f"Inductor cannot compile {name} ({region.key}); it runs as plain ATen operators. "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
        log.debug("%s:\n%s", name, region.text, exc_info=True)
        return _with_strides(compile_eager(region), region.module)


def num_kernels(module: GraphModule) -> int:
    """Operators of a region that compute or copy."""
    calls = (node for node in module.graph.nodes if node.op == "call_function" and not is_size(node))
    return sum(not is_view(node) and not is_part(node) for node in calls)


def _with_strides(fn: Boxed, module: GraphModule) -> Boxed:
    """Give each result the strides that compiled regions rely on; some operators return others."""
    placeholders = module.graph.find_nodes(op="placeholder")
    sizes = {symbol: placeholders.index(node) for symbol, node in size_inputs(module.graph).items()}
    strides = [[expression(size) for size in value.stride()] for value in _outputs(module)]

    def call(inputs: list[Any]) -> list[torch.Tensor]:
        env = {symbol: inputs[index] for symbol, index in sizes.items()}
        values = zip(fn(inputs), strides, strict=True)
        return [restride(value, tuple(evaluate(size, env) for size in stride)) for value, stride in values]

    return call


def _decompose(module: GraphModule) -> tuple[GraphModule, list[Any]]:
    """Inductor's decompositions, with the strides of the outputs pinned: the next region relies on them."""
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    outputs = _outputs(module)
    with torch.no_grad(), outputs[0].fake_mode:
        decomposed = make_fx(module, select_decomp_table(), tracing_mode="real")(*inputs)
    (output,) = decomposed.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    output.meta["original_output_strides"] = [value.stride() for value in outputs]
    return decomposed, inputs


def _outputs(module: GraphModule) -> list[FakeTensor]:
    (output,) = module.graph.find_nodes(op="output")
    return [node.meta["val"] for node in output.args[0]]
