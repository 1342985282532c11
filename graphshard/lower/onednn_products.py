"""Matrix products in float32 by oneDNN, on processors that are not Intel's, for which MKL has slower kernels.

    mm(x, w.t())    mkldnn._linear_pointwise(x, w)          forward
    mm(g, w)        mkldnn._linear_pointwise(g, w.t())      gradient of the input
    mm(g.t(), x)    as it is: oneDNN would copy both        gradient of the weight

On an AMD EPYC with AVX-512 these take 0.75 to 1.0 of MKL's time with one and with two threads from 2^24 multiplications
on, and are slower below (`python -m benchmarks.products`). Inductor itself has them for weights that are constants.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node

from graphshard.ir.graph import aten
from graphshard.torch_compat.inductor_compiler import LinearUnary, TensorBox, V, lowerings
from graphshard.torch_compat.inductor_settings import inductor_config
from graphshard.utils.environment_fingerprint import vendor

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
