"""Batch norm whose statistics are averages over all batches: `momentum=None`.

    factor = 1.0 / float(self.num_batches_tracked)      the weight of a batch becomes a number of Python's,
    F.batch_norm(..., momentum=factor)                  which torch's kernel is given, and a trace does not know

An operator of graphshard's makes the statistics of what was counted; the output depends on the batch alone.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from graphshard.ir.operators import CUMULATED
from graphshard.ir.tracing_internals import is_traced

_FORWARD = _BatchNorm.forward.__code__


class BatchAverages(TorchFunctionMode):
    """While this is open, such modules can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self._count: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__float__ and is_traced(args[0]) and _is_asked_by_batch_norm():
            self._count = args[0]
            return math.nan  # which comes back as the momentum
        if func is F.batch_norm and self._count is not None:
            count, self._count = self._count, None
            return _normalized(count, *args, **kwargs)
        return func(*args, **kwargs)


def _is_asked_by_batch_norm() -> bool:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") != _BatchNorm.__module__:
        if frame.f_code.co_name == "forward":
            return False
        frame = frame.f_back
    return frame.f_code is _FORWARD


def _normalized(
    count: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    assert training
    assert math.isnan(momentum)
    with torch.no_grad():
        made = CUMULATED(x.detach(), _detached(weight), _detached(bias), mean, var, count, eps)
    y = F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    with torch.no_grad():
        mean.copy_(made[0])
        var.copy_(made[1])
    return y


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
