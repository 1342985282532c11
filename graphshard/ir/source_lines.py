"""Lines of the user's source, for messages."""

from __future__ import annotations

import linecache
import os
import sysconfig
from collections.abc import Sequence
from traceback import FrameSummary, extract_tb

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PACKAGES = os.path.dirname(os.path.dirname(torch.__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
# Characters of a line in a message.
_LONGEST = 160


def source_line(stack: Sequence[FrameSummary]) -> tuple[str, str]:
    """Return where the innermost line of the model's code is, as "file:line", and the line."""
    for frame in reversed(list(stack)):
        if is_users(frame.filename):
            source = source_of(frame)
            return f"{frame.filename}:{frame.lineno}", source if len(source) <= _LONGEST else f"{source[:_LONGEST]}..."
    return "", ""


def is_users(file: str) -> bool:
    """Return whether a source file is neither torch's, nor graphshard's, nor the standard library's."""
    in_stdlib = file.startswith(_STDLIB) and not file.startswith(_PACKAGES)
    return not (in_stdlib or file.startswith((_TORCH, _HERE, "<")))


def line_of(error: Exception) -> str:
    """Return where in the user's code an error was raised, as the end of a message; "" where it was elsewhere."""
    frame = user_frame(error)
    return f" at {frame.filename}:{frame.lineno}: {source_of(frame)}" if frame else ""


def source_of(frame: FrameSummary) -> str:
    """Return the line of a frame."""
    return linecache.getline(frame.filename, frame.lineno or 0).strip()


def user_frame(error: Exception) -> FrameSummary | None:
    """Return the innermost frame that is neither torch's, nor graphshard's, nor the standard library's."""
    user = [frame for frame in extract_tb(error.__traceback__) if is_users(frame.filename)]
    return user[-1] if user else None
