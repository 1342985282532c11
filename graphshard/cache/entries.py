"""The directory of what was compiled: one file for each program, that is whole or not there. It needs no torch.

~/.cache/graphshard/3f0c....-81aa....gscache      a program: what it is for, and what must be the same, are in the name

    {"format": 1, "payload": "sha256", ...}       one line of JSON, for `graphshard cache list`
    ...                                           members, one behind the other

A file is written under another name and renamed. One that is damaged is removed when somebody reads it. The oldest that
nobody uses are removed when there are too many bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphshard.ir.errors import ArgumentError
from graphshard.ir.files import read_file, replacing

VARIABLE = "GRAPHSHARD_CACHE"
LIMIT_VARIABLE = "GRAPHSHARD_CACHE_LIMIT"
FORMAT = 1
ENDING = ".gscache"
LIMIT = 4 << 30
_ON = ("on", "1", "yes", "true")
_OFF = ("", "off", "0", "no", "false")
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.gscache")
_LONGEST = 4 << 30
# A file that is still being written is younger.
_LEFT_BEHIND, _WRITES_FOR = 3600.0, 60.0
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class DamagedError(Exception):
    """A file of the cache is not what was written."""


def directory_of(chosen: Any = None) -> Path | None:
    """Where programs are kept; None if they are not to be.

    Args:
        chosen: True is the usual place, False is nowhere; None leaves it to the environment; or a directory.
    """
    given = os.environ.get(VARIABLE, "")
    asked = given.lower() not in _OFF
    if chosen is False or (chosen is None and not asked):
        return None
    if chosen not in (None, True):
        return Path(chosen).expanduser()
    return Path(given).expanduser() if asked and given.lower() not in _ON else usual_directory()


def usual_directory() -> Path:
    """`~/.cache/graphshard`, or where XDG_CACHE_HOME has caches."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "graphshard"


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


def candidates(directory: Path, key: str) -> list[Path]:
    """The files under a key, the last used first.

    Raises:
        OSError: the directory cannot be read.
    """
    try:
        found = [path for path in directory.iterdir() if path.name.startswith(f"{key}-") and _NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    return sorted(found, key=_used, reverse=True)


def name_of(key: str, digest: str) -> str:
    """The name of a file: what it is for, and what it was made of."""
    return f"{key}-{digest}{ENDING}"


def write(path: Path, facts: Mapping[str, Any], members: Mapping[str, bytes]) -> None:
    """Write a file that is whole or not there.

    Raises:
        OSError: it cannot be written.
    """
    body = b"".join(members.values())
    sizes = {name: len(content) for name, content in members.items()}
    head = {"format": FORMAT, **facts, "members": sizes, "payload": hashlib.sha256(body).hexdigest()}
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    line = json.dumps(head, allow_nan=False).encode()
    with replacing(path) as temporary:
        temporary.write_bytes(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n" + body)


def read(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A file's facts and members.

    Raises:
        DamagedError: it is not what was written, or another user may have written it.
        FileNotFoundError: somebody has removed it.
        OSError: it cannot be read.
    """
    _check_owner(path)
    if not path.exists():
        raise FileNotFoundError(path)
    try:
        content = read_file(path, _LONGEST)
    except ArgumentError as error:
        raise DamagedError(str(error)) from None
    line, _, rest = content.partition(b"\n")
    digest, _, body = rest.partition(b"\n")
    try:
        facts = json.loads(line)
        whole = hashlib.sha256(line).hexdigest().encode() == digest and isinstance(facts, dict)
        whole = whole and facts["format"] == FORMAT and hashlib.sha256(body).hexdigest() == facts["payload"]
        sizes = facts["members"]
        whole = whole and sum(sizes.values()) == len(body)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise DamagedError(f"{path} is not whole, or was changed")
    members, start = {}, 0
    for name, size in sizes.items():
        members[name], start = body[start : start + size], start + size
    return facts, members


def _check_owner(path: Path) -> None:
    """Raise DamagedError if others than this user, or root, could have written a file: it holds code."""
    if not hasattr(os, "getuid"):
        return
    for place in (path, path.parent):
        about = os.stat(place)
        if about.st_uid not in (os.getuid(), 0) or about.st_mode & stat.S_IWOTH:
            raise DamagedError(f"{place} can be written by other users, who could put code there")


def touch(path: Path) -> None:
    """A file was used."""
    with contextlib.suppress(OSError):
        os.utime(path)


def remove(path: Path) -> bool:
    """Remove a file; False if that cannot be, or somebody has done it."""
    try:
        path.unlink()
    except OSError:
        return False
    return True


def shrink(directory: Path, limit: int, keep: Path | None = None) -> int:
    """Remove the files that were used longest ago until the others have no more bytes; how many were removed.

    Args:
        keep: is not removed.
    """
    _remove_left_behind(directory)
    found = sorted(((_used(path), path) for path in files(directory)), reverse=True)
    total, removed = 0, 0
    for _, path in found:
        with contextlib.suppress(OSError):
            total += path.stat().st_size
            if total > limit and path != keep:
                removed += remove(path)
    return removed


def clear(directory: Path) -> tuple[int, int]:
    """Remove all files of the cache: how many, and how many bytes."""
    _remove_left_behind(directory, _WRITES_FOR)
    count = size = 0
    for path in files(directory):
        with contextlib.suppress(OSError):
            bytes_ = path.stat().st_size
            if remove(path):
                count, size = count + 1, size + bytes_
    return count, size


def _remove_left_behind(directory: Path, older: float = _LEFT_BEHIND) -> None:
    """Temporary files of processes that were killed."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.name.startswith(".") and f"{ENDING}." in path.name and time.time() - _used(path) >= older:
                remove(path)


def _used(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
