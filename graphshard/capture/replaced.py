"""Functions of `torch.nn.functional` that are others than torch's, as attention is in torch's `context_parallel`.

    with context_parallel(mesh["cp"], buffers=[tokens], buffer_seq_dims=[1]):
        model(tokens)                  a program of its own

Layers of torch look these functions up when they are called, so a call may use others than the capture did. Each is
told by its code, and by the plain values and meshes that it closes over: `context_parallel` makes a new one every time.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from graphshard.capture.code import hash_of
from graphshard.capture.outer import getter
from graphshard.capture.witness import FUNCTIONS, PLAIN, describe
from graphshard.ir.state import MISSING

_FIRST = {name: value for name, value in vars(F).items() if callable(value) and not name.startswith("_")}
_now: Callable[[dict[str, Any]], tuple[Any, ...]] = operator.itemgetter(*_FIRST)
_FILES = (F.__file__, torch._jit_internal.__file__, torch.overrides.__file__)


class Replaced:
    """Asked at every call, which takes microseconds; to describe what was replaced takes milliseconds."""

    def __init__(self) -> None:
        self._functions: tuple[Any, ...] = ()
        self._described: tuple[str, ...] = ()

    def now(self) -> tuple[str, ...]:
        """What is said of the functions that are replaced now, in the order of their names."""
        functions = _now(vars(F))
        if functions != self._functions:
            pairs = sorted(zip(_FIRST, functions), key=operator.itemgetter(0))
            self._described = tuple(_described(name, value) for name, value in pairs if not _is_torchs(name, value))
            self._functions = functions
        return self._described


def _is_torchs(name: str, value: Any) -> bool:
    if value is not _FIRST[name]:  # one of torch's may stand in the place of another
        return False
    code = getattr(value, "__code__", None)
    return code is None or code.co_filename in _FILES


def _described(name: str, value: Any) -> str:
    names = value.__code__.co_freevars if isinstance(value, types.FunctionType) else ()
    closed = {variable: getter(value, "cell", variable)(variable, MISSING) for variable in names}
    plain = {variable: repr(held) for variable, held in closed.items() if isinstance(held, (*PLAIN, DeviceMesh))}
    of_class = "" if isinstance(value, FUNCTIONS) else hash_of([type(value)])[:12]
    return f"{name}: {describe(value, {})} {of_class} {plain}"
