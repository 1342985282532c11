"""Environment variables that forward reads: a program holds while they are what they were."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from graphshard.capture.untraceable import is_users
from graphshard.ir.state import MISSING
from graphshard.ir.torch_internals import replaced

# What stands between code that asks and the variables: os.getenv, and methods of Mapping.
_BETWEEN = ("os", "_collections_abc", "collections.abc", __name__)


def variable(name: str, default: Any = MISSING) -> Any:
    """A variable; the names of all that are set if the name is empty."""
    return os.environ.get(name, default) if name else tuple(os.environ)


@contextlib.contextmanager
def watched_environment(note: Callable[[str, Any], None]) -> Iterator[None]:
    """In the block `note` is told the names of variables that code of the user's reads, and their values.

    The value is MISSING if a variable is not set; the name is empty where the names are read.
    """
    kind = type(os.environ)
    find, names = kind.__getitem__, kind.__iter__

    def look_up(environ: Any, name: str) -> str:
        try:
            value: Any = find(environ, name)
        except KeyError:
            value = MISSING
        if environ is os.environ and is_users(_asking()):
            note(name, value)
        if value is MISSING:
            raise KeyError(name)
        return str(value)

    def iterate(environ: Any) -> Iterator[str]:
        if environ is os.environ and is_users(_asking()):
            note("", tuple(names(environ)))
        return names(environ)

    with replaced(kind, "__getitem__", look_up), replaced(kind, "__iter__", iterate):
        yield


def _asking() -> str:
    """The source file of the code that asks."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return frame.f_code.co_filename
