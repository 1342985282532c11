"""Being told which functions a thread calls: by `sys.monitoring`, and before Python 3.12 by a trace function."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload

from graphshard.capture.watch import Watch
from graphshard.ir.torch_internals import replaced
from graphshard.ir.tracing_internals import TRACING_MODES

# Of which namespaces operators have no code of the user's.
_TORCHS = frozenset({"aten", "prims", "prim"})


def told_of_calls(note: Callable[[types.FrameType], bool], known: set[int]) -> contextlib.AbstractContextManager[None]:
    """In the block `note` is told of functions that are called; of those in `known` it need not be."""
    return _monitored(note) if sys.version_info >= (3, 12) else _traced(note, known)


def free_tool() -> int | None:
    """A number for a tool of `sys.monitoring`; None if all are taken. Before Python 3.12 any will do."""
    if sys.version_info < (3, 12):
        return 0
    monitoring: Any = sys.monitoring
    return next((number for number in (4, 3, 5, 2) if monitoring.get_tool(number) is None), None)


@contextlib.contextmanager
def _monitored(note: Callable[[types.FrameType], bool]) -> Iterator[None]:
    """Python says once of each function that it is called."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    tool = free_tool()
    thread = threading.get_ident()

    def started(code: types.CodeType, _: int) -> Any:
        if threading.get_ident() != thread:
            return None
        frame = sys._getframe(1)
        return monitoring.DISABLE if frame.f_code is code and note(frame) else None

    monitoring.use_tool_id(tool, "graphshard")
    try:
        monitoring.register_callback(tool, monitoring.events.PY_START, started)
        monitoring.restart_events()
        monitoring.set_events(tool, monitoring.events.PY_START)
        yield
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, monitoring.events.PY_START, None)
        monitoring.free_tool_id(tool)


@contextlib.contextmanager
def _traced(note: Callable[[types.FrameType], bool], known: set[int]) -> Iterator[None]:
    """Each call is told of, which takes as long as many calls do: not while torch works on an operator."""

    def call(frame: types.FrameType, _: str, __: Any) -> None:
        if id(frame.f_code) not in known:
            note(frame)

    def pause() -> Callable[[], None] | None:
        if sys.gettrace() is not call:
            return None
        sys.settrace(None)
        return go_on

    def go_on() -> None:
        sys.settrace(call)

    with _pausing_in_operators(pause):
        sys.settrace(call)
        try:
            yield
        finally:
            sys.settrace(None)


@contextlib.contextmanager
def _pausing_in_operators(pause: Callable[[], Callable[[], None] | None]) -> Iterator[None]:
    """In the block `pause` is called where an operator of torch's is traced, and what it returns at the end of that.

    So it is where torch writes the code of a graph. No code of the user's runs meanwhile. For operators and tensors of
    others some may, and there is no pause.
    """

    def around(dispatch: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(dispatch)
        def paused(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            torchs = isinstance(func, OpOverload) and func.namespace in _TORCHS
            go_on = pause() if torchs and all(kind.__module__.startswith("torch.") for kind in types) else None
            if go_on is None:
                return dispatch(self, func, types, args, kwargs)
            try:
                return dispatch(self, func, types, args, kwargs)
            finally:
                go_on()

        return paused

    def recompiled(self: torch.fx.GraphModule) -> Any:
        go_on = pause()
        try:
            return recompile(self)
        finally:
            if go_on is not None:
                go_on()

    recompile = torch.fx.GraphModule.recompile
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(torch.fx.GraphModule, "recompile", recompiled))
        for mode in (*TRACING_MODES, Watch):
            stack.enter_context(replaced(mode, "__torch_dispatch__", around(mode.__torch_dispatch__)))
        yield
