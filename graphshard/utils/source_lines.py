"""Lines of user source for messages, outside torch, graphshard and the standard library; and plain values of Python."""

from __future__ import annotations

import enum
import linecache
import os
import sysconfig
import types
from collections.abc import Iterator, Sequence
from traceback import FrameSummary, extract_tb

import torch


class Sentinel(enum.Enum):
    """Type of `MISSING`, which stands for a missing attribute where None is a value."""

    MISSING = "missing"


MISSING = Sentinel.MISSING

# Immutable types whose values compare by content.
PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), range, slice, enum.Enum, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function and of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PACKAGES = os.path.dirname(os.path.dirname(torch.__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
# Characters of a source line in a message.
_LONGEST = 160


def source_line(stack: Sequence[FrameSummary]) -> tuple[str, str]:
    """Return the position of the innermost line of user code in a stack, as "file:line", and its source."""
    for frame in reversed(list(stack)):
        if is_users(frame.filename):
            source = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f"{frame.filename}:{frame.lineno}", source if len(source) <= _LONGEST else f"{source[:_LONGEST]}..."
    return "", ""


def is_users(file: str) -> bool:
    """Return whether a source file belongs to the user."""
    in_stdlib = file.startswith(_STDLIB) and not file.startswith(_PACKAGES)
    return not (in_stdlib or file.startswith((_TORCH, _HERE, "<")))


def line_of(error: Exception) -> str:
    """Return " at file:line: source" for an error raised in user code, "" for other errors."""
    where, source = source_line(extract_tb(error.__traceback__))
    return f" at {where}: {source}" if where else ""
