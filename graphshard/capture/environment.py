"""Environment variables that forward reads: a program holds while they are what they were."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from graphshard.capture.untraceable import Untraceable, is_users
from graphshard.ir.state import MISSING

# What stands between code that asks and the variables: os.getenv, and methods of Mapping.
_BETWEEN = ("os", "_collections_abc", "collections.abc", __name__)


def variable(name: str, default: Any = MISSING) -> Any:
    """A variable; the names of all that are set if the name is empty."""
    return os.environ.get(name, default) if name else tuple(os.environ)


# Told of what is read while watched.
_notes: list[Callable[[str, Any], None]] = []


@contextlib.contextmanager
def watched_environment(note: Callable[[str, Any], None]) -> Iterator[None]:
    """In the block `note` is told the names of variables that code of the user's reads, and their values.

    The value is MISSING if a variable is not set; the name is empty where the names are read.

    Raises, in the block:
        Untraceable: code of the user's sets a variable, or takes it away.
    """
    before = os.environ.__class__
    _notes.append(note)
    os.environ.__class__ = _Watched
    try:
        yield
    finally:
        os.environ.__class__ = before
        _notes.remove(note)


class _Watched(type(os.environ)):  # type: ignore[misc]
    """What `os.environ` is meanwhile.

    Its own class is left alone: Python 3.13 remembers the `__getitem__` of a class that was changed a thousand times.
    """

    def __getitem__(self, name: str) -> str:
        try:
            value: Any = super().__getitem__(name)
        except KeyError:
            self._note(name, MISSING)
            raise
        self._note(name, value)
        return str(value)

    def __iter__(self) -> Iterator[str]:
        names = tuple(super().__iter__())
        self._note("", names)
        return iter(names)

    def __setitem__(self, name: str, value: str) -> None:
        self._refuse(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._refuse(name)
        super().__delitem__(name)

    def _refuse(self, name: str) -> None:
        """Raise Untraceable if code of the user's changes a variable."""
        if is_users(_asking()):
            raise Untraceable("setting", f"os.environ[{name!r}]")

    def _note(self, name: str, value: Any) -> None:
        if is_users(_asking()):
            for note in _notes:
                note(name, value)


def _asking() -> str:
    """The source file of the code that asks."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return frame.f_code.co_filename
