"""The directory of what was compiled: one file for each program, that is whole or not there. It needs no torch.

~/.cache/graphshard/3f0c....gscache      a program: the name is the digest of all that it depends on

`ir/checked_files.py` says what a file looks like; its first line is for `graphshard cache list`. One that is damaged
is removed when somebody reads it. The oldest that nobody uses are removed when there are too
many bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphshard.errors import ArgumentError
from graphshard.ir.checked_files import WRITES_FOR, DamagedError, remove, remove_left_behind, remove_oldest

VARIABLE = "GRAPHSHARD_CACHE"
LIMIT_VARIABLE = "GRAPHSHARD_CACHE_LIMIT"
ENDING = ".gscache"
LIMIT = 4 << 30
_ON = ("on", "1", "yes", "true")
_OFF = ("", "off", "0", "no", "false")
_NAME = re.compile(r"[0-9a-f]{32}\.gscache")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class HomelessError(ArgumentError):
    """The directory is in a home folder, which there is not."""


def directory_of(chosen: Any = None) -> Path | None:
    """Where programs are kept; None if they are not to be.

    Args:
        chosen: True is the usual place, False is nowhere; None leaves it to the environment; or a directory.

    Raises:
        HomelessError: it is in a home folder, which there is not.
    """
    given = os.environ.get(VARIABLE, "on")
    asked = given.lower() not in _OFF
    if chosen is False or (chosen is None and not asked):
        return None
    if chosen not in (None, True):
        return _at_home(Path(chosen))
    return _at_home(Path(given)) if asked and given.lower() not in _ON else usual_directory()


def usual_directory() -> Path:
    """`~/.cache/graphshard`, or where XDG_CACHE_HOME has caches."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else _at_home(Path("~/.cache"))) / "graphshard"


def _at_home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # of a user whom the machine does not know, as containers have them
        raise HomelessError(
            f"the cache of programs cannot be at {path}, as there is no such home folder: {error} Give another "
            f"directory: {VARIABLE}=DIRECTORY."
        ) from error


def limit_of() -> int:
    """Bytes that the directory may have.

    Raises:
        ArgumentError: GRAPHSHARD_CACHE_LIMIT is no size.
    """
    given = os.environ.get(LIMIT_VARIABLE, "")
    if not given:
        return LIMIT
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", given.strip().lower())
    if found is None:
        raise ArgumentError(f"{LIMIT_VARIABLE}={given!r} is no size: give one such as 500M or 4G.")
    return int(float(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True)
class Entry:
    """A file of the cache.

    Attributes:
        facts: its first line.
        used: when it was written or found last, in seconds since 1970.
    """

    path: Path
    facts: Mapping[str, Any]
    size: int
    used: float


def entries(directory: Path) -> Iterator[Entry]:
    """What is in the directory, the last used first; what cannot be read is left out."""
    found = []
    for path in files(directory):
        with contextlib.suppress(OSError, ValueError, DamagedError):
            about = path.stat()
            with path.open("rb") as file:
                facts = json.loads(file.readline(1 << 20))
            found.append(Entry(path, facts, about.st_size, about.st_mtime))
    yield from sorted(found, key=lambda entry: -entry.used)


def files(directory: Path) -> list[Path]:
    """The files of the cache in a directory; anything else there is left alone."""
    with contextlib.suppress(OSError):
        return [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return []


def name_of(key: str) -> str:
    """Return the name of the file under a key."""
    return f"{key}{ENDING}"


def shrink(directory: Path, limit: int, keep: Path | None = None) -> int:
    """Remove the files that were used longest ago until the others have no more bytes; how many were removed.

    Args:
        keep: is not removed.
    """
    remove_left_behind(directory, ENDING)
    return remove_oldest(files(directory), limit, keep)


def clear(directory: Path) -> tuple[int, int]:
    """Remove all files of the cache: how many, and how many bytes."""
    remove_left_behind(directory, ENDING, WRITES_FOR)
    count = size = 0
    for path in files(directory):
        with contextlib.suppress(OSError):
            bytes_ = path.stat().st_size
            if remove(path):
                count, size = count + 1, size + bytes_
    return count, size
