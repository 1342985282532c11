"""Turn a failure of torch.export into a message about the user's code."""

from __future__ import annotations

import linecache
import os
import traceback

import torch
from torch import nn

from graphshard.errors import CaptureError

_TORCH = os.path.dirname(torch.__file__)
_HERE = os.path.dirname(__file__)

_ADVICE = {
    "control flow": (
        "the condition depends on the values of a tensor. Use torch.where for a choice per element, torch.cond "
        "for a branch, or compute the condition from shapes or from Python values"
    ),
    "item": (
        "a tensor's value becomes a Python number. Keep it a tensor, or pass the number into the call as an argument"
    ),
    "other": "torch.export does not support this line. See https://docs.pytorch.org/docs/stable/export.html",
}


def explain_export_failure(error: Exception, cls: type[nn.Module]) -> CaptureError:
    """The error to raise instead of `error`: file, line and source of the user's code, and what to change."""
    frame = _user_frame(error)
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    if frame is None:
        return CaptureError(f"graphshard cannot capture {cls.__name__}.forward: {type(error).__name__}: {first}")
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return CaptureError(
        f"graphshard cannot capture {cls.__name__}.forward at {frame.filename}:{frame.lineno}\n"
        f"    {line}\n"
        f"{_ADVICE[_kind(error, line)]}.\n"
        f"({type(error).__name__}: {first})"
    )


def _user_frame(error: Exception) -> traceback.FrameSummary | None:
    """The innermost frame of the traceback that is neither torch nor graphshard."""
    frames = traceback.extract_tb(error.__traceback__)
    user = [f for f in frames if not f.filename.startswith((_TORCH, _HERE, "<"))]
    return user[-1] if user else None


def _kind(error: Exception, line: str) -> str:
    if not any(word in type(error).__name__ for word in ("DataDependent", "UserError", "Unbacked")):
        return "other"
    if ".item()" in line or ".tolist()" in line or "int(" in line or "float(" in line:
        return "item"
    return "control flow"
