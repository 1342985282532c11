"""Failure of a trace in AOTAutograd, as a message about the user's code."""

from __future__ import annotations

import linecache
import traceback

from torch import nn

from graphshard.frontend.graph_breaks import is_users
from graphshard.ir.errors import CaptureError

_ADVICE = {
    "cast again": (
        "Autocast casts a parameter that is a DTensor once for all its uses, which a program cannot yet. Use it once "
        "in the block, cast it yourself, or use param_dtype of mp_policy in the place of autocast."
    ),
    "sharded gradient": (
        "A gradient of a parameter on the whole mesh lies in pieces along data axes, over which it is to be reduced. "
        "Use the parameter with activations that are cut there by their batch, or whole."
    ),
}


class Untraceable(Exception):
    """Operation that no program can keep, raised where it happens, so that the traceback leads to the line.

    Attributes:
        kind: a key of the advice.

    Args:
        what: names the operator or the tensor.
    """

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


def explain_failure(error: Untraceable, cls: type[nn.Module]) -> CaptureError:
    """Return the error to raise instead: file, line and source of the user's code, and what to change."""
    frame = _user_frame(error)
    what, advice = f"graphshard cannot capture {cls.__name__}.forward", _ADVICE[error.kind]
    if frame is None:
        return CaptureError(f"{what}: {error}\n{advice}")
    return CaptureError(f"{what} at {frame.filename}:{frame.lineno}\n    {_source(frame)}\n{advice}\n({error})")


def line_of(error: Exception) -> str:
    """Return where in the user's code an error was raised, as the end of a message; "" where it was elsewhere."""
    frame = _user_frame(error)
    return f" at {frame.filename}:{frame.lineno}: {_source(frame)}" if frame else ""


def _source(frame: traceback.FrameSummary) -> str:
    return linecache.getline(frame.filename, frame.lineno or 0).strip()


def _user_frame(error: Exception) -> traceback.FrameSummary | None:
    """Return the innermost frame that is neither torch's, nor graphshard's, nor the standard library's."""
    user = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return user[-1] if user else None
