"""Long work asks now and then if it is still wanted: what ends it is raised there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_CHECK: ContextVar[Callable[[], None] | None] = ContextVar("graphshard_still_wanted", default=None)


@contextlib.contextmanager
def wanted_while(check: Callable[[], None]) -> Iterator[None]:
    """In the block `still_wanted` calls `check`, which raises what ends the work. It is called often."""
    before = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(before)


def still_wanted() -> None:
    """Raise what ends the work that is going on in this thread, if anything does."""
    if (check := _CHECK.get()) is not None:
        check()
