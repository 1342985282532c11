"""Directory of the compile cache: an archive for each program, named by the hash of all that the program depends on.

A `.gstrace` next to it is what a launch compares instead of tracing, see `_trace_record.py`.

`GRAPHSHARD_CACHE` chooses it, `GRAPHSHARD_CACHE_LIMIT` limits its bytes: the least recently used programs are removed.
This module needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphshard.errors import ArgumentError
from graphshard.utils.archive import WRITES_FOR, remove, remove_left_behind, remove_oldest

VARIABLE = "GRAPHSHARD_CACHE"
LIMIT_VARIABLE = "GRAPHSHARD_CACHE_LIMIT"
ENDING = ".gscache"
OF_TRACES = ".gstrace"
LIMIT = 4 << 30
_LONGEST_LINE = 64 << 20
_ON = ("on", "1", "yes", "true")
_OFF = ("", "off", "0", "no", "false")
_NAME = re.compile(r"[0-9a-f]{32}\.(gscache|gstrace)")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class HomelessError(ArgumentError):
    """The directory is in a home folder that does not exist."""


def directory_of(chosen: Any = None) -> Path | None:
    """Return where programs are cached; None if they are not to be, HomelessError if there is no such home folder.

    `chosen` is a directory, True for the default, False for nowhere; None leaves it to the environment.
    """
    given = os.environ.get(VARIABLE, "on")
    wanted = given.lower() not in _OFF
    if chosen is False or (chosen is None and not wanted):
        return None
    if chosen not in (None, True):
        return _at_home(Path(chosen))
    if wanted and given.lower() not in _ON:
        return _at_home(Path(given))
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else _at_home(Path("~/.cache"))) / "graphshard"


def _at_home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # the machine does not know the user, as in containers
        raise HomelessError(
            f"the cache of programs cannot be at {path}, as there is no such home folder: {error} Give another "
            f"directory: {VARIABLE}=DIRECTORY."
        ) from error


def limit_of() -> int:
    """Return the bytes that the directory may have; raise ArgumentError if the variable is no size."""
    given = os.environ.get(LIMIT_VARIABLE, "")
    if not given:
        return LIMIT
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", given.strip().lower())
    if found is None:
        raise ArgumentError(f"{LIMIT_VARIABLE}={given!r} is no size: give one such as 500M or 4G.")
    return int(float(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True)
class Entry:
    """A file of the cache: its `CacheLabel`, its bytes, and when it was last used, in seconds since 1970."""

    path: Path
    label: Mapping[str, Any]
    size: int
    used: float


def entries(directory: Path) -> list[Entry]:
    """Return the readable files of programs, the most recently used first."""
    found = []
    for path in _files(directory):
        if path.suffix != ENDING:
            continue
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            about = path.stat()
            with path.open("rb") as file:
                label = json.loads(file.readline(_LONGEST_LINE))["cached"]
            found.append(Entry(path, dict(label), about.st_size, about.st_mtime))
    return sorted(found, key=lambda entry: -entry.used)


def _files(directory: Path) -> list[Path]:
    """Return the files of the cache; others in the directory are left alone."""
    with contextlib.suppress(OSError):
        return [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return []


def shrink(directory: Path, limit: int, keep: Path | None = None) -> int:
    """Remove the least recently used files beyond a limit of bytes, but for `keep`; return how many."""
    remove_left_behind(directory, ENDING)
    remove_left_behind(directory, OF_TRACES)
    return remove_oldest(_files(directory), limit, keep)


def clear(directory: Path) -> tuple[int, int]:
    """Remove all files of the cache; return how many programs they had, and their bytes."""
    remove_left_behind(directory, ENDING, WRITES_FOR)
    remove_left_behind(directory, OF_TRACES, WRITES_FOR)
    sizes, programs = [], 0
    for path in _files(directory):
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            if remove(path):
                sizes.append(size)
                programs += path.suffix == ENDING
    return programs, sum(sizes)
