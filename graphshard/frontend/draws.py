"""Operators that draw random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from graphshard.ir.tracing_internals import arguments_of


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers; attention without dropout does not."""
    is_random = isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded in func.tags
    return is_random and arguments_of(func, args, kwargs).get("dropout_p") != 0
