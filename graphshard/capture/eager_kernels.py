"""Operators that run as eager mode runs them although they are traced.

    F.interpolate(x, mode="bilinear")    eager mode    upsample_bilinear2d
                                         tracing       a function in Python: arange, index, mul, add, ...

torch has written some operators in Python for compilers, in the place of their kernels. They round differently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

_FAMILIES = ("upsample_", "_upsample_")
_IN_PYTHON = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextlib.contextmanager
def eager_kernels() -> Iterator[None]:
    """In the block these operators are not taken apart while they are traced."""
    taken = []
    for op in _operators():
        for key in _IN_PYTHON:
            if key in op.py_kernels:
                taken.append((op, key, op.py_kernels.pop(key)))
                op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, kernel in taken:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


def _operators() -> Iterator[OpOverload]:
    for name in dir(torch.ops.aten):
        if name.startswith(_FAMILIES) and not name.endswith("_backward"):
            packet = getattr(torch.ops.aten, name)
            yield from (getattr(packet, overload) for overload in packet.overloads())
