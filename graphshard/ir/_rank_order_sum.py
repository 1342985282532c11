"""Sum of the gradients of all ranks in the order of ranks: one kernel on GPUs, with the same bits everywhere.

    bf16[n * k]   ->   f32[k]: ((r0 + r1) + r2) + ... + r[n - 1]

NCCL adds in an order, and rounds at places, that depend on its algorithm, channels and protocol.
"""

from __future__ import annotations

import functools
import importlib.util
import math

import torch
from torch import Tensor

_BLOCK = 1024
# Dtypes that are added as they are; others are in float32.
_WIDE = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of a dtype are added: float32, or their own if it is wider."""
    return torch.promote_types(dtype, torch.float32)


def sum_in_rank_order(received: Tensor, num_ranks: int, op: str, own: Tensor | None = None) -> Tensor:
    """Return the sum of the ranks' chunks along dim 0, or with "avg" the mean, in the dtype of sums.

    If `own` is given, `received` is the chunk of the only other rank, which may be overwritten.
    """
    if own is not None:
        wide = received if received.dtype in _WIDE else received.to(torch.float32)
        total = wide.add_(own)
    elif received.is_cuda and _has_triton():
        total = sum_by_kernel(received, num_ranks)
    else:
        first, *others = received.chunk(num_ranks)
        total = first.to(sum_dtype(received.dtype), copy=True)
        for chunk in others:
            total.add_(chunk)
    if op != "avg":
        return total
    # The inverse of a power of two is exact, and multiplying is faster.
    return total.div_(num_ranks) if num_ranks & (num_ranks - 1) else total.mul_(1 / num_ranks)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def sum_by_kernel(received: Tensor, num_ranks: int) -> Tensor:
    """Return the sum by one kernel of Triton, which reads each chunk once."""
    from graphshard.ir._rank_order_kernel import add_chunks

    total = received.new_empty([len(received) // num_ranks, *received.shape[1:]], dtype=sum_dtype(received.dtype))
    blocks = math.ceil(total.numel() / _BLOCK)
    if blocks:
        add_chunks[(blocks,)](received, total, total.numel(), num_ranks, BLOCK=_BLOCK)
    return total
