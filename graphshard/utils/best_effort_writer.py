"""Debugging aids that write files: the first failure to write is logged, and training goes on without them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class BestEffort:
    """Writer that stops at its first OSError, with a warning.

    Args:
        name: what the user calls it, for the warning.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._stopped = False

    def __call__(self, write: Callable[..., Any], *args: Any) -> Any:
        """Return the result of `write`, or None if it fails, or failed earlier, because of the disk."""
        if self._stopped:
            return None
        try:
            return write(*args)
        except OSError as error:
            self._stopped = True
            log.warning("%s stops, and training goes on: %s: %s", self._name, type(error).__name__, error)
            return None
