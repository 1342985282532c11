"""Operators that run as eager mode runs them although they are traced.

    F.interpolate(x, mode="bilinear")    eager mode    upsample_bilinear2d
                                         tracing       a function in Python: arange, index, mul, add, ...

torch has written some operators in Python for compilers, in the place of their kernels. They round differently. Only
sizes that are not known need them: torch's kernels ask for numbers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from graphshard.ir.graph import WRONG_IN_PYTHON, interpolations

_OTHERS = (torch.ops.aten.multi_margin_loss.default, *WRONG_IN_PYTHON)
_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_IN_PYTHON = (DispatchKey.Autograd, _COMPOSITE)


@contextlib.contextmanager
def eager_kernels() -> Iterator[None]:
    """In the block these operators are not taken apart while they are traced."""
    replaced = []
    for op in (*interpolations(), *_OTHERS):
        for key in _IN_PYTHON:
            if key in op.py_kernels:
                replaced.append((op, key, op.py_kernels[key]))
                op.py_kernels[key] = functools.partial(_chosen, op, key, op.py_kernels[key])
                op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, kernel in replaced:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


def _chosen(op: OpOverload, key: DispatchKey, in_python: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run torch's kernel, or the function in Python where sizes are not known; what is whole is not taken apart."""
    leaves = pytree.arg_tree_leaves(*args, **kwargs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    numbers = [*leaves, *(size for tensor in tensors for size in tensor.shape)]
    if any(isinstance(number, (torch.SymInt, torch.SymFloat)) for number in numbers):
        return in_python(*args, **kwargs)
    kernel = next((each for each in (key, _COMPOSITE) if op.has_kernel_for_dispatch_key(each)), None)
    return NotImplemented if kernel is None else op._op_dk(kernel, *args, **kwargs)
