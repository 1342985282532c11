"""Functions within functions, as Python compiles them."""

from __future__ import annotations

import types
from collections.abc import Iterator


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)
