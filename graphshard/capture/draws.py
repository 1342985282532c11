"""Operators that draw random numbers, and regions of checkpoints that would draw others when they run again."""

from __future__ import annotations

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
    """Raises Untraceable where random numbers are drawn that eager mode draws anew in backward."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if draws(func, args, kwargs or {}):
            raise Untraceable("draws anew", f"operator {func}")
        return func(*args, **(kwargs or {}))
