"""Compile regions for GPUs with Inductor and Triton where there is no GPU.

Inductor's FX wrapper gives the code of a region as a graph of operators and launches; Triton compiles the kernels for
the target that `cross/driver.py` says. Triton's tuning, which runs kernels, does not take place: of the
configurations that Inductor would try, the first one that spills no register is taken, or the one that spills least.

For predictions `fused_kernels` ends a compilation after Inductor's scheduler, which has decided about fusion and knows
the bytes of each kernel: code generation and Triton take most of the time.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import logging
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graphshard.cross.driver import compiler_stand_in
from graphshard.cross.gpu_kernels import GpuCode, Kernel, Resources, read_cubin
from graphshard.ir.gpus import Capability, is_pretended
from graphshard.ir.program import Region
from graphshard.lower.eager import copies_of, num_kernels, outputs_of, runs_as_it_is
from graphshard.lower.inductor import decompose, known_options, whole_operators
from graphshard.lower.inductor_cache import writable_cache
from graphshard.lower.inductor_rewrites import sums_as_sizes
from graphshard.lower.region_store import Package
from graphshard.lower.regions import Compiled, Compiler
from graphshard.torch_compat.inductor_compiler import (
    BaseSchedulerNode,
    Dep,
    ExternKernelSchedulerNode,
    MemoryDep,
    MultiOutput,
    NopKernelSchedulerNode,
    Scheduler,
    V,
    WeakDep,
    compile_fx_inner,
    get_dtype_size,
    sympy_product,
)
from graphshard.torch_compat.inductor_settings import inductor_config
from graphshard.torch_compat.torch_ops import (
    OpOverload,
    kernel_side_table,
    replaced,
    triton_kernel_wrapper_mutation,
)

log = logging.getLogger(__name__)

aten = torch.ops.aten
_FUNCTIONS: dict[Any, OpOverload] = {
    torch.empty_strided: aten.empty_strided.default,
    torch.as_strided: aten.as_strided.default,
}
OPTIONS: dict[str, Any] = {
    "fx_wrapper": True,
    "fx_graph_cache": False,  # it does not keep graphs
    "compile_threads": 1,  # other processes have a driver or none
    "fallback_random": True,
    "shape_padding": False,  # decided by a measurement
    "size_asserts": False,
    "alignment_asserts": False,
    "nan_asserts": False,
    "scalar_asserts": False,
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "max_autotune_gemm": False,
    "coordinate_descent_tuning": False,
    "triton.autotune_at_compile_time": False,
    "triton.cudagraphs": False,
    "use_static_triton_launcher": True,
    "use_static_cuda_launcher": True,
    "static_launch_user_defined_triton_kernels": True,
}


def compiler_of(capabilities: Sequence[Capability]) -> Compiler:
    """Return a compiler of regions into packages with code for several kinds of GPU."""

    def package_all(regions: dict[str, Region], show: Callable[[str], None]) -> Compiled:
        with writable_cache():
            for number, (name, region) in enumerate(regions.items(), start=1):
                show(f"compile {name}, {number} of {len(regions)}")
                yield name, package(region, name, capabilities)

    return package_all


def package(region: Region, name: str, capabilities: Sequence[Capability]) -> Package:
    """Compile a region for several kinds of GPU; where Inductor cannot, the package says why."""
    if runs_as_it_is(region.module):
        what = "one operator" if num_kernels(region.module) == 1 else "copies that start together"
        return Package(problem=f"{what}, which nothing can be fused with")
    try:
        return Package(codes=tuple(compile_for(region, capability) for capability in capabilities))
    except Exception as error:
        log.debug("%s:\n%s", name, region.text, exc_info=True)
        why = (str(error).strip().splitlines() or [""])[0]
        log.warning("%s (%s) runs as ATen operators: %s: %s", name, region.key, type(error).__name__, why)
        return Package(problem=f"Inductor cannot compile it for CUDA. {type(error).__name__}: {why}")


def compile_for(region: Region, capability: Capability) -> GpuCode:
    """Compile a region for one kind of GPU; raise what Inductor and Triton raise, or if a file cannot hold the code."""
    with _collected(capability) as found, options_for_gpus(), whole_operators():
        module, inputs = decompose(region.module)
        compile_fx_inner(module, inputs, fx_wrapper=True)
    ((made, tuners),) = found
    return _code(made, tuners, capability)


@contextlib.contextmanager
def options_for_gpus() -> Iterator[None]:
    """Set Inductor's options for a GPU that is not here."""
    with warnings.catch_warnings(), inductor_config.patch(known_options(OPTIONS)):
        # It is about the GPU here; the setting is the user's, on the target.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
        yield


