"""Patches of torch while Dynamo traces: global hooks, numbers that are not finite, tensors that are given twice.

Global hooks of torch, such as CommDebugMode's, run around the model, not in it; Dynamo traces and guards the user's.
Symbols of floats stand for finite numbers, which nan and infinity are not:

    total != total      False, says the algebra of symbols; True of nan
    total * 0           0; nan of nan and of infinity
    min(0.5, total)     Python's depends on the order where one of them is nan

A region, or a custom autograd function, is given a tensor once, however often the call names it. Eager mode computes a
gradient for each and adds these: `checkpoint(attention, x, x, x, use_reentrant=True)`. Of a function torch 2.11 loses
all gradients but one, and later releases refuse it.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx.experimental.sym_node import SymNode

from graphshard.errors import GraphBreak
from graphshard.guards.unguarded_state import GLOBAL_HOOKS
from graphshard.torch_compat.aot_autograd import TracingContext
from graphshard.torch_compat.dynamo import AutogradFunctionApplyVariable, CheckpointHigherOrderVariable, TensorVariable
from graphshard.torch_compat.torch_ops import replaced
from graphshard.utils.source_lines import is_users, source_line

_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
_COMPUTED = ("sub", "mul", "float_truediv", "int_truediv", "mod", "floordiv", "int_floordiv")
_ORDERED = ("sym_min", "sym_max")


def without_torchs_hooks() -> contextlib.AbstractContextManager[None]:
    """Set torch's own hooks of all modules aside in the block, which traces or looks at guards."""
    return _set_aside() if any(GLOBAL_HOOKS) else contextlib.nullcontext()


@contextlib.contextmanager
def _set_aside() -> Iterator[None]:
    kept = [(hooks, dict(hooks)) for hooks in GLOBAL_HOOKS]
    for hooks, content in kept:
        hooks.clear()
        hooks.update({key: hook for key, hook in content.items() if _is_users_hook(hook)})
    try:
        yield
    finally:
        for hooks, content in kept:
            hooks.clear()
            hooks.update(content)


def _is_users_hook(hook: Any) -> bool:
    function = getattr(hook, "__func__", hook)
    code = getattr(function, "__code__", getattr(type(hook).__call__, "__code__", None))
    return code is None or is_users(code.co_filename)


# --- tensors that are given twice -----------------------------------------------------------------------------------


@contextlib.contextmanager
def with_inputs_apart() -> Iterator[None]:
    """Give regions and custom functions a view where the same tensor was given already, while the block is open."""

    def apart(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_apart(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            reentrant = kwargs.get("use_reentrant")
            is_reentrant = reentrant is not None and reentrant.is_python_constant() and reentrant.as_python_constant()
            if is_reentrant or isinstance(self, AutogradFunctionApplyVariable):
                args = _apart(tx, args)
            return call(self, tx, args, kwargs)

        return call_apart

    with contextlib.ExitStack() as stack:
        for kind in (CheckpointHigherOrderVariable, AutogradFunctionApplyVariable):
            stack.enter_context(replaced(kind, "call_function", apart(kind.call_function)))
        yield


def _apart(tx: Any, args: Any) -> list[Any]:
    given, known = list(args), set()
    for place, arg in enumerate(arg.realize() for arg in args):
        if isinstance(arg, TensorVariable):
            node = arg.as_proxy().node
            if node in known:
                given[place] = arg.call_method(tx, "view_as", [arg], {})
            known.add(node)
    return given


# --- floats that may be nan or infinity ---------------------------------------------------------------------------


@contextlib.contextmanager
def finite_numbers(function: str) -> Iterator[None]:
    """Raise GraphBreak in the block where a result holds of finite numbers only, and a number is not known."""

    def watched(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def computes(left: Any, right: Any) -> Any:
            result = compute(left, right)
            # What is made of sizes is finite, such as DTensor's costs.
            symbols = [each for each in (left, right) if any(not s.is_integer for s in each.expr.free_symbols)]
            caller = str(sys._getframe(2).f_globals.get("__name__"))
            if not symbols or caller.startswith("torch._dynamo.variables"):  # whether a symbol is one that it knows
                return result
            known = [each for each in symbols if each.hint is not None]
            if name in _ORDERED:
                holds = len(known) == len(symbols)
            else:
                holds = bool(getattr(result, "expr", left.expr).free_symbols)
            if holds:
                return result
            if len(known) < len(symbols) or not all(math.isfinite(each.hint) for each in known):
                raise _break_at_number(function)
            for each in known:  # a program for each value
                (each.guard_float if each.pytype is float else each.guard_int)("", 0)
            return result

        return computes

    with contextlib.ExitStack() as stack:
        for name in (*_COMPARED, *_COMPUTED, *_ORDERED):
            if hasattr(SymNode, name):
                stack.enter_context(replaced(SymNode, name, watched(name, getattr(SymNode, name))))
        yield


def _break_at_number(function: str) -> GraphBreak:
    where, source = source_line(TracingContext.extract_stack() if TracingContext.try_get() else ())
    reason = "A symbol stands for the float here, and for finite ones only; a value may be nan or infinity."
    remedy = "Compute with tensors (torch.isnan, torch.clamp), or ask with math.isnan outside of forward."
    return GraphBreak(function, reason, remedy, where=where, source=source)
