"""Shapes of results for operators that torch does not know without their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from graphshard.ir.tracing_internals import new_unknown_size

aten = torch.ops.aten


def _ctc_loss(mode: Any, _: Any, log_probs: torch.Tensor, *rest: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    """Losses, and what backward needs: as long as the longest target, which is a value."""
    time, batch, _ = log_probs.shape
    with mode:
        return log_probs.new_empty([batch]), log_probs.new_empty([batch, time, new_unknown_size(mode)])


def _ctc_loss_backward(mode: Any, _: Any, grad: torch.Tensor, log_probs: torch.Tensor, *rest: Any) -> torch.Tensor:
    with mode:
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


MISSING: dict[OpOverload, Callable[..., Any]] = {
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
}