@contextlib.contextmanager
def _collected(capability: Capability) -> Iterator[list[tuple[GraphModule, dict[int, Any]]]]:
    """Let Inductor compile for a GPU; yields the graphs that it makes, with tuners of kernels by their numbers."""
    fxir: Any = importlib.import_module("torch._inductor.codegen.wrapper_fxir")
    found: list[tuple[GraphModule, dict[int, Any]]] = []

    class Converter(fxir.FxConverter):  # type: ignore[misc]
        def generate(self) -> GraphModule:
            made: GraphModule = super().generate()
            found.append((made, {kernel.wrapped.kernel_idx: kernel.tuner for kernel in self.kernels.values()}))
            return made

        def _generate_triton_call(self, line: Any) -> None:
            """Give the grid of a kernel of the model what Inductor passes for it, not the kernel's constants."""
            tuner = self.kernels[line.kernel_name].tuner
            read, extra = tuner._interpret_args_grid, len(tuner.inductor_meta.get("extra_launcher_args", ()))

            def grid_of(args: tuple[Any, ...], config: Any) -> Any:
                args, extras = args[: len(args) - extra], args[len(args) - extra :]
                names = [name for name in tuner.triton_meta["signature"] if name not in config.kwargs]
                plain = [arg for name, arg in zip(names, args) if name not in tuner.triton_meta["constants"]]
                return args, read((*plain, *extras), config)[1]

            with replaced(tuner, "_interpret_args_grid", grid_of if extra else read):
                super()._generate_triton_call(line)

        def _lookup_args(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
            """Make the views that a kernel of the model is given as code: reinterpret_tensor(x, (4,), (1,), 0)."""
            for arg in args:
                if isinstance(arg, str) and arg not in self.buffer_to_node:
                    name, *extent = ast.parse(arg, mode="eval").body.args  # type: ignore[attr-defined]
                    base = self.buffer_to_node[ast.unparse(name)]
                    self.buffer_to_node[arg] = self._create_as_strided(base, *map(ast.literal_eval, extent))
            return super()._lookup_args(args)

    with compiler_stand_in(capability, _choose), replaced(fxir, "FxConverter", Converter):
        yield found


def _choose(tuner: Any) -> None:
    """Leave a tuner one configuration: its first without spills, or else the one that spills least."""
    tuner.compile_results.sort(key=lambda result: _resources(result.kernel).spills)
    del tuner.compile_results[1:]


def _resources(kernel: Any) -> Resources:
    """Return registers and spills of a kernel that torch's launcher can start."""
    if not hasattr(kernel, "cubin_path"):
        raise NotImplementedError(f"{type(kernel).__name__} cannot be started by torch's launcher")
    return read_cubin(kernel.name, _cubin(kernel)).kernels[kernel.name]


def _cubin(kernel: Any) -> bytes:
    content = getattr(kernel, "cubin_raw", None)
    return Path(kernel.cubin_path).read_bytes() if content is None else bytes(content)


def _code(made: GraphModule, tuners: dict[int, Any], capability: Capability) -> GpuCode:
    """Convert Inductor's graph to one that a file can hold."""
    graph = Graph()
    env: dict[Node, Node] = {}
    kernels: dict[str, Kernel] = {}
    names: dict[int, str] = {}
    for node in made.graph.nodes:
        if node.target is triton_kernel_wrapper_mutation:
            number = node.kwargs["kernel_idx"]
            result = tuners[number].compile_results[0]
            name = names.setdefault(number, f"kernel_{len(names)}")
            kernels[name] = _kernel(result, tuners[number])
            graph.call_module(name, _launch(node, result.kernel, env))
        elif node.op == "output":
            (results,) = node.args
            listed = list(results) if isinstance(results, (list, tuple)) else [results]
            graph.output([env[value] if isinstance(value, Node) else value for value in listed])
        elif node.op in ("placeholder", "call_function"):
            env[node] = graph.node_copy(node, env.__getitem__)
            env[node].meta.clear()
            if node.op == "call_function":
                target = _FUNCTIONS.get(node.target, node.target)
                if not isinstance(target, OpOverload) and target is not operator.getitem:
                    raise NotImplementedError(f"a call of {node.target}")
                env[node].target = target
                if isinstance(node.kwargs.get("device"), str):
                    env[node].update_kwarg("device", torch.device(str(node.kwargs["device"])))
        else:
            raise NotImplementedError(f"a {node.op} of {node.target}")
    return GpuCode(capability, graph, kernels)


def _launch(node: Node, kernel: Any, env: dict[Node, Node]) -> tuple[list[Any], list[Any]]:
    """Return a kernel's arguments in order, without compiled-in constants, and its grid."""
    said: dict[str, Any] = dict(node.kwargs)
    given = {**said["kwargs"], **kernel_side_table.get_constant_args(said["constant_args_idx"])}
    args = [given[name] for index, name in enumerate(kernel.arg_names) if index not in kernel.full_constexprs]
    args += [None] * (kernel.has_global_scratch + kernel.has_profile_scratch)
    ((x, y, z),) = said["grid"]
    found = [env[value] if isinstance(value, Node) else value for value in (*args, x, y, z)]
    return found[:-3], found[-3:]


def _kernel(result: Any, tuner: Any) -> Kernel:
    made, fn = result.kernel, tuner.fn
    taken = _resources(made)
    constants = {**tuner.triton_meta["constants"], **result.config.kwargs}
    # Functions of the kernel's file that it may call, such as the combine of a scan.
    scope = fn.fn.__globals__
    functions = (value for value in scope.values() if type(value) is type(fn) and value is not fn)
    called = [function.src for function in functions if function.fn.__globals__ is scope]
    return Kernel(
        name=made.name,
        types=made.arg_tys + "O" * (made.has_global_scratch + made.has_profile_scratch),
        warps=made.num_warps,
        shared=made.shared,
        registers=taken.registers,
        spills=taken.spills,
        cubin=_cubin(made),
        source="\n".join([f"# {json.dumps(constants)}, {made.num_warps} warps", *called, fn.src]),
    )


@dataclass(frozen=True)
class FusedKernel:
    """One kernel of a region: an operator of a library, such as a matrix product, or generated code.

    Attributes:
        num_bytes: read and written; of an operator that returns several tensors without them.
        operators: that it computes, of the region in Inductor's decompositions.
    """

    extern: bool
    num_bytes: int
    operators: tuple[Node, ...]


class _Scheduled(BaseException):
    """Ends a compilation when kernels are known; nothing on the way must take it for a failure."""

    def __init__(self, kernels: tuple[FusedKernel, ...]) -> None:
        super().__init__()
        self.kernels = kernels


def fused_kernels(region: Region, capability: Capability) -> tuple[FusedKernel, ...] | None:
    """Return the kernels that Inductor makes of a region; None if it runs as it is, or Inductor cannot compile it.

    The GPU is asked about where there is one of the capability.
    """
    if num_kernels(region.module) == 1:
        return None
    if copies_of(region.module) is not None:
        nodes = region.module.graph.nodes
        values = [node.meta["val"] for node in nodes if node.op == "placeholder"] + outputs_of(region.module)
        return (FusedKernel(False, sum(value.nbytes for value in values), tuple(nodes)),)

    def codegen(scheduler: Scheduler) -> None:
        raise _Scheduled(tuple(_kernels(scheduler.nodes)))

    # While a model is captured for a pretended GPU, torch says that there is one.
    there = torch.cuda.is_available() and not is_pretended()
    here = contextlib.nullcontext() if there else compiler_stand_in(capability, lambda _: None)
    try:
        with writable_cache(), here, replaced(Scheduler, "codegen", codegen), options_for_gpus(), whole_operators():
            module, inputs = decompose(sums_as_sizes(region.module))
            try:
                compile_fx_inner(module, inputs)
            except _Scheduled as found:
                return found.kernels
    except Exception as error:
        why = (str(error).strip().splitlines() or [""])[0]
        log.warning("region %s is predicted by rules: Inductor: %s: %s", region.key, type(error).__name__, why)
        log.debug("%s", region.text, exc_info=True)
    return None


def _kernels(nodes: Sequence[BaseSchedulerNode]) -> Iterator[FusedKernel]:
    """Yield what is run; to unpack one of several results is not."""
    for node in nodes:
        extern = isinstance(node, ExternKernelSchedulerNode)
        if not isinstance(node, NopKernelSchedulerNode) and not isinstance(node.node, MultiOutput):
            parts = [part.node for part in node.get_nodes() if part.node is not None]
            operators = dict.fromkeys(origin for part in parts for origin in part.get_origins())
            yield FusedKernel(extern, _moved(node), tuple(operators))


def _moved(node: BaseSchedulerNode) -> int:
    """Count the bytes that a kernel reads from others and writes for others.

    Torch's own count takes no more than 10^9 elements of a buffer, and all of a table of which some rows are read.
    """
    inside = {part.get_name() for part in node.get_nodes()}
    written = {dep.name for dep in node.read_writes.writes}
    buffers = V.graph.scheduler.name_to_buf

    def stays_inside(name: str) -> bool:
        return name in buffers and {user.get_name() for user in buffers[name].users} <= inside

    read = [dep for dep in node.read_writes.reads if dep.name not in written]
    return _bytes_of(read) + _bytes_of([dep for dep in node.read_writes.writes if not stays_inside(dep.name)])


def _bytes_of(deps: Sequence[Dep]) -> int:
    """Count accesses to each buffer, at most its size; at an indirect place, one in each step of the loops."""
    found: Counter[str] = Counter()
    for dep in deps:
        if not isinstance(dep, WeakDep):
            if isinstance(dep, MemoryDep) and dep.is_indirect():
                found[dep.name] += _hint(sympy_product(dep.size))
            else:
                found[dep.name] += int(dep.numel_hint())
    moved = 0
    for name, count in found.items():
        # A library's operator may return several tensors, which have no size.
        with contextlib.suppress(NotImplementedError):
            moved += min(count, _hint(V.graph.get_numel(name))) * int(get_dtype_size(V.graph.get_dtype(name)))
    return moved


def _hint(size: Any) -> int:
    return int(V.graph.sizevars.optimization_hint(size, fallback=0))
