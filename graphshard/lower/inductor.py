"""Compile regions with Inductor, in this process or as AOTInductor packages."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import operator
import os
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.compiler import config as compiler_config
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion

from graphshard.ir.graph import WRONG_IN_PYTHON, interpolations
from graphshard.ir.param_table import memory_order
from graphshard.ir.program import Region
from graphshard.ir.sizes import expression, size_inputs
from graphshard.ir.strides import laid_out
from graphshard.ir.subgraph import with_attributes
from graphshard.lower.aoti_package import Package
from graphshard.lower.background_warmup import VECTOR_INSTRUCTIONS
from graphshard.lower.batch_compile import Batch, load, pending_in
from graphshard.lower.eager import compile_operators, num_kernels, outputs_of, runs_as_it_is
from graphshard.lower.inductor_cache import writable_cache
from graphshard.lower.inductor_rewrites import (
    DIMS_ARE_LOST,
    WITHOUT_LOST_DIMS,
    OneHots,
    float_inputs,
    floats_as_tensors,
    has_one_hots,
    numbers_as_tensors,
    sums_as_sizes,
    unknown_in,
    with_dims,
    with_float_inputs,
)
from graphshard.lower.onednn_products import is_faster, products
from graphshard.lower.rank_work_split import Claim, Claims, cores_here, place_here, shares_of
from graphshard.lower.region_store import EXTERN_KERNELS, KeptRegion, Kernels, Store, store_here, trimmed
from graphshard.lower.regions import Boxed, Compiled
from graphshard.lower.triton_kernels import TRITON_COMPILER, Scopes
from graphshard.torch_compat.aot_autograd import TracingContext, fake_mode_of, get_decompositions, tracing
from graphshard.torch_compat.inductor_compiler import (
    CompiledFxGraph,
    PyCodeCache,
    V,
    compile_fx_inner,
    extern_kernels,
    get_cpp_wrapper_config,
    inductor_decompositions,
    package_aoti,
    select_decomp_table,
)
from graphshard.torch_compat.inductor_settings import inductor_config
from graphshard.torch_compat.torch_ops import distinct
from graphshard.utils.progress import check_cancelled

log = logging.getLogger(__name__)

# Left out of packages. The loader of torch 2.11 finds what it reads by the source of the wrapper; 2.12's was not tried.
_SOURCES = (".cpp",) if TorchVersion(torch.__version__) >= "2.13" else (".kernel.cpp",)
# Regions that a rank compiles, and functions that wait for their kernels.
_Begun = tuple[Claim, dict[str, Callable[[], Boxed]]]


def compile_all(regions: dict[str, Region], show: Callable[[str], None]) -> Compiled:
    """Compile each region once per machine: each rank takes a share, and finds what other ranks have kept."""
    place, ranks = place_here()
    cores = cores_here()
    shares = shares_of({name: len(region.module.graph.nodes) for name, region in regions.items()}, min(ranks, cores))
    first = place % len(shares)
    keys = {name: region.key for name, region in regions.items()}
    numbers = itertools.count(1)
    with (
        writable_cache() as cache,
        Batch(max(1, min(cores // ranks, inductor_config.compile_threads or 1))) as batch,
        contextlib.ExitStack() as stack,
    ):
        store = store_here()

        def begun(claim: Claim) -> _Begun:
            stack.enter_context(claim)
            functions = {}
            for name in claim.names:
                show(f"compile {name}, {next(numbers)} of {len(regions)}")
                functions[name] = _kept_or_generated(store, regions[name], name, batch)
                check_cancelled()
            batch.submit()
            return claim, functions

        def finished(claim: Claim, functions: dict[str, Callable[[], Boxed]]) -> Compiled:
            for name, finish in functions.items():
                made = finish()
                store.keep(regions[name], kernels_of(made), getattr(made, "source_code", ""))
                claim.release(name)
                yield name, made

        claims = Claims([*shares[first:], *shares[:first]], keys, Path(cache, "graphshard-locks"), show)
        # The code of a share is generated while the kernels of the one before are compiled.
        before: _Begun | None = None
        for claim in claims.free():
            now = begun(claim)
            if before is not None:
                yield from finished(*before)
            before = now
        if before is not None:
            yield from finished(*before)
        for claim in claims.others():
            yield from finished(*begun(claim))
        store.shrink()


def _kept_or_generated(store: Store, region: Region, name: str, batch: Batch) -> Callable[[], Boxed]:
    found = store.find(region)  # another rank may have put it there
    return generate(region, name, batch) if found is None else lambda: found


def compile_inductor(region: Region, name: str) -> Boxed:
    """Compile one region by `generate`."""
    with Batch(1) as batch:
        finish = generate(region, name, batch)
        batch.submit()
        return finish()


def generate(region: Region, name: str, batch: Batch) -> Callable[[], Boxed]:
    """Generate a region's code with Inductor, and return a function that loads it when its kernels are compiled.

    On failure the region's ATen operators run, with a warning that names it. A region of one operator, such as the copy
    into a packed buffer, has nothing to fuse and runs as it is.
    """
    if runs_as_it_is(region.module):
        return functools.partial(compile_operators, region)
    outputs = outputs_of(region.module)
    on_cpu = outputs[0].device.type == "cpu"
    loses = DIMS_ARE_LOST and not on_cpu
    options = known_options(WITHOUT_LOST_DIMS) if loses and size_inputs(region.module.graph) else {}
    (VECTOR_INSTRUCTIONS if on_cpu else TRITON_COMPILER).wait()
    try:
        # Random numbers come from torch's generators, in program order, as in eager mode.
        collecting = batch.collecting() if on_cpu else batch.triton.not_waiting()
        with inductor_config.patch(fallback_random=True, **options), collecting as scopes:
            module, inputs = decompose(floats_as_tensors(sums_as_sizes(region.module)))
            with _kept_by_inductor(region), whole_operators(), products():
                compiled: Boxed = compile_fx_inner(module, inputs)
        if unknown := unknown_in(getattr(compiled, "source_code", None) or ""):
            raise NameError(f"Inductor's code reads {', '.join(sorted(unknown))} before it makes it")
    except Exception as error:
        return functools.partial(_operators_instead, region, name, error)

    def finish() -> Boxed:
        for kernel in pending_in(scopes):
            kernel.wait()
        try:
            batch.triton.load(scopes) if isinstance(scopes, Scopes) else load(scopes)
        except Exception as error:
            return _operators_instead(region, name, error)
        run = with_float_inputs(compiled, float_inputs(region.module))
        return with_dims(run, outputs) if loses and not options else run

    return finish


@contextlib.contextmanager
def _kept_by_inductor(region: Region) -> Iterator[None]:
    """Let Inductor look for a graph's code in its cache, and keep it there, as it does for torch.compile.

    Its key has the graph, the inputs and the settings. The number of threads, which is in the code, is in the key of
    torch 2.13, and is added for all releases, as is the library of products. Not with dynamic sizes: conditions that
    Inductor finds out would be added to the program's.
    """
    if size_inputs(region.module.graph):
        yield
        return
    settings: Any = compiler_config
    own = f"{settings.cache_key_tag} graphshard {region.key} {torch.get_num_threads()} threads{is_faster() * ' onednn'}"
    mode = fake_mode_of(outputs_of(region.module)[0])
    with settings.patch(cache_key_tag=own), tracing(TracingContext(mode)):
        yield


def _operators_instead(region: Region, name: str, error: Exception) -> Boxed:
    # The rest of what Inductor says of a size that depends on values is pages long.
    said = str(error).partition("\n\n" if "data-dependent" in str(error) else "\n  target: ")[0]
    warnings.warn(
        f"Inductor cannot compile {name} ({region.key}); it runs as plain ATen operators. "
        f"{type(error).__name__}: {said}",
        stacklevel=2,
    )
    log.debug("%s:\n%s", name, region.text, exc_info=error)
    return compile_operators(region)


def kernels_of(fn: Boxed) -> Kernels | None:
    """Return the code of a compiled region for a file; None if it has more than code, or code for a GPU."""
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


def package_all(regions: dict[str, Region], show: Callable[[str], None]) -> Compiled:
    """Compile each region with AOTInductor into a `Package`; it cannot be called."""
    with writable_cache():
        for number, (name, region) in enumerate(regions.items(), start=1):
            show(f"compile {name}, {number} of {len(regions)}")
            yield name, package(region, name)


def package(region: Region, name: str) -> Package:
    """Make a region's AOTInductor package: the code of `compile_inductor`, called from C++ instead of Python.

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
            "aot_inductor.enable_line_tables": False,  # for the few lines around the kernels
        }
        try:
            with (
                inductor_config.patch(known_options(options)),
                V.set_aot_compilation(True),
                inductor_config.patch(get_cpp_wrapper_config()),
                whole_operators(),
                products(),
            ):
                module, inputs = decompose(_without_sizes(sums_as_sizes(region.module)))
                compiled: Any = compile_fx_inner(module, inputs, cpp_wrapper=True)
            path = os.path.join(directory, "region.pt2")
            package_aoti(path, [file for file in compiled.filename if not str(file).endswith(_SOURCES)])
            return Package(Path(path).read_bytes())
        except Exception as error:
            log.debug("%s:\n%s", name, region.text, exc_info=True)
            return Package(problem=f"AOTInductor cannot compile it. {type(error).__name__}: {error}")


