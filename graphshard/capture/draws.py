"""Operators that draw random numbers, and places where they must not, as eager mode draws at another time there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from graphshard.capture.untraceable import Untraceable
from graphshard.ir.tracing_internals import arguments_of


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers; attention without dropout does not."""
    is_random = isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded in func.tags
    return is_random and arguments_of(func, args, kwargs).get("dropout_p") != 0


class NoDraws(TorchDispatchMode):
    """Raises where random numbers are drawn.

    Args:
        refusal: the error for an operator that draws.
    """

    supports_higher_order_operators = True

    def __init__(self, refusal: Callable[[OpOverload], Untraceable]) -> None:
        super().__init__()
        self._refusal = refusal

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if draws(func, args, kwargs or {}):
            raise self._refusal(func)
        return func(*args, **(kwargs or {}))
