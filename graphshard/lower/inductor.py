"""Compile regions with Inductor, for this process or another one.

Matrix products in float32 are oneDNN's on processors that are not Intel's, for which MKL has slower kernels.

    mm(x, w.t())    mkldnn._linear_pointwise(x, w)          forward
    mm(g, w)        mkldnn._linear_pointwise(g, w.t())      gradient of the input
    mm(g.t(), x)    as it is: oneDNN would copy both        gradient of the weight

On an AMD EPYC with AVX-512 these take 0.75 to 1.0 of MKL's time with one and with two threads from 2^24 multiplications
on, and are slower below (`python -m benchmarks.products`). Inductor itself has them for weights that are constants.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.compiler import config as compiler_config
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard.ir.graph import WRONG_IN_PYTHON, aten, interpolations
from graphshard.ir.param_table import memory_order
from graphshard.ir.program import Region
from graphshard.ir.sizes import expression, size_inputs
from graphshard.ir.strides import laid_out
from graphshard.ir.subgraph import with_attributes
from graphshard.lower._background_warmup import VECTOR_INSTRUCTIONS
from graphshard.lower._batch_compile import TRITON_COMPILER, Batch, load, pending_in
from graphshard.lower.cubin_kernels import CubinKernel, KernelVariant
from graphshard.lower.eager import compile_operators, outputs_of, runs_as_it_is
from graphshard.lower.inductor_cache import (
    Claim,
    Claims,
    cores_here,
    exchange_here,
    place_here,
    shares_of,
    writable_cache,
)
from graphshard.lower.inductor_rewrites import (
    DIMS_ARE_LOST,
    WITHOUT_LOST_DIMS,
    OneHots,
    float_inputs,
    floats_as_tensors,
    has_one_hots,
    sums_as_sizes,
    unknown_in,
    with_dims,
    with_float_inputs,
)
from graphshard.lower.region_store import EXTERN_KERNELS, KeptRegion, Kernels, Package, store_here, trimmed
from graphshard.lower.regions import Boxed, Compiled, compile_seconds
from graphshard.torch_compat.aot_autograd import TracingContext, fake_mode_of, get_decompositions, tracing
from graphshard.torch_compat.inductor_compiler import (
    CompiledFxGraph,
    GridExpr,
    LinearUnary,
    PyCodeCache,
    TensorBox,
    V,
    compile_fx_inner,
    extern_kernels,
    inductor_decompositions,
    lowerings,
    select_decomp_table,
)
from graphshard.torch_compat.inductor_settings import inductor_config
from graphshard.torch_compat.torch_ops import distinct
from graphshard.utils.environment_fingerprint import vendor
from graphshard.utils.progress import check_cancelled

# Multiplications of the smallest product that is faster.
LEAST = 1 << 24


def is_faster() -> bool:
    """Return whether oneDNN computes large products on this machine."""
    onednn: Any = torch.backends.mkldnn
    both = torch.backends.mkl.is_available() and onednn.is_available() and onednn.enabled
    return bool(both) and vendor() not in ("", "GenuineIntel")


@contextlib.contextmanager
def products() -> Iterator[None]:
    """Let Inductor generate calls of oneDNN for products that are faster."""
    own = lowerings[aten.mm.default]
    if is_faster():
        lowerings[aten.mm.default] = functools.partial(_lower, own)
    try:
        yield
    finally:
        lowerings[aten.mm.default] = own


class _Product(LinearUnary):
    """Inductor's node for a linear layer, which takes a transposed weight as it is: oneDNN needs no copy of it."""

    @classmethod
    def require_contiguous(cls, x: Any) -> Any:
        return x


