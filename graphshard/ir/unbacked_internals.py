"""Torch internals of sizes and numbers that depend on the values of tensors: its unbacked symbols, and values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    _constrain_range_for_size,
    free_unbacked_symbols,
)
from torch.utils import _pytree as pytree

from graphshard.ir.torch_internals import replaced, without_dispatch_modes

__all__ = [
    "UNKNOWN_TEXT",
    "conditions_on_sizes",
    "is_unknown",
    "makes_size",
    "new_symbols_dropped",
    "new_unknown_float",
    "new_unknown_size",
    "numbers_as_text",
    "numbers_found",
    "numbers_not_cancelled",
    "without_any_modes",
]

# Of a number; nobody else writes so.
UNKNOWN_TEXT = "\u2983{}\u2984"


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


@contextlib.contextmanager
def new_symbols_dropped(mode: FakeTensorMode) -> Iterator[None]:
    """Within the block, operators run for their shapes alone: sizes that they make need not be found in a graph."""
    with contextlib.nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols():
        yield


@contextlib.contextmanager
def conditions_on_sizes(
    decide: Callable[[torch.SymBool], bool | None], check: Callable[[torch.SymBool], None]
) -> Iterator[None]:
    """Within the block, conditions on sizes that depend on values are not torch's alone.

    Args:
        decide: asked where code decides by one; None leaves it to torch.
        check: told what `torch._check` takes for granted.
    """
    ask, expect = torch.SymBool.__bool__, symbolic_shapes.expect_true

    def truth(self: torch.SymBool) -> bool:
        decided = decide(self) if free_unbacked_symbols(self) else None
        return bool(ask(self)) if decided is None else decided

    def expected(value: Any, skip: int = 0) -> bool:
        if isinstance(value, torch.SymBool) and free_unbacked_symbols(value):
            check(value)
        return bool(expect(value, skip))

    with replaced(torch.SymBool, "__bool__", truth), replaced(symbolic_shapes, "expect_true", expected):
        yield


@contextlib.contextmanager
def numbers_found(find: Callable[[sympy.Basic], bool | int | float | None]) -> Iterator[None]:
    """Within the block, what torch must know of sizes and numbers that depend on values can be found out.

    Args:
        find: what an expression of them is; None if that is unknown, which is torch's error.
    """
    evaluate = ShapeEnv.evaluate_sym_node

    def evaluated(self: ShapeEnv, node: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return evaluate(self, node, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            value = find(node.expr)
            if value is None:
                raise
            return value

    with replaced(ShapeEnv, "evaluate_sym_node", evaluated):
        yield


@contextlib.contextmanager
def numbers_not_cancelled(ask: Callable[[Any], Any]) -> Iterator[None]:
    """Within the block, what torch believes to know of any number, and nan, infinity and rounding decide, is asked for.

        v != v, v - v == 0, v < inf         of a symbol these are constants

    Args:
        ask: given such a number or truth value; what it returns is in its place, and None leaves it to torch.
    """
    with contextlib.ExitStack() as stack:
        for name in ("eq", "ne", "lt", "le", "gt", "ge", "bool", "int", "float"):
            original = getattr(torch.SymFloat, f"__{name}__")
            stack.enter_context(replaced(torch.SymFloat, f"__{name}__", _not_cancelled(original, ask)))
        yield


def _not_cancelled(original: Callable[..., Any], ask: Callable[[Any], Any]) -> Callable[..., Any]:
    def asked(self: torch.SymFloat, *other: Any) -> Any:
        result = original(self, *other)
        number = result if other else self
        is_lost = isinstance(number, (torch.SymFloat, torch.SymBool)) and not number.node.expr.free_symbols
        found = ask(number) if is_lost else None
        return result if found is None else found

    return asked


@contextlib.contextmanager
def numbers_as_text(is_asked: Callable[[Any], bool]) -> Iterator[None]:
    """Within the block, the text of a number that is not known is `UNKNOWN_TEXT`, if that is asked for.

    Without that it is the name of a symbol, which looks like text of the user's, and there is none of a given format.
    """
    with contextlib.ExitStack() as stack:
        for kind in (torch.SymInt, torch.SymFloat, torch.SymBool):
            for name in ("__repr__", "__format__"):
                stack.enter_context(replaced(kind, name, _as_text(getattr(kind, name), is_asked)))
        yield


def _as_text(original: Callable[..., str], is_asked: Callable[[Any], bool]) -> Callable[..., str]:
    def text(self: Any, *form: str) -> str:
        return (
            UNKNOWN_TEXT.format(self.node) if not self.node.is_constant() and is_asked(self) else original(self, *form)
        )

    return text


def makes_size(node: torch.fx.Node) -> bool:
    """Whether an operator makes a number, or a tensor of a size, that depends on the values of a tensor."""
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return (
        isinstance(node.target, OpOverload)
        and any(tag in node.target.tags for tag in tags)
        and any(map(is_unknown, pytree.tree_leaves(node.meta.get("val"))))
    )


def is_unknown(value: Any) -> bool:
    """Whether a value is a number, or a tensor of a size, that depends on the values of a tensor."""
    return isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) and bool(
        free_unbacked_symbols(value)
    )


@contextlib.contextmanager
def without_any_modes() -> Iterator[None]:
    """Within a trace, real tensors are computed with as outside of it: no mode stands something in for them."""
    with without_dispatch_modes(), torch._C.DisableTorchFunction():
        yield
