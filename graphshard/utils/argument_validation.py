"""Checks of arguments of public functions. Each error names the argument, shows the value and says what to pass."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from graphshard.errors import ArgumentError, GraphshardError
from graphshard.utils.files import write_text
from graphshard.utils.text import brief

# Limits of file systems: bytes of a name, and of a path.
_MAX_NAME, _MAX_PATH = 255, 4095


def is_int(value: Any) -> TypeGuard[int]:
    """Return whether a value is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_bool(name: str, value: object) -> None:
    """Raise ArgumentError unless a value is True or False."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {brief(value)}.")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ArgumentError unless a value is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{name} must be one of {', '.join(map(repr, choices))}, got {brief(value)}.")


def check_count(name: str, value: object, *, least: int = 1, most: int = (1 << 63) - 1, what: str = "int") -> None:
    """Raise ArgumentError unless a value is an integer within bounds; `what` is the noun in the message."""
    if not is_int(value) or not least <= value <= most:
        sign = {0: "non-negative ", 1: "positive "}.get(least, "")
        more = f" up to {most}" if is_int(value) and value > most else ""
        raise ArgumentError(f"{name} must be a {sign}{what}{more}, got {brief(value)}.")


def check_number(name: str, value: object, *, positive: bool = False, example: str = "") -> None:
    """Raise ArgumentError unless a value is a finite number, at least 0, or above 0 if `positive`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not number or (positive and value == 0):
        sign = "positive" if positive else "non-negative"
        such = f" such as {example}" if example else ""
        raise ArgumentError(f"{name} must be a {sign} number{such}, got {brief(value)}.")


def check_function(name: str, value: object, example: str) -> None:
    """Raise ArgumentError unless a value is callable."""
    if not callable(value):
        raise ArgumentError(f"{name} must be a function such as {example}, got {brief(value)}.")


def check_texts(name: str, value: object, example: str) -> None:
    """Raise ArgumentError unless a value is a list or tuple of strings."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ArgumentError(f"{name} must be a list of texts such as {example}, got {brief(value)}.")


def check_seconds(name: str, value: object) -> None:
    """Raise ArgumentError unless a value is a dict from strings to seconds."""
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{name} must be a dict of seconds by region key, got {brief(value)}.")
    for key, seconds in value.items():
        if not isinstance(key, str):
            raise ArgumentError(f"{name} must have texts for keys, the keys of regions, got {brief(key)}.")
        check_number(f"{name}[{brief(key)}]", seconds)


def path_of(name: str, value: object, example: str) -> Path:
    """Return an argument as a path that a file system accepts, whether or not it exists.

    Raises:
        ArgumentError: it has another type, is empty, or has a NUL or a part that is too long.
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(text := os.fspath(value), str):
        raise ArgumentError(f"{name} must be {example}, got {brief(value)}.")
    why = ""
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        why = "has a character that no file system takes"
    else:
        if not text:
            why = "is empty"
        elif b"\0" in encoded:
            why = "has a NUL in it"
        elif len(encoded) > _MAX_PATH or max(map(len, encoded.split(b"/"))) > _MAX_NAME:
            why = f"has {len(encoded)} bytes, more than a file system takes"
    if why:
        raise ArgumentError(f"{name} {why}: {brief(text)}. Give {example}.")
    return Path(text)


def write_given(name: str, value: object, text: str) -> None:
    """Write a text to the path that an argument gives; raise ArgumentError if that fails."""
    path = path_of(name, value, "a file to write")
    try:
        write_text(path, text)
    except OSError as error:
        raise ArgumentError(
            f"{name}: {brief(str(value))} cannot be written: {error.strerror}. Give a file in a directory that is "
            "writable."
        ) from None


def answer_of(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function that the user passed; raise ArgumentError if it raises an error."""
    try:
        return function(*args)
    except GraphshardError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"{name}: {brief(function)} of {', '.join(map(brief, args))} failed with {type(error).__name__}: {error}. "
            f"Correct it, or leave {name} out."
        ) from error
