"""Code by its contents, and functions by their names."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from graphshard.cache.watching import Ran
from graphshard.ir.state import MISSING


@functools.lru_cache(maxsize=65536)
def _digest(code: types.CodeType) -> str:
    consts = [digest_of(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts]
    parts = (
        *(
            code.co_name,
            code.co_argcount,
            code.co_posonlyargcount,
            code.co_kwonlyargcount,
            code.co_flags,
            code.co_varnames,
        ),
        *(code.co_code, code.co_names, code.co_freevars, code.co_cellvars, consts),
        getattr(code, "co_exceptiontable", b""),
    )
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:24]


def digest_of(code: types.CodeType) -> str:
    """Of what a function is compiled to, and those within it."""
    return _digest(code)


def _constant(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(_constant, value))}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    return f"{type(value).__name__} {value.hex() if isinstance(value, float) else repr(value)}"


def named_function(module: str, name: str) -> Iterator[types.FunctionType]:
    """The functions at a name in a module of Python's, within whatever wraps them."""
    value: Any = sys.modules.get(module, MISSING)
    for part in name.split("."):
        value = inspect.getattr_static(value, part, MISSING)
    waiting, seen = [value], 0
    while waiting and seen < 16:
        seen, each = seen + 1, waiting.pop()
        if isinstance(each, types.FunctionType):
            yield each
        inner = ("__wrapped__", "__func__", "fget", "fset", "func", "_torchdynamo_orig_callable")
        waiting += [found for key in inner if (found := inspect.getattr_static(each, key, None)) is not None]


def codes_that_ran(ran: Ran) -> list[tuple[str, str, str]]:
    """The code that ran: module, qualified name and digest."""
    return sorted({(module, code.co_qualname, digest_of(code)) for code, module in ran.codes.values()})  # type: ignore[attr-defined]


def names_in(ran: Ran) -> frozenset[str]:
    """All names, and strings that may be names, in the code that ran."""
    codes = [code for code, _ in ran.codes.values()]
    return frozenset(
        {name for code in codes for name in (*code.co_names, *code.co_freevars)}
        | {const for code in codes for const in code.co_consts if isinstance(const, str) and const.isidentifier()}
    )