def known_options(options: dict[str, Any]) -> dict[str, Any]:
    """Select the options that this release of Inductor has."""
    known = inductor_config.get_config_copy()
    return {name: value for name, value in options.items() if name in known}


def _without_sizes(module: GraphModule) -> GraphModule:
    """Read dynamic sizes off the tensors of a region instead of inputs, which AOTInductor does not take."""
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
    """Return Inductor's decompositions, and interpolation's, which torch applies before where it traces a module."""
    table = {**get_decompositions(interpolations()), **select_decomp_table()}
    return {op: function for op, function in table.items() if op not in WRONG_IN_PYTHON}


@contextlib.contextmanager
def whole_operators() -> Iterator[None]:
    """Let Inductor call some operators as they are: it refuses to where it has decompositions."""
    taken = {op: inductor_decompositions.pop(op) for op in WRONG_IN_PYTHON if op in inductor_decompositions}
    try:
        yield
    finally:
        inductor_decompositions.update(taken)


def decompose(module: GraphModule) -> tuple[GraphModule, list[Any]]:
    """Trace a region in Inductor's decompositions, with the strides of its outputs pinned, and return its inputs."""
    values = (node.meta["val"] for node in module.graph.find_nodes(op="placeholder"))
    inputs = distinct(values, torch.Tensor.detach)  # make_fx knows inputs by these objects
    outputs = outputs_of(module)
    with torch.no_grad(), outputs[0].fake_mode:
        decomposed = make_fx(with_attributes(numbers_as_tensors(module)), _decompositions(), tracing_mode="real")(
            *inputs
        )
        if has_one_hots(decomposed.graph):
            decomposed = make_fx(OneHots(decomposed).run, _decompositions(), tracing_mode="real")(*inputs)
    for part in decomposed.graph.find_nodes(op="call_function", target=operator.getitem):
        if not part.users:  # for the CPU there is no logsumexp of flex_attention
            decomposed.graph.erase_node(part)
    (output,) = decomposed.graph.find_nodes(op="output")
    output.args = (tuple(map(_pinned, output.args[0], outputs)),)
    output.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    output.meta["original_output_strides"] = [value.stride() for value in outputs]
    return decomposed, inputs


def _pinned(result: Any, expected: Any) -> Any:
    """Give an output of a decomposed region its strides: Inductor would keep the decomposition's."""
    if not isinstance(result, Node) or not isinstance(expected, torch.Tensor):
        return result
    extents = zip(expected.shape, result.meta["val"].stride(), expected.stride())
    if all(expression(size) == 1 or expression(made) == expression(stride) for size, made, stride in extents):
        return result
    return laid_out(result, memory_order(expected))
