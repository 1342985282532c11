"""Bytes, seconds, values and foreign texts as people read them."""

from __future__ import annotations

import inspect
import reprlib
from pathlib import PurePath
from typing import Any

from graphshard.errors import visible
from graphshard.ir.classes import users_class

# How long a value is in a message.
_LIMIT, _PATH_LIMIT = 80, 400


def format_bytes(num_bytes: float) -> str:
    """Three digits and a binary unit: `1.50 MiB`."""
    if num_bytes < 0:
        return f"-{format_bytes(-num_bytes)}"
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):  # noqa: B007
        num_bytes /= 1024
        if num_bytes < 999.5:
            break
    return f"{_three_digits(num_bytes)} {unit}"


def format_seconds(seconds: float) -> str:
    """Three digits and a unit: `12.3 ms`."""
    if seconds == 0:
        return "0"
    factor, unit = (1e6, "us") if seconds < 0.9995e-3 else (1e3, "ms") if seconds < 0.9995 else (1, "s")
    return f"{_three_digits(seconds * factor)} {unit}"


def format_count(count: int) -> str:
    """A number of things, with three digits where it is large: `8.03 billion`."""
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if count >= 0.9995 * size:
            return f"{_three_digits(count / size)} {word}"
    return f"{count:,}"


def format_amount(value: float) -> str:
    """Three digits, or all before the point: `0.0123`, `12.3`, `12,345`."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return _three_digits(value) if value >= 1 else f"{value:.3g}"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def brief(value: object) -> str:
    """A value in a message: what it is in one line of at most 80 characters, of whatever class it is; a path in 400."""
    try:
        text = visible(_BRIEF.repr(value), lines=False)
    except Exception:  # a number of more digits than Python prints, or a class of the user's
        text = f"a {type(value).__name__}"
    limit = _PATH_LIMIT if isinstance(value, PurePath) else _LIMIT
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class _Brief(reprlib.Repr):
    """Plain data as Python writes it, cut short; of other classes the name, as their text may be of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = 60
        self.maxother = _LIMIT

    def repr_instance(self, x: Any, level: int) -> str:
        import torch  # takes seconds, and what a command line has is text

        if isinstance(x, torch.Tensor):
            return f"a {type(x).__name__} of shape {list(x.shape)}"
        if isinstance(x, PurePath):
            return repr(str(x))
        if x is None or isinstance(x, (bool, float, complex, bytes, torch.dtype, torch.device)):
            return super().repr_instance(x, level)
        if inspect.isclass(x) or inspect.isroutine(x):
            return f"the {'class' if inspect.isclass(x) else 'function'} {x.__name__}"
        return f"a {users_class(x).__name__}"


_BRIEF = _Brief()
