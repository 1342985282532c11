"""What is begun in a thread before it is needed."""

from __future__ import annotations

import contextvars
import functools
import os
import threading
from collections.abc import Callable

from graphshard.utils.progress import check_cancelled

ASKS_EVERY = 0.5
"""Seconds between questions whether what is waited for is still wanted."""


class Beginning:
    """Work that each process does once, and that others wait for.

    A fork has none of the threads of the process that it comes from, so it does the work, too.

    Args:
        work: what is done, and how others are told: it sets the event.
        of: what the work depends on; it is done once for each.
    """

    def __init__(self, work: Callable[[threading.Event], None], of: Callable[[], str] = lambda: "") -> None:
        self._work, self._of = work, of
        self._known: dict[tuple[int, str], threading.Event] = {}
        self._lock = threading.Lock()

    def begin(self) -> threading.Event:
        """Begin, if nobody has; returns at once what is set at the end."""
        key = os.getpid(), self._of()
        with self._lock:
            if key not in self._known:
                self._known[key] = done = threading.Event()
                # Settings of torch are those of a thread.
                work = functools.partial(contextvars.copy_context().run, self._work, done)
                threading.Thread(target=work, name="graphshard-begin", daemon=True).start()
            return self._known[key]

    def wait(self) -> None:
        """Wait for the end, which is begun if it was not; raises what ends the work that needs it."""
        done = self.begin()
        while not done.wait(ASKS_EVERY):
            check_cancelled()
