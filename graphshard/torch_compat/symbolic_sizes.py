"""Dynamic sizes and numbers: symbols with a hint from the example inputs, and symbols that depend on tensor values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP as NAMES_OF_SIZE_GUARDS
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, _constrain_range_for_size, free_unbacked_symbols
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.symbol import SymT, symbol_is_type

from graphshard.torch_compat.fake_tensors import FakeTensorMode

# Estimated value of a size that depends on tensor values.
_GUESS = 64


def new_size(mode: FakeTensorMode, name: str, hint: int, low: int | None, high: int | None) -> torch.SymInt:
    """Return a dynamic size, given its value in the example inputs and its least and largest value."""
    env = mode.shape_env
    assert env is not None
    source = ConstantSource(name)
    symbol = env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    env.constrain_symbol_range(symbol, low if low is not None else 2, high if high is not None else int_oo)
    size = env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(size, torch.SymInt)  # torch makes constants of 0 and 1, which a file may say
    return size


def new_number(mode: FakeTensorMode, name: str, hint: int | float) -> torch.SymInt | torch.SymFloat:
    """Return a symbol for a number that is not a size, with its value in the example inputs."""
    env, source = mode.shape_env, ConstantSource(name)
    assert env is not None
    symbol = env.create_unspecified_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    make: Any = env.create_symfloatnode if isinstance(hint, float) else env.create_symintnode
    return make(symbol, hint=hint, source=source)


def new_unknown_size(mode: FakeTensorMode, low: int | None = None, high: int | None = None) -> torch.SymInt:
    """Return a size that depends on tensor values, with its least and largest value."""
    assert mode.shape_env is not None
    with mode.shape_env.ignore_fresh_unbacked_symbols():  # no operator makes it
        size: torch.SymInt = mode.shape_env.create_unbacked_symint()
    _constrain_range_for_size(size, low, high)
    return size


def new_unknown_float(mode: FakeTensorMode) -> torch.SymFloat:
    """Return a float that depends on tensor values."""
    assert mode.shape_env is not None
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        return mode.shape_env.create_unbacked_symfloat()


@contextlib.contextmanager
def new_symbols_dropped(mode: FakeTensorMode) -> Iterator[None]:
    """Run operators for their shapes alone: no graph has to bind the symbols that they create."""
    with contextlib.nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols():
        yield


def has_unknown(sizes: ShapeEnv) -> bool:
    """Return whether symbols of a trace depend on tensor values."""
    return any(symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)) for symbol in sizes.var_to_range)


def is_unknown(value: Any) -> bool:
    """Return whether a number, or a size of a tensor, depends on tensor values."""
    kinds = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(value, kinds) and bool(free_unbacked_symbols(value))


def hint(size: int | torch.SymInt) -> int:
    """Return a size, or the value that a dynamic size has in the example inputs.

    A size that depends on tensor values is estimated within its range, see `assume_total`.
    """
    if not isinstance(size, torch.SymInt):
        return size
    if size.node.hint is not None:
        return int(size.node.hint)
    expr = size.node.expr
    known = size.node.shape_env.bound_sympy(expr)
    assumed = _assumed_in(size.node.shape_env)
    guess = expr.xreplace({symbol: sympy.Integer(assumed.get(symbol, _GUESS)) for symbol in expr.free_symbols})
    return int(min(max(guess, known.lower), known.upper))


def assume_total(sizes: Sequence[int | torch.SymInt], total: int) -> None:
    """Estimate sizes that depend on tensor values as equal parts of a total; earlier estimates stay."""
    for size in sizes:
        if isinstance(size, torch.SymInt) and size.node.hint is None:
            assumed, symbols = _assumed_in(size.node.shape_env), size.node.expr.free_symbols
            for symbol in symbols - set(assumed):
                assumed[symbol] = max(round(total / len(sizes) / len(symbols)), 1)


def _assumed_in(sizes: ShapeEnv) -> dict[sympy.Symbol, int]:
    """Return the estimates of unbacked symbols, for which Inductor also tunes kernels."""
    return vars(sizes).setdefault("var_to_hint_override", {})


def condition(value: torch.SymBool | bool) -> None:
    """Assume a comparison of dynamic sizes: the shape environment records it as a guard, as capture does.

    Raises:
        ValueError: it does not hold for the example inputs.
    """
    if not bool(value):
        raise ValueError("a condition does not hold at the sizes of the example inputs")