def _lower(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _suits(V.graph.current_node):
        return own(*args, **kwargs)
    left, right = args
    return TensorBox.create(_Product.create(left, lowerings[aten.permute.default](right, [1, 0]), None, "none", [], ""))


def _suits(node: Node) -> bool:
    if node.target is not aten.mm.default or len(node.args) != 2 or node.kwargs:
        return False
    if inductor_config.max_autotune or inductor_config.max_autotune_gemm:  # the user wants Inductor's fastest kernel
        return False
    left, right = (arg.meta["val"] for arg in node.args if isinstance(arg, Node))
    sizes = (*left.shape, right.shape[1])
    if left.device.type != "cpu" or left.dtype != torch.float32 or not all(isinstance(size, int) for size in sizes):
        return False
    rows, inner, columns = sizes
    is_whole = left.is_contiguous() and (right.is_contiguous() or right.t().is_contiguous())
    return bool(is_whole) and rows * inner * columns >= LEAST


log = logging.getLogger(__name__)

# Regions that a rank compiles, and functions that wait for their kernels.
_Begun = tuple[Claim, dict[str, Callable[[], Boxed]]]


def compile_all(regions: dict[str, Region], show: Callable[[str], None]) -> Compiled:
    """Compile each region once: each rank takes a share, and finds what other ranks, or machines, have kept."""
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
        store, exchange = store_here(), exchange_here()
        files = {name: store.name(region) for name, region in regions.items()} if exchange is not None else {}
        elsewhere: list[tuple[Claim, str]] = []  # what other machines compile

        def begun(claim: Claim) -> _Begun:
            stack.enter_context(claim)
            functions: dict[str, Callable[[], Boxed]] = {}
            for name in claim.names:
                show(f"compile {name}, {next(numbers)} of {len(regions)}")
                start, kept = time.perf_counter(), store.find(regions[name])  # another rank may have put it there
                if kept is not None:
                    functions[name] = functools.partial(_same, kept)
                elif exchange is not None and files[name] and not exchange.claim(files[name]):
                    elsewhere.append((claim, name))
                else:
                    functions[name] = generate(regions[name], name, batch)
                compile_seconds[keys[name]] = time.perf_counter() - start
                check_cancelled()
            batch.submit()
            return claim, functions

        def finished(claim: Claim, functions: dict[str, Callable[[], Boxed]]) -> Compiled:
            for name, finish in functions.items():
                start = time.perf_counter()
                made = finish()
                compile_seconds[keys[name]] += time.perf_counter() - start
                shown, on_gpu = getattr(made, "source_code", ""), gpu_kernels_of(made)
                store.keep(regions[name], kernels_of(made) or on_gpu, shown)
                if on_gpu is not None:
                    when_tuned(made, on_gpu, functools.partial(store.keep, regions[name], shown=shown, again=True))
                if exchange is not None and files[name] and not isinstance(made, KeptRegion):
                    exchange.give(files[name], store.content(regions[name]))
                claim.release(name)
                yield name, made

        def received() -> Compiled:
            """Wait for other machines; only when this rank's regions are there for them."""
            while elsewhere:
                claim, name = elsewhere.pop()
                assert exchange is not None
                show(f"wait for {name}, which another machine compiles")
                made = store.receive(regions[name], exchange.take(files[name]))
                finish = generate(regions[name], name, batch) if made is None else functools.partial(_same, made)
                batch.submit()
                yield from finished(claim, {name: finish})

        claims = Claims([*shares[first:], *shares[:first]], keys, Path(cache, "graphshard-locks"), show)
        # The code of a share is generated while the kernels of the one before are compiled.
        before: list[_Begun] = []
        for claim in claims.free():
            before.append(begun(claim))
            if len(before) > 1:
                yield from finished(*before.pop(0))
        for last in before:
            yield from finished(*last)
        yield from received()
        for claim in claims.others():
            yield from finished(*begun(claim))
            yield from received()
        store.shrink()


def _same(made: Boxed) -> Boxed:
    return made


def generate(region: Region, name: str, batch: Batch) -> Callable[[], Boxed]:
    """Generate a region's code with Inductor, and return a function that loads it when its kernels are compiled.

    On failure the region's ATen operators run, with a warning that names it. So does a region with nothing to fuse.
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
            load(scopes) if on_cpu else batch.triton.load(scopes)
        except Exception as error:
            return _operators_instead(region, name, error)
        run = with_float_inputs(compiled, float_inputs(region.module))
        return with_dims(run, outputs) if loses and not options else run

    return finish


@contextlib.contextmanager
def _kept_by_inductor(region: Region) -> Iterator[None]:
    """Let Inductor look for a graph's code in its cache, and keep it there, as it does for torch.compile.

    The number of threads, which is in the code, is added to its key for releases before 2.13, and so is the library of
    products. Not with dynamic sizes: conditions that Inductor finds out would be added to the program's.
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
    why = f"{type(error).__name__}: {said}"
    warnings.warn(
        f"Inductor cannot compile {name} ({region.key}); it runs as plain ATen operators. {why}", stacklevel=2
    )
    log.debug("%s:\n%s", name, region.text, exc_info=error)
    made: Any = compile_operators(region)
    made.problem = f"Inductor cannot compile it. {why}"
    return made


def kernels_of(fn: Boxed) -> Kernels | None:
    """Return the code of a compiled region for a file; None if it has more than code, or code for a GPU."""
    if isinstance(fn, KeptRegion):
        return None if fn.kernels.on_gpu else fn.kernels
    if not isinstance(fn, CompiledFxGraph) or fn.device_types != {"cpu"}:
        return None
    module = None if fn.inputs_to_check else _module_of(fn)
    if module is None:
        return None
    libraries = {}
    for name, value in vars(module).items():
        file = getattr(getattr(value, "__self__", None), "__file__", None) or ""
        if isinstance(value, types.BuiltinFunctionType) and file.endswith(".so") and value.__name__ == "kernel":
            libraries[name] = Path(file).read_bytes()
    return trimmed(fn.source_code, libraries)


def _module_of(fn: CompiledFxGraph) -> types.ModuleType | None:
    """Return the generated module of a region; None if the region has more than code."""
    holds = (fn.constants, fn.torchbind_constants, fn.mutated_input_idxs, fn.guards_expr)
    if any(holds) or any(getattr(extern_kernels, n, None) is not f for n, f in EXTERN_KERNELS.items()):
        return None
    return next((m for m in reversed(PyCodeCache.modules) if getattr(m, "key", "") == fn.cache_key), None)


def gpu_kernels_of(fn: Boxed) -> Kernels | None:
    """Return the code of a region compiled for one GPU; None if it takes more than code and cubins."""
    if not isinstance(fn, CompiledFxGraph) or fn.device_types != {"cuda"} or len(fn.device_idxs) != 1:
        return None
    if torch.version.hip or _module_of(fn) is None:
        return None
    try:
        found = {name: _cubin_kernel(tuner) for name, tuner in _tuners_of(fn).items()}
    except Exception as error:  # another release of Inductor
        log.info("kernels of a region are not kept: %s: %s", type(error).__name__, error)
        return None
    kernels = {name: kernel for name, kernel in found.items() if kernel is not None}
    return trimmed(fn.source_code, {}, kernels) if len(kernels) == len(found) else None


def when_tuned(fn: Boxed, kernels: Kernels, rewrite: Callable[[Kernels], None]) -> None:
    """Call `rewrite` when Inductor has chosen a configuration of every kernel, in the first step."""
    chosen = dict(kernels.on_gpu)
    left = {name for name, kernel in chosen.items() if len(kernel.variants) > 1}

    def tuned(name: str, results: list[Any], save: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        variants = [v for v, result in zip(chosen[name].variants, results) if result.config is config]
        chosen[name] = CubinKernel(tuple(variants or chosen[name].variants), chosen[name].writes)
        left.discard(name)
        if not left:
            rewrite(replace(kernels, on_gpu=chosen))
        if save:
            save(config, *args, **kwargs)

    for name, tuner in _tuners_of(fn).items():
        if name in left:
            tuner.save_cache_hook = functools.partial(tuned, name, _results_of(tuner), tuner.save_cache_hook)


def _tuners_of(fn: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(_module_of(fn)).items() if hasattr(value, "compile_results")}


def _results_of(tuner: Any) -> list[Any]:
    """Return the compiled configurations that a tuner chooses from: some may not fit the GPU."""
    left = [launcher.config for launcher in tuner.launchers]
    return [each for each in tuner.compile_results if not left or any(each.config is config for config in left)]


def _cubin_kernel(tuner: Any) -> CubinKernel | None:
    """Return a Triton kernel in the configurations that Inductor chooses from; None if they are not enough."""
    results = _results_of(tuner)
    names = results[0].kernel.arg_names if results and hasattr(results[0].kernel, "arg_tys") else []
    # Memory that is to be zero before each launch cannot be measured here.
    if not names or tuner.reset_to_zero_arg_names or any(name.startswith(("ws_ptr", "sem_ptr")) for name in names):
        return None
    if not all(hasattr(each.kernel, "arg_tys") for each in results):  # Triton's own launcher starts it
        return None
    if tuner.inductor_meta.get("coordinate_descent_tuning"):  # which compiles more configurations later
        return None
    called = results[0]._get_arg_lists(names, results[0].kernel.declared_constexprs)[1]
    writes = tuple(place for place, name in enumerate(called) if name in tuner.mutated_arg_names)
    return CubinKernel(tuple(map(_variant, results)), writes)


def _variant(result: Any) -> KernelVariant:
    kernel = result.kernel
    _, given, nothing = result._get_arg_lists(kernel.arg_names, kernel.declared_constexprs)
    left_out = {kernel.arg_names[place] for place in kernel.full_constexprs} | set(nothing)
    passed = [name for name in kernel.arg_names if name not in left_out]
    grid = GridExpr.from_meta(result.inductor_meta, result.config)
    lines = [*grid.prefix, f"runner({grid.x_grid}, {grid.y_grid}, {grid.z_grid}, stream, {', '.join(passed)})"]
    return KernelVariant(
        name=kernel.name,
        launcher="\n    ".join([f"def launcher({', '.join(given)}, stream):", *lines]),
        types=kernel.arg_tys,
        scratch=kernel.has_global_scratch + kernel.has_profile_scratch,
        warps=kernel.num_warps,
        shared=kernel.shared,
        constants=dict(result.config.kwargs),
        cubin=_cubin(result),
    )


def _cubin(result: Any) -> bytes:
    kernel = result.kernel
    if getattr(kernel, "cubin_raw", None) is not None:
        return bytes(kernel.cubin_raw)
    if not kernel.cubin_path:  # Inductor forgets it when it has loaded the kernel
        result.reload_cubin_path()
    return Path(kernel.cubin_path).read_bytes()


def package_all(regions: dict[str, Region], show: Callable[[str], None]) -> Compiled:
    """Compile each region into a `Package`, which cannot be called."""
    with contextlib.closing(compile_all(regions, show)) as compiled:
        for name, made in compiled:
            kernels = kernels_of(made)
            if kernels is not None:
                problem = ""
            elif runs_as_it_is(regions[name].module):
                problem = "one operator, which nothing can be fused with"
            else:
                problem = getattr(made, "problem", "Inductor's code of it is more than kernels")
            yield name, Package(kernels, problem)


def known_options(options: dict[str, Any]) -> dict[str, Any]:
    """Select the options that this release of Inductor has."""
    known = inductor_config.get_config_copy()
    return {name: value for name, value in options.items() if name in known}


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
        decomposed = make_fx(with_attributes(module), _decompositions(), tracing_mode="real")(*inputs)
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
