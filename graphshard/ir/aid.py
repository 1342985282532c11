"""Debugging aids that write files: one that cannot says so once and stops, and training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class Aid:
    """What writes something for whoever debugs.

    Args:
        name: what the user calls it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._stopped = False

    def __call__(self, write: Callable[..., Any], *args: Any) -> Any:
        """What `write` returns; None if the disk is full, read-only or gone, now or earlier."""
        if self._stopped:
            return None
        try:
            return write(*args)
        except OSError as error:
            self._stopped = True
            log.warning("%s stops, and training goes on: %s: %s", self._name, type(error).__name__, error)
            return None
