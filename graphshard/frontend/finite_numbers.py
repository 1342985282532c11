"""Graph breaks where symbols of floats are taken for finite numbers, which nan and infinity are not.

total != total      False, says the algebra of symbols; True of nan
total * 0           0; nan of nan and of infinity
min(0.5, total)     Python's depends on the order where one of them is nan
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch._guards import TracingContext
from torch.fx.experimental.sym_node import SymNode

from graphshard.frontend.graph_breaks import GraphBreak, source_line
from graphshard.ir.torch_internals import replaced

_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
_COMPUTED = ("sub", "mul", "float_truediv", "int_truediv", "mod", "floordiv", "int_floordiv")
_ORDERED = ("sym_min", "sym_max")


@contextlib.contextmanager
def finite_numbers(function: str) -> Iterator[None]:
    """Raise GraphBreak in the block where a result holds of finite numbers only, and a number is not known.

    Args:
        function: that is traced, for the message.
    """

    def watched(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def computes(left: Any, right: Any) -> Any:
            result = compute(left, right)
            symbols = [each for each in (left, right) if _has_floats(each)]
            if not symbols or _is_dynamos_own():
                return result
            known = [each for each in symbols if each.hint is not None]
            if name in _ORDERED:
                holds = len(known) == len(symbols)
            else:
                holds = bool(getattr(result, "expr", left.expr).free_symbols)
            if holds:
                return result
            if len(known) < len(symbols) or not all(math.isfinite(each.hint) for each in known):
                raise _break(function)
            for each in known:  # a program for each value
                (each.guard_float if each.pytype is float else each.guard_int)("", 0)
            return result

        return computes

    with contextlib.ExitStack() as stack:
        for name in (*_COMPARED, *_COMPUTED, *_ORDERED):
            if hasattr(SymNode, name):
                stack.enter_context(replaced(SymNode, name, watched(name, getattr(SymNode, name))))
        yield


def _has_floats(number: SymNode) -> bool:
    """Return whether floats are unknown: what is made of sizes is finite, such as DTensor's costs."""
    return any(not symbol.is_integer for symbol in number.expr.free_symbols)


def _is_dynamos_own() -> bool:
    """Return whether Dynamo asks for itself, such as whether a symbol is the one that it knows."""
    return str(sys._getframe(3).f_globals.get("__name__")).startswith("torch._dynamo.variables")


def _break(function: str) -> GraphBreak:
    stack = TracingContext.extract_stack() if TracingContext.try_get() else ()
    where, source = source_line(stack)
    reason = "A symbol stands for the float here, and for finite ones only; a value may be nan or infinity."
    return GraphBreak(
        function,
        reason,
        "Compute with tensors (torch.isnan, torch.clamp), or ask with math.isnan outside of forward.",
        where=where,
        source=source,
    )
