"""Kernels that Inductor's scheduler makes of a region for a GPU, with their bytes, before code is generated.

    region -> decompositions -> Inductor's passes -> GraphLowering -> Scheduler -> fused nodes        stops here

All that decides about fusion runs as it does when the region is compiled, for a GPU that need not be there. No code is
generated and nothing is compiled by Triton, which takes most of the time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from graphshard.cross.compile_for_gpus import options_for_gpus
from graphshard.cross.driver import compiler_stand_in
from graphshard.ir.gpus import Capability, is_pretended
from graphshard.ir.program import Region
from graphshard.lower.eager import copies_of, num_kernels, outputs_of
from graphshard.lower.inductor import decompose, whole_operators
from graphshard.lower.inductor_cache import writable_cache
from graphshard.lower.inductor_rewrites import sums_as_sizes
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
from graphshard.torch_compat.torch_ops import replaced

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FusedKernel:
    """One kernel of a region.

    Attributes:
        extern: it is an operator of a library, such as a matrix product; otherwise generated code.
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

    Args:
        capability: of the GPU, which is asked about where there is one.
    """
    if num_kernels(region.module) == 1:
        return None
    if copies_of(region.module) is not None:
        nodes = region.module.graph.nodes
        values = [node.meta["val"] for node in nodes if node.op == "placeholder"] + outputs_of(region.module)
        return (FusedKernel(False, sum(value.nbytes for value in values), tuple(nodes)),)
    try:
        with writable_cache(), _stopping(capability), options_for_gpus(), whole_operators():
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


@contextlib.contextmanager
def _stopping(capability: Capability) -> Iterator[None]:
    """End compilations after the scheduler, and answer for a GPU."""

    def codegen(scheduler: Scheduler) -> None:
        raise _Scheduled(tuple(_kernels(scheduler.nodes)))

    # While a model is captured for a pretended GPU, torch says that there is one.
    there = torch.cuda.is_available() and not is_pretended()
    here = contextlib.nullcontext() if there else compiler_stand_in(capability, _nothing)
    with here, replaced(Scheduler, "codegen", codegen):
        yield


def _nothing(_: Any) -> None:
    """Load no kernel."""


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
    read = [dep for dep in node.read_writes.reads if dep.name not in written]
    kept = [dep for dep in node.read_writes.writes if not _stays_inside(dep.name, inside)]
    return _bytes_of(read) + _bytes_of(kept)


def _stays_inside(name: str, inside: Set[str]) -> bool:
    """Return whether only the kernel that writes a buffer reads it."""
    buffer = V.graph.scheduler.name_to_buf.get(name)
    return buffer is not None and {user.get_name() for user in buffer.users} <= inside


def _bytes_of(deps: Sequence[Dep]) -> int:
    """Count accesses to each buffer, at most its size."""
    found: dict[str, int] = {}
    for dep in deps:
        if not isinstance(dep, WeakDep):
            found[dep.name] = found.get(dep.name, 0) + _elements(dep)
    moved = 0
    for name, count in found.items():
        elements, itemsize = _size(name)
        moved += min(count, elements) * itemsize
    return moved


def _elements(dep: Dep) -> int:
    """Count accessed elements; at an indirect place, one in each step of the loops."""
    if isinstance(dep, MemoryDep) and dep.is_indirect():
        return _hint(sympy_product(dep.size))
    return int(dep.numel_hint())


def _size(name: str) -> tuple[int, int]:
    """Return a buffer's elements and bytes of each; 0 for several tensors, which a library's operator returns."""
    try:
        return _hint(V.graph.get_numel(name)), int(get_dtype_size(V.graph.get_dtype(name)))
    except NotImplementedError:
        return 0, 0


def _hint(size: Any) -> int:
    return int(V.graph.sizevars.optimization_hint(size, fallback=0))
