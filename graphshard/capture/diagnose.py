"""Turn a failure of tracing into a message about the user's code."""

from __future__ import annotations

import dis
import linecache
import re
import traceback
from collections.abc import Sequence

from torch import nn

from graphshard.capture.untraceable import Untraceable, advice, is_users
from graphshard.ir.driver_internals import stands_in
from graphshard.ir.errors import CaptureError


def explain_failure(error: Exception, cls: type[nn.Module]) -> CaptureError:
    """The error to raise instead of `error`: file, line and source of the user's code, and what to change."""
    text = str(error).strip().splitlines()
    if text and "Constraint" in text[0]:
        return _dynamic_error(cls, text)
    cause = text[0] if text else ""
    if not isinstance(error, Untraceable):
        cause = f"{type(error).__name__}: {cause}"
    frame = _user_frame(traceback.extract_tb(error.__traceback__))
    if isinstance(error, Untraceable) and error.line:
        frame = traceback.FrameSummary(*error.line, "forward")
    return _capture_error(cls, frame, _kind(error, _source(frame)), cause)


def is_raised_by_user(error: BaseException) -> bool:
    """Whether a `raise` or `assert` of the user's code has raised an exception, as it would in eager mode."""
    traced = error.__traceback__
    while traced is not None and traced.tb_next is not None:
        traced = traced.tb_next
    if traced is None or isinstance(error, Untraceable) or not is_users(traced.tb_frame.f_code.co_filename):
        return False
    steps = dis.get_instructions(traced.tb_frame.f_code)
    return any(step.offset == traced.tb_lasti and step.opname == "RAISE_VARARGS" for step in steps)


def line_of(error: Exception) -> str:
    """Where in the user's code an error was raised, as the end of a message; "" where it was elsewhere."""
    frame = _user_frame(traceback.extract_tb(error.__traceback__))
    return f" at {frame.filename}:{frame.lineno}: {_source(frame)}" if frame else ""


def _dynamic_error(cls: type[nn.Module], text: list[str]) -> CaptureError:
    """What torch says of dimensions that cannot be dynamic, without its advice about export."""
    said = list(dict.fromkeys(line.rstrip() for line in text[1:] if line.strip()))
    end = next((i for i, line in enumerate(said) if line.startswith("The error above")), len(said))
    reasons = [line.partition(" If you're using")[0] for line in said[:end]]
    return CaptureError(
        f"graphshard cannot capture {cls.__name__}.forward with the dimensions that are declared dynamic "
        "(dynamic_shapes, or marks on the inputs):\n"
        + "\n".join(reasons)
        + "\nLeave out a dimension that the code fixes, give dimensions that must be equal the same Dim, or declare "
        "them as Dim.AUTO: sizes that do not fit are then captured again."
    )


def _capture_error(cls: type[nn.Module], frame: traceback.FrameSummary | None, kind: str, cause: str) -> CaptureError:
    if frame is None:
        said = f"graphshard cannot capture {cls.__name__}.forward: {cause}"
        return CaptureError(said if kind == "other" else f"{said}\n{advice(kind)}")
    return CaptureError(
        f"graphshard cannot capture {cls.__name__}.forward at {frame.filename}:{frame.lineno}\n"
        f"    {_source(frame)}\n"
        f"{advice(kind)}\n"
        f"({cause})"
    )


def _source(frame: traceback.FrameSummary | None) -> str:
    return linecache.getline(frame.filename, frame.lineno or 0).strip() if frame else ""


def _user_frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost frame that is neither torch's, nor graphshard's, nor the standard library's."""
    user = [f for f in frames if is_users(f.filename)]
    return user[-1] if user else None


def _kind(error: Exception, line: str) -> str:
    if isinstance(error, Untraceable) and error.kind != "value":
        return error.kind
    if "data is not allocated yet" in str(error):  # code in C has read a traced tensor
        return "item"
    if "expression zuf" in str(error) and "int(" not in line:  # a float that an operator, or Python, must know
        return "item"
    if "DynamicOutputShape" in type(error).__name__:
        return "size of result"
    if not any(word in type(error).__name__ for word in ("DataDependent", "Untraceable", "UserError", "Unbacked")):
        # torch 2.11 raises a RuntimeError.
        if "DeviceMismatch" in type(error).__name__ or "found two different devices" in str(error):
            return "devices"
        return "gpu" if stands_in() and "cuda" in f"{line} {error}".lower() else "other"
    if "GuardOnDataDependent" in type(error).__name__ and not re.search(
        r"\b(if|while|assert|and|or)\b|max\(|min\(", line
    ):
        return "shape"
    return "item" if re.search(r"\.item\(|\.tolist\(|\bint\(|\bfloat\(", line) else "control flow"
