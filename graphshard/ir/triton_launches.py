"""Launches of a model's Triton kernels: operators that name kernel and constants by numbers of this process.

    triton_kernel_wrapper_functional(kernel_idx=0,          triton_kernel_wrapper_functional(kernel_idx=net.scale 3f0c,
                                     constant_args_idx=4)                                    constant_args_idx={n: 64})

Texts of graphs, which are compared between ranks and name compiled code, and files have the right form.
"""

from __future__ import annotations

import hashlib
from typing import Any, cast

from torch.fx import Node

from graphshard.errors import ArgumentError
from graphshard.torch_compat.torch_ops import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)

LAUNCHES = frozenset({triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation})


def kwargs_of(node: Node) -> dict[str, Any]:
    """Return the keyword arguments of a node; of a launch without numbers of this process."""
    if node.target not in LAUNCHES:
        return dict(node.kwargs)
    kernel, constants = (cast(int, node.kwargs[name]) for name in ("kernel_idx", "constant_args_idx"))
    named = _name(kernel_side_table.get_kernel(kernel))
    return {**node.kwargs, "kernel_idx": named, "constant_args_idx": kernel_side_table.get_constant_args(constants)}


def numbered(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Inverse of `kwargs_of` for a launch; raise ArgumentError if this process does not know the kernel."""
    known = {_name(kernel): number for number, kernel in kernel_side_table.id_to_kernel.items()}
    name = kwargs["kernel_idx"]
    if name not in known:
        raise ArgumentError(
            f"it launches the Triton kernel {str(name)[:200]!r}, which no trace of this process has met: a file has "
            "the code of a kernel for the kinds of GPU that it was compiled for, and not the kernel"
        )
    constants = kernel_side_table.add_constant_args(kwargs["constant_args_idx"])
    return {**kwargs, "kernel_idx": known[name], "constant_args_idx": constants}


def _name(kernel: Any) -> str:
    """Return the name of a kernel, with a hash of its source and of the configurations that it is tuned over."""
    facts, inner = [], kernel
    while not hasattr(inner, "cache_key"):  # triton.autotune, triton.heuristics
        facts += [*map(str, getattr(inner, "configs", ())), repr(sorted(getattr(inner, "values", {})))]
        inner = inner.fn
    digest = hashlib.sha256("\n".join([inner.cache_key, *facts]).encode()).hexdigest()[:16]
    return f"{inner.fn.__module__}.{inner.fn.__qualname__} {digest}"
