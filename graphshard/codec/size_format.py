"""Dynamic sizes as JSON: what is known of each symbol, and expressions in them such as "s0*s1".

    {"s0": {"hint": 128, "range": [2, null]}}    value in the example inputs; least and largest, null if open
    {"s1": {"hint": -3, "range": [null, null]}, "s2": {"hint": 0.1, "range": null}}    numbers that are not sizes

A symbol that depends on values of tensors has no hint. Conditions beyond ranges, such as "Eq(Mod(s0*s1, 8), 0)", are
stored with lowered programs only.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph

from graphshard.errors import ArgumentError
from graphshard.ir.sizes import SymNumber, numbers_in
from graphshard.torch_compat.symbolic_sizes import (
    hint,
    is_unknown,
    new_number,
    new_size,
    new_unknown_float,
    new_unknown_size,
)

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
# Operators by which graphs compute sizes.
SIZE_OPERATORS: tuple[Callable[..., Any], ...] = (
    *_OPERATORS.values(),
    *(operator.truediv, operator.neg, operator.eq, operator.ne, torch.sym_max, torch.sym_min),
)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Max": torch.sym_max,
    "Min": torch.sym_min,
    "FloatTrueDiv": operator.truediv,
    "IntTrueDiv": operator.truediv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Eq": operator.eq,
    "Ne": operator.ne,
}


def encode_symbols(sizes: Iterable[tuple[str, SymNumber]], graphs: Iterable[Graph]) -> dict[str, Any]:
    """Return what is known of symbols by name: of dynamic sizes, and of those in graphs that depend on values."""
    found: dict[str, Any] = {}
    for name, size in sizes:
        if isinstance(size, torch.SymFloat):
            found[name] = {"hint": float(size.node.hint), "range": None}
        else:
            assert isinstance(size, torch.SymInt)
            found[name] = {"hint": hint(size), "range": _ends(size.node.shape_env.bound_sympy(size.node.expr))}
    numbers = [n for graph in graphs for node in graph.nodes for n in numbers_in(node.meta.get("val")) if is_unknown(n)]
    unknown = {symbol: n.node.shape_env for n in numbers for symbol in n.node.expr.free_symbols}
    for symbol, env in sorted(unknown.items(), key=str):
        found[str(symbol)] = {"hint": None, "range": _ends(env.var_to_range[symbol]) if symbol.is_integer else None}
    return found


def _ends(known: Any) -> list[int | None]:
    return [int(end) if end.is_Integer else None for end in (known.lower, known.upper)]


def decode_symbols(data: Mapping[str, Any], mode: Any) -> dict[str, SymNumber]:
    """Inverse of `encode_symbols`: sizes of a fake mode."""
    found: dict[str, SymNumber] = {}
    for name, item in data.items():
        ends = item["range"] or ()
        numbers = [number for number in (item["hint"], *ends) if number is not None]
        is_number = item["hint"] is not None and (not ends or ends[0] is None or ends[0] < 0)
        sized = all(type(n) is int and (n >= 0 or is_number) for n in numbers)
        if not name.isidentifier() or not (sized or (is_number and not ends and type(item["hint"]) is float)):
            raise ArgumentError(f"{name!r}: {item} is no size")
        if is_number:
            found[name] = new_number(mode, name, item["hint"])
        elif item["hint"] is not None:
            found[name] = new_size(mode, name, item["hint"], *ends)
        else:
            found[name] = new_unknown_size(mode, *ends) if ends else new_unknown_float(mode)
    return found


def parse_size(text: str, sizes: Mapping[str, Any]) -> Any:
    """Return the value of an expression or comparison of sizes; nothing but arithmetic is evaluated.

    Raises:
        ArgumentError: the text is anything else.
    """

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.Name(id=name) if name in sizes:
                return sizes[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]) if (
                type(op) in _OPERATORS
            ):
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.Call(func=ast.Name(id=name), args=[first, second], keywords=[]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](value(first), value(second))
        raise ArgumentError(f"{text[:60]!r} is no size")

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError):
        raise ArgumentError(f"{text[:60]!r} is no size") from None
