"""Compile regions with Inductor."""

from __future__ import annotations

import copy
import logging
import os
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch._decomp import get_decompositions
from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx_inner, get_cpp_wrapper_config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.package import package_aoti
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard.ir.graph import interpolations
from graphshard.ir.params import memory_order
from graphshard.ir.program import Region
from graphshard.ir.sizes import expression, size_inputs
from graphshard.ir.strides import laid_out
from graphshard.lower.cache import writable_cache
from graphshard.lower.libraries import EXTERN_KERNELS, KeptRegion, Kernels, trimmed
from graphshard.lower.numbers import numbers_as_tensors
from graphshard.lower.operators import compile_operators, num_kernels, outputs_of
from graphshard.lower.packages import Package
from graphshard.lower.regions import Boxed

log = logging.getLogger(__name__)


def compile_all(regions: dict[str, Region], show: Callable[[str], None]) -> Iterator[tuple[str, Boxed]]:
    """Compile each region once per machine: its ranks start at different regions and meet in Inductor's cache."""
    names = list(regions)
    first = len(names) * _local_rank() // _local_world_size()
    with writable_cache() as cache:
        locks = os.path.join(cache, "graphshard-locks")
        os.makedirs(locks, exist_ok=True)
        for number, name in enumerate(names[first:] + names[:first], start=1):
            show(f"compile {name}, {number} of {len(names)}")
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
        return compile_operators(region)
    try:
        # Random numbers come from torch's generators, in program order, as in eager mode.
        with config.patch(fallback_random=True):
            module, inputs = decompose(region.module)
            compiled: Boxed = compile_fx_inner(module, inputs)
        return compiled
    except Exception as error:
        warnings.warn(
            f"Inductor cannot compile {name} ({region.key}); it runs as plain ATen operators. "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
        log.debug("%s:\n%s", name, region.text, exc_info=True)
        return compile_operators(region)


def kernels_of(fn: Boxed) -> Kernels | None:
    """The code of a compiled region as files can hold it; None if it holds more than code, or code for a GPU."""
    if isinstance(fn, KeptRegion):
        return fn.kernels
    if not isinstance(fn, CompiledFxGraph) or fn.device_types != {"cpu"}:
        return None
    holds = (fn.constants, fn.torchbind_constants, fn.inputs_to_check, fn.mutated_input_idxs, fn.guards_expr)
    if any(holds) or any(getattr(extern_kernels, n, None) is not f for n, f in EXTERN_KERNELS.items()):
        return None
    module = next((m for m in reversed(PyCodeCache.modules) if getattr(m, "key", "") == fn.cache_key), None)
    if module is None:
        return None
    libraries = {}
    for name, value in vars(module).items():
        file = getattr(getattr(value, "__self__", None), "__file__", None) or ""
        if isinstance(value, types.BuiltinFunctionType) and file.endswith(".so") and value.__name__ == "kernel":
            libraries[name] = Path(file).read_bytes()
    return trimmed(fn.source_code, libraries)


def package_all(regions: dict[str, Region], show: Callable[[str], None]) -> Iterator[tuple[str, Boxed]]:
    """Compile each region with AOTInductor into a `Package`; it cannot be called."""
    with writable_cache():
        for number, (name, region) in enumerate(regions.items(), start=1):
            show(f"compile {name}, {number} of {len(regions)}")
            yield name, package(region, name)


def package(region: Region, name: str) -> Package:
    """The region's AOTInductor package: the code of `compile_inductor`, called from C++ instead of Python.

    Both come from the same operators and options, so the kernels, and the bits they compute, are the same. A region
    that runs as ATen operators, or that AOTInductor cannot compile, has no package.
    """
    if num_kernels(region.module) == 1:
        return Package(problem="one operator, which nothing can be fused with")
    with tempfile.TemporaryDirectory(prefix="graphshard-") as directory:
        options: dict[str, Any] = {
            "fallback_random": True,
            "cpp_wrapper": True,
            "aot_inductor.package": True,
            "aot_inductor.output_path": directory,
            # A GPU's kernels go into the library, so that a package is one file.
            "aot_inductor.embed_kernel_binary": True,
            "aot_inductor.enable_line_tables": False,  # nobody debugs the few lines around the kernels
        }
        known = {key: value for key, value in options.items() if key in config.get_config_copy()}
        try:
            with config.patch(known), V.set_aot_compilation(True), config.patch(get_cpp_wrapper_config()):
                module, inputs = decompose(_without_sizes(region.module))
                compiled: Any = compile_fx_inner(module, inputs, cpp_wrapper=True)
            path = os.path.join(directory, "region.pt2")
            package_aoti(path, [file for file in compiled.filename if not str(file).endswith(".cpp")])
            return Package(Path(path).read_bytes())
        except Exception as error:
            log.debug("%s:\n%s", name, region.text, exc_info=True)
            return Package(problem=f"AOTInductor cannot compile it. {type(error).__name__}: {error}")


def _without_sizes(module: GraphModule) -> GraphModule:
    """The region without dynamic sizes as inputs, which AOTInductor does not take: they are read off its tensors."""
    graph = copy.deepcopy(module.graph)
    sizes = size_inputs(graph)
    tensors = [node for node in graph.find_nodes(op="placeholder") if node not in sizes.values()]
    dims = {expression(size): (n, dim) for n in tensors for dim, size in enumerate(n.meta["val"].shape)}
    for symbol, node in sizes.items():
        if symbol not in dims:
            raise NotImplementedError(f"the dynamic size {symbol} is no dimension of an input")
        with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
            read = graph.call_function(torch.ops.aten.sym_size.int, dims[symbol])
        read.meta = dict(node.meta)
        node.replace_all_uses_with(read)
        graph.erase_node(node)
    return GraphModule(module, graph)


def _decompositions() -> dict[Any, Any]:
    """Inductor's, and those of interpolation, which torch applies before Inductor where it traces a module itself."""
    return {**get_decompositions(interpolations()), **select_decomp_table()}


def decompose(module: GraphModule) -> tuple[GraphModule, list[Any]]:
    """A region in Inductor's decompositions, with the strides of its outputs pinned, which others rely on."""
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    outputs = outputs_of(module)
    with torch.no_grad(), outputs[0].fake_mode:
        decomposed = make_fx(numbers_as_tensors(module), _decompositions(), tracing_mode="real")(*inputs)
    (output,) = decomposed.graph.find_nodes(op="output")
    output.args = (tuple(map(_pinned, output.args[0], outputs)),)
    output.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    output.meta["original_output_strides"] = [value.stride() for value in outputs]
    return decomposed, inputs


def _pinned(result: Any, expected: Any) -> Any:
    """An output of a decomposed region in the strides that it had: Inductor would keep those of the decomposition."""
    if not isinstance(result, Node) or not isinstance(expected, torch.Tensor):
        return result
    extents = zip(expected.shape, result.meta["val"].stride(), expected.stride())
    if all(expression(size) == 1 or expression(made) == expression(stride) for size, made, stride in extents):
        return result
    return laid_out(result, memory_order(expected))
