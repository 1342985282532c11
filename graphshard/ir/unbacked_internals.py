"""Torch internals of sizes and numbers that depend on the values of tensors: its unbacked symbols, and values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    _constrain_range_for_size,
    free_unbacked_symbols,
)

__all__ = [
    "is_unknown",
    "new_number",
    "new_symbols_dropped",
    "new_unknown_float",
    "new_unknown_size",
]


def new_unknown_size(mode: FakeTensorMode, low: int | None = None, high: int | None = None) -> torch.SymInt:
    """A size that depends on values, with its least and largest."""
    assert mode.shape_env is not None
    with mode.shape_env.ignore_fresh_unbacked_symbols():  # no operator makes it
        size: torch.SymInt = mode.shape_env.create_unbacked_symint()
    _constrain_range_for_size(size, low, high)
    return size


def new_unknown_float(mode: FakeTensorMode) -> torch.SymFloat:
    """A number that depends on values, and is no size."""
    assert mode.shape_env is not None
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        number: torch.SymFloat = mode.shape_env.create_unbacked_symfloat()
    return number


def new_number(mode: FakeTensorMode, name: str, hint: int | float) -> torch.SymInt | torch.SymFloat:
    """Return a symbol for a number of a call, which is no size: it may be negative, and a float is one, too.

    Args:
        hint: its value in the example inputs.
    """
    env, source = mode.shape_env, ConstantSource(name)
    assert env is not None
    symbol = env.create_unspecified_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    make = env.create_symfloatnode if isinstance(hint, float) else env.create_symintnode
    number: Any = make(symbol, hint=hint, source=source)
    assert isinstance(number, (torch.SymInt, torch.SymFloat))
    return number


@contextlib.contextmanager
def new_symbols_dropped(mode: FakeTensorMode) -> Iterator[None]:
    """Within the block, operators run for their shapes alone: sizes that they make need not be found in a graph."""
    with contextlib.nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols():
        yield


def is_unknown(value: Any) -> bool:
    """Whether a value is a number, or a tensor of a size, that depends on the values of a tensor."""
    return isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) and bool(
        free_unbacked_symbols(value)
    )
