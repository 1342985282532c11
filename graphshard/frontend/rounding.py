"""Operators that tracing replaces by something that rounds differently from eager mode.

On the CPU eager dropout multiplies by a mask that is already scaled, in the tensor's dtype; tracing puts
`native_dropout` in its place, which scales in higher precision. These decompositions restore eager's rounding and
its random numbers; on CUDA eager mode runs `native_dropout` itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from graphshard.ir.params import inverse_of, memory_order

aten = torch.ops.aten


def _native_dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    if x.device.type != "cpu" or not train or p == 0:
        return NotImplemented
    if p == 1:  # nothing is drawn
        return x * _zero_like(x), torch.zeros_like(x, dtype=torch.bool)
    keep = _drawn_in_memory_order(torch.empty_like(x), 1 - p)
    return x * (keep / (1 - p)), keep.to(torch.bool)


def _drawn_in_memory_order(like: torch.Tensor, p: float) -> torch.Tensor:
    """What `like.bernoulli_(p)` draws; the operator that returns a new tensor draws in the order of the dims."""
    order = memory_order(like)
    if not order or not _draws_in_memory_order():
        return aten.bernoulli.p(like, p)
    return aten.bernoulli.p(like.permute(order), p).permute(inverse_of(order))


@functools.cache
def _draws_in_memory_order() -> bool:
    """Whether `bernoulli_` does: torch's own kernel, but not MKL's, which is taken on Intel's processors."""
    drawn = [
        torch.empty(4, 8, device="cpu").t().bernoulli_(generator=torch.Generator("cpu").manual_seed(0)).t(),
        torch.empty(4, 8, device="cpu").bernoulli_(generator=torch.Generator("cpu").manual_seed(0)),
    ]
    return torch.equal(*drawn)


def _native_dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    if grad.device.type != "cpu":
        return NotImplemented
    if scale == 0.0:  # of a probability of 1
        return grad * _zero_like(grad)
    return grad * (mask.to(grad.dtype) / (1 / scale))


def _zero_like(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=x.dtype, device=x.device)


def capture_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """The table to differentiate a forward with."""
    _draws_in_memory_order()  # found out before anything is traced
    return {
        aten.native_dropout.default: _native_dropout,
        aten.native_dropout_backward.default: _native_dropout_backward,
    }
