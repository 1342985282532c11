"""Files of members that are whole or not there, checked when they are read, and the oldest of them removed.

    {"format": 1, "payload": "sha256", ...}       one line of JSON, and the hash of it
    ...                                           members, one behind the other

A file is written under another name and renamed. It needs no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from graphshard.errors import ArgumentError
from graphshard.utils.files import read_file, replacing

FORMAT = 1
_LONGEST = 4 << 30
# Seconds that a file takes to be written, at the most.
WRITES_FOR = 60.0
# Seconds after which whoever was writing a file has been killed.
_LEFT_BEHIND = 3600.0


class DamagedError(Exception):
    """A file is not what was written."""


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
    for place in (path, path.parent):
        if others_can_write(place):
            raise DamagedError(f"{place} can be written by other users, who could put code there")
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


def is_being_written(path: Path) -> bool:
    """Whether another process writes the file now, or was killed a moment ago while it did."""
    with contextlib.suppress(OSError):
        names = (found for found in path.parent.iterdir() if found.name.startswith(f".{path.name}."))
        return any(time.time() - used(found) < WRITES_FOR for found in names)
    return False


def others_can_write(place: Path) -> bool:
    """Whether others than this user, or root, could have written a file, or files of a directory: they hold code.

    Raises:
        OSError: it cannot be asked for, or is not there.
    """
    if not hasattr(os, "getuid"):
        return False
    about = os.stat(place)
    return about.st_uid not in (os.getuid(), 0) or bool(about.st_mode & stat.S_IWOTH)


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


def remove_oldest(paths: Iterable[Path], limit: int, keep: Path | None = None) -> int:
    """Remove the files that were used longest ago until the others have no more bytes; how many were removed.

    Args:
        keep: is not removed.
    """
    found = sorted(((used(path), path) for path in paths), reverse=True)
    total, removed = 0, 0
    for _, path in found:
        with contextlib.suppress(OSError):
            total += path.stat().st_size
            if total > limit and path != keep:
                removed += remove(path)
    return removed


def remove_left_behind(directory: Path, ending: str, older: float = _LEFT_BEHIND) -> None:
    """Remove temporary files of processes that were killed.

    Args:
        ending: of the names of files that they were to become.
        older: seconds since they were written.
    """
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.name.startswith(".") and f"{ending}." in path.name and time.time() - used(path) >= older:
                remove(path)


def used(path: Path) -> float:
    """When a file was written, or used last, in seconds since 1970; 0 if it is not there."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
