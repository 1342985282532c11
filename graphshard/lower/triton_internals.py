"""Inductor's Triton kernels: its processes compile them while the code of further regions is generated.

    this thread         region_1 | region_2 | region_3      wait for kernels
    Inductor's pool      kernels of region_1 ...  kernels of region_2 ...

By itself Inductor waits for the kernels of a region before it goes on to the next. And its processes take seconds to be
there; what is wanted before is compiled in this one. So they are started when `compile` is called.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator
from typing import Any

from torch._inductor import async_compile

from graphshard.ir.torch_internals import replaced

# What a generated module is called with: its names.
Scope = dict[str, Any]

_WAITING: contextvars.ContextVar[list[Scope] | None] = contextvars.ContextVar("graphshard_waiting", default=None)


def begin() -> None:
    """Start Inductor's processes, unless it is set to have none; returns at once."""
    async_compile.maybe_warm_pool()


@contextlib.contextmanager
def not_waiting() -> Iterator[list[Scope]]:
    """In the block generated modules do not wait for their kernels; yields the names of each of them, for `load`."""
    scopes: list[Scope] = []
    before = _WAITING.set(scopes)
    try:
        with replaced(async_compile, "AsyncCompile", _NotWaiting):
            yield scopes
    finally:
        _WAITING.reset(before)


def load(scopes: Iterable[Scope]) -> None:
    """Wait for the kernels of generated modules.

    Raises:
        Exception: whatever Inductor says if it cannot compile one.
    """
    for scope in scopes:
        async_compile.AsyncCompile().wait(scope)


class _NotWaiting(async_compile.AsyncCompile):
    """What generated code calls; in threads that are to wait it is Inductor's."""

    def wait(self, scope: Scope) -> None:
        scopes = _WAITING.get()
        if scopes is None:
            super().wait(scope)
        else:
            scopes.append(scope)
