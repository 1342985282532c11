"""Arithmetic of costs for numbers, arrays of samples and sympy expressions."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import sympy

# A number, an array, or an expression of symbols.
Scalar = Any


def maximum(*values: Scalar) -> Scalar:
    """Return the largest; an expression or an array if one of them is."""
    # Comparing expressions is what makes sympy slow, and is not needed.
    if any(isinstance(v, sympy.Expr) for v in values):
        return sympy.Max(*values, evaluate=False)
    return functools.reduce(np.maximum, values) if any(isinstance(v, np.ndarray) for v in values) else max(values)


def minimum(*values: Scalar) -> Scalar:
    """Return the smallest; an expression or an array if one of them is."""
    if any(isinstance(v, sympy.Expr) for v in values):
        return sympy.Min(*values, evaluate=False)
    return functools.reduce(np.minimum, values) if any(isinstance(v, np.ndarray) for v in values) else min(values)


def ceiling(value: Scalar) -> Scalar:
    """Round up; an expression stays one."""
    return sympy.ceiling(value) if isinstance(value, sympy.Expr) else math.ceil(value)


def log2(value: Scalar) -> Scalar:
    """Return the binary logarithm; of an expression, an expression."""
    return sympy.log(value, 2) if isinstance(value, sympy.Expr) else math.log2(value)


def is_zero(value: Scalar) -> bool:
    """Return whether a number of a profile is 0 and has no range."""
    return isinstance(value, (int, float)) and not value


def slowed(seconds: Scalar, busy: Scalar, contention: float) -> Scalar:
    """Return the time of compute that advances slower, by `contention`, for the first `busy` seconds."""
    if is_zero(contention):
        return seconds
    return seconds + contention * minimum(seconds / (1 - contention), maximum(busy, 0.0))
