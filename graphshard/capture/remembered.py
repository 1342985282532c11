"""Functions of the user's that remember their results, with `functools.cache` or `lru_cache`.

    @functools.cache
    def mask(n): return torch.ones(n, n).tril()         torch.ones and tril run as in eager mode: what is kept is a real
                                                        tensor, and a constant of the program
    @functools.cache
    def scaled(x): return 2 * x                         an error: the tensor of the trace would be kept

What such a function does with numbers happens once in eager mode, too, in the call that is captured. A tensor that
depends on what forward is given would be given to later calls, which compute with others; it is taken out again.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import types
from collections.abc import Mapping
from types import CodeType, TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from graphshard.capture.draws import NoDraws
from graphshard.capture.lines import callers
from graphshard.capture.untraceable import Untraceable, is_users
from graphshard.ir.driver_internals import stands_in
from graphshard.ir.subclasses import has_traced
from graphshard.ir.torch_internals import without_dispatch_modes

_TYPE: Any = type(functools.lru_cache(len))
# What else there may be in a result is not looked into.
_OTHERS = (torch.nn.Module, type, types.ModuleType, types.FunctionType, types.CodeType, types.FrameType)
_MOST = 10_000


def remembering_functions() -> dict[CodeType, list[Any]]:
    """The user's functions that remember results, by their code; Python looks through all objects there are."""
    found: dict[CodeType, list[Any]] = {}
    for value in gc.get_referrers(_TYPE):
        if type(value) is _TYPE:
            code = getattr(inspect.unwrap(value), "__code__", None)
            if code is not None and is_users(code.co_filename):
                found.setdefault(code, []).append(value)
    return found


class Remembered(TorchFunctionMode):
    """While this is open, functions that remember what they make of numbers make it as in eager mode.

    Args:
        functions: those there are.

    Raises, in the block:
        Untraceable: such a function draws random numbers, or at the end, has kept a traced tensor.
    """

    def __init__(self, functions: Mapping[CodeType, list[Any]]) -> None:
        super().__init__()
        self._functions = functions
        self._traced: dict[CodeType, None] = {}  # codes that were given a traced tensor, or made one

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        codes = [f.f_code for f in callers(sys._getframe(1)) if f.f_code in self._functions] if self._functions else []
        if not codes:
            return func(*args, **kwargs)
        given = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, torch.Tensor)]
        if stands_in() or any(map(has_traced, given)):
            self._traced |= dict.fromkeys(codes)
            return func(*args, **kwargs)
        function = self._functions[codes[0]][0]
        # Random numbers would be drawn before those that the program draws, not between them.
        with without_dispatch_modes(), NoDraws(lambda _: _refusal(function)):
            return func(*args, **kwargs)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traced: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traced)
        kept = [function for code in self._traced for function in self._functions[code] if _keeps_traced(function)]
        for function in kept:
            function.cache_clear()
        if kept and (error is None or (isinstance(error, Exception) and not isinstance(error, Untraceable))):
            raise _refusal(kept[0])


def _refusal(function: Any) -> Untraceable:
    code = inspect.unwrap(function).__code__
    return Untraceable("remembered", f"function {function.__qualname__}", (code.co_filename, code.co_firstlineno))


def _keeps_traced(function: Any) -> bool:
    """Whether a traced tensor is among the results that a function remembers, or the arguments it knows them by."""
    todo = [each for each in gc.get_referents(function) if isinstance(each, dict) and each is not vars(function)]
    seen: set[int] = set()
    while todo and len(seen) < _MOST:
        each = todo.pop()
        if id(each) in seen or isinstance(each, _OTHERS):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            if has_traced(each):
                return True
        else:
            todo += gc.get_referents(each)
    return False
