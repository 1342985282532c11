"""Compile regions for GPUs with Inductor and Triton where there is no GPU.

Inductor's FX wrapper gives the code of a region as a graph of operators and launches; Triton compiles the kernels for
the target that `cross/driver.py` says. Triton's tuning, which runs kernels, does not take place: of the
configurations that Inductor would try, the first one that spills no register is taken, or the one that spills least.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graphshard.cross.cubin import read_cubin
from graphshard.cross.driver import compiler_stand_in
from graphshard.cross.gpu_kernels import GpuCode, Kernel
from graphshard.ir.gpus import Capability
from graphshard.ir.program import Region
from graphshard.lower.aoti_package import Package
from graphshard.lower.eager import num_kernels, runs_as_it_is
from graphshard.lower.inductor import decompose, known_options, whole_operators
from graphshard.lower.inductor_cache import writable_cache
from graphshard.lower.regions import Compiled, Compiler
from graphshard.torch_compat.inductor_compiler import (
    compile_fx_inner,
    kernel_side_table,
    triton_kernel_wrapper_mutation,
)
from graphshard.torch_compat.inductor_settings import inductor_config
from graphshard.torch_compat.torch_ops import OpOverload, replaced

log = logging.getLogger(__name__)

aten = torch.ops.aten
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
}


def compiler_of(capabilities: Sequence[Capability]) -> Compiler:
    """Return a compiler of regions into packages with code for several kinds of GPU."""

    def compile_all(regions: dict[str, Region], show: Callable[[str], None]) -> Compiled:
        with writable_cache():
            for number, (name, region) in enumerate(regions.items(), start=1):
                show(f"compile {name}, {number} of {len(regions)}")
                yield name, package(region, name, capabilities)

    return compile_all


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
    """Compile a region for one kind of GPU.

    Raises:
        NotImplementedError: there is something that a file cannot hold.
        Exception: whatever Inductor and Triton say of what they cannot compile.
    """
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

    with compiler_stand_in(capability, _choose), replaced(fxir, "FxConverter", Converter):
        yield found


def _choose(tuner: Any) -> None:
    """Leave a tuner one configuration: its first without spills, or else the one that spills least."""
    tuner.compile_results.sort(key=lambda result: _resources(result.kernel)[1])
    del tuner.compile_results[1:]


def _resources(kernel: Any) -> tuple[int, int]:
    """Return registers and spills of a kernel that torch's launcher can start."""
    if not hasattr(kernel, "cubin_path"):
        raise NotImplementedError(f"{type(kernel).__name__} cannot be started by torch's launcher")
    taken = read_cubin(kernel.name, _cubin(kernel)).kernels[kernel.name]
    return taken.registers, taken.spills


def _cubin(kernel: Any) -> bytes:
    content = getattr(kernel, "cubin_raw", None)
    if content is None:
        with open(kernel.cubin_path, "rb") as file:
            content = file.read()
    return bytes(content)


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
                env[node].target = _operator(node)
                if isinstance(node.kwargs.get("device"), str):
                    env[node].update_kwarg("device", torch.device(str(node.kwargs["device"])))
        else:
            raise NotImplementedError(f"a {node.op} of {node.target}")
    return GpuCode(capability, graph, kernels)


_FUNCTIONS = {torch.empty_strided: aten.empty_strided.default, torch.as_strided: aten.as_strided.default}


def _operator(node: Node) -> Any:
    target = _FUNCTIONS.get(node.target, node.target)  # type: ignore[arg-type]
    if not isinstance(target, OpOverload) and target is not operator.getitem:
        raise NotImplementedError(f"a call of {node.target}")
    return target


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
    made = result.kernel
    registers, spills = _resources(made)
    constants = {**tuner.triton_meta["constants"], **result.config.kwargs}
    scratch = "O" * (made.has_global_scratch + made.has_profile_scratch)
    return Kernel(
        name=made.name,
        types=made.arg_tys + scratch,
        warps=made.num_warps,
        shared=made.shared,
        registers=registers,
        spills=spills,
        cubin=_cubin(made),
        source=f"# {json.dumps(constants)}, {made.num_warps} warps\n{_source(tuner.fn)}",
    )


def _source(kernel: Any) -> str:
    """Return a kernel's source after the functions of its file that it may call, such as the combine of a scan."""
    scope = kernel.fn.__globals__
    functions = (value for value in scope.values() if type(value) is type(kernel) and value is not kernel)
    own = [function.src for function in functions if function.fn.__globals__ is scope]
    return "\n".join([*own, kernel.src])
