"""Operators of a program for GPUs that no GPU can run, found where there is none.

torch says which device an operator has a kernel for, but its builds for CPUs do not know the kernels for CUDA. So of
ATen's operators those are refused that are the CPU's by their name; of others, such as `torch.library.custom_op` makes,
those that have nothing registered for CUDA.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch._ops import OpOverload
from torch.fx import Node

from graphshard.ir.errors import CaptureError

# Parts of names of ATen's operators that there are for CPUs alone.
_CPU_ONLY = ("_for_cpu", "mkldnn", "onednn")
# Registered for these, an operator runs on any device.
_ANY = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
# Whose kernels for CUDA are in torch's builds for CUDA, or are this project's own.
_KNOWN = ("aten", "prims", "prim", "_c10d_functional", "c10d", "graphshard", "inductor", "rngprims", "higher_order")


def check_for_cuda(nodes: Iterable[Node], model: str) -> None:
    """Raise CaptureError for the first operator that has no kernel for CUDA; it names the operator, and what to do."""
    for node in nodes:
        if isinstance(node.target, OpOverload) and not _runs_on_cuda(node.target):
            where = f"in {node.meta['stack_trace'].strip().splitlines()[-1].strip()!r}, " if _has_line(node) else ""
            raise CaptureError(
                f"{model} cannot be exported for CUDA: {where}{node.target} has no kernel for CUDA. Register one "
                "(torch.library.register_kernel with device_types='cuda') before export, or avoid the operator."
            )


def _has_line(node: Node) -> bool:
    return bool(str(node.meta.get("stack_trace") or "").strip())


def _runs_on_cuda(op: OpOverload) -> bool:
    if op.namespace in _KNOWN:
        return not any(part in op._opname for part in _CPU_ONLY)
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in _ANY)
