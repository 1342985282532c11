"""Which line of the user's code runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from graphshard.capture.untraceable import is_users


def user_place() -> tuple[str, int] | None:
    """File and number of the innermost line of the user's code that runs now; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else None


def user_line() -> str:
    """The innermost line of the user's code that runs now, as "file:line"; "" if there is none."""
    place = user_place()
    return f"{place[0]}:{place[1]}" if place is not None else ""


def asking(*modules: str) -> FrameType:
    """The frame of the code that asks for something: not of graphshard's, nor of these modules."""
    frame = sys._getframe(1)
    while frame.f_back and (package_of(frame) == "graphshard" or frame.f_globals.get("__name__") in modules):
        frame = frame.f_back
    return frame


def package_of(frame: FrameType) -> str:
    """The package whose code runs in a frame, by its first name."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def outside_torch(frame: FrameType) -> FrameType:
    """The frame that has called torch, or graphshard."""
    while frame.f_back and package_of(frame) in ("torch", "graphshard"):
        frame = frame.f_back
    return frame


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, and those that wait for it."""
    while frame is not None:
        yield frame
        frame = frame.f_back
