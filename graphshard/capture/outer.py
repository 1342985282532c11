"""What a function of the user's reaches besides its arguments: variables that it closes over, and globals.

seen = []
layer.register_forward_hook(lambda module, args, out: seen.append(out))        cell "seen"
SCALE = 2.0
def forward(self, x): return x * SCALE                                        global "SCALE"
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from graphshard.capture.code import codes_of
from graphshard.capture.witness import PLAIN, is_container
from graphshard.ir.state import MISSING, StepKind

# Larger ones are taken for tables, which do not change.
_LARGEST = 64


def reached(function: types.FunctionType) -> Iterator[tuple[StepKind, str, Any]]:
    """Variables and globals that a function names, with their values."""
    for name in function.__code__.co_freevars:
        value = getter(function, "cell", name)(name, MISSING)
        if value is not MISSING:
            yield "cell", name, value
    for name in _names(function.__code__):
        value = function.__globals__.get(name, MISSING)
        if value is not MISSING and not name.startswith("__") and _may_change(value):
            yield "global", name, value


def getter(function: types.FunctionType, kind: StepKind, name: str) -> Callable[[str, Any], Any]:
    """What looks a variable up: called with its name and a default."""
    return _Cell(function, name).get if kind == "cell" else function.__globals__.get


def put(function: types.FunctionType, kind: StepKind, name: str, value: Any) -> None:
    """Give a variable another value."""
    if kind == "cell":
        _Cell(function, name).cell.cell_contents = value
    else:
        function.__globals__[name] = value


class _Cell:
    """A variable that a function closes over."""

    def __init__(self, function: types.FunctionType, name: str) -> None:
        assert function.__closure__ is not None
        self.cell = function.__closure__[function.__code__.co_freevars.index(name)]

    def get(self, _: str, default: Any) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # not filled yet
            return default


@functools.cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function names; `co_names` has the names of attributes as well."""
    steps = (step for part in codes_of(code) for step in dis.get_instructions(part))
    return tuple(dict.fromkeys(step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")))


def _may_change(value: Any) -> bool:
    """Whether a global is something that a program may set: modules, classes and loggers are not."""
    if is_container(value):
        return type(value) in (list, tuple, dict, set, frozenset) and len(value) <= _LARGEST
    return isinstance(value, (*PLAIN, torch.Tensor, nn.Module, types.FunctionType))
