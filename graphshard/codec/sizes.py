"""Dynamic sizes as plain JSON: how many there are, and expressions in them such as "s0*s1".

    {"s0": {"hint": 128, "range": [2, null]}}    in the example inputs; the least and the largest, which may be open

What was taken for granted of the sizes beyond their ranges concerns calls: only lowered programs have it stored, as
conditions such as "Eq(Mod(s0*s1, 8), 0)". Numbers of calls that are no sizes have no least one; floats have no range:

    {"s1": {"hint": -3, "range": [null, null]}, "s2": {"hint": 0.1, "range": null}}
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
}
# What graphs compute sizes with.
SIZE_OPERATORS: tuple[Callable[..., Any], ...] = (
    *_OPERATORS.values(),
    *(operator.truediv, operator.neg, torch.sym_max, torch.sym_min),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
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
_COMPARISONS: dict[type, Callable[..., Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def encode_symbols(sizes: Iterable[tuple[str, SymNumber]]) -> dict[str, Any]:
    """Return what is known of dynamic sizes and numbers, by name."""
    return {name: _known(size) for name, size in sizes}


def _known(size: SymNumber) -> dict[str, Any]:
    if isinstance(size, torch.SymFloat):
        return {"hint": float(size.node.hint), "range": None}
    assert isinstance(size, torch.SymInt)
    return {"hint": hint(size), "range": _range(size)}


def encode_unknown(graphs: Iterable[Graph]) -> dict[str, Any]:
    """The same of numbers in graphs that depend on values; they have no hint, and those that are no sizes no range."""
    numbers = [n for graph in graphs for node in graph.nodes for n in numbers_in(node.meta.get("val")) if is_unknown(n)]
    symbols = {symbol: n.node.shape_env for n in numbers for symbol in n.node.expr.free_symbols}
    ranges = {str(symbol): env.var_to_range[symbol] for symbol, env in symbols.items()}
    floats = {str(symbol) for symbol in symbols if not symbol.is_integer}
    return {
        name: {"hint": None, "range": None if name in floats else _ends(known)}
        for name, known in sorted(ranges.items())
    }


def _range(size: torch.SymInt) -> list[int | None]:
    return _ends(size.node.shape_env.bound_sympy(size.node.expr))


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
    """The value of an expression in sizes, or of a comparison. Nothing but arithmetic is evaluated.

    Raises:
        ArgumentError: it is something else.
    """

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.Name(id=name) if name in sizes:
                return sizes[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                return _COMPARISONS[type(op)](value(left), value(right))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS and len(args) == 2:
                return _FUNCTIONS[name](value(args[0]), value(args[1]))
        raise ArgumentError(f"{text[:60]!r} is no size")

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError):
        raise ArgumentError(f"{text[:60]!r} is no size") from None
