"""Libraries of Inductor's cache that a crash or a full disk has left without their end.

Nobody makes them again, as they are there. To load one ends the process (SIGBUS) or fails, so headers are read before.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from filelock import FileLock

from graphshard.lower.elf import damage_of

log = logging.getLogger(__name__)

# Directories that a warning has named: one crash leaves many such libraries.
_told: set[Path] = set()


class RemovedError(Exception):
    """A library was damaged, and is no longer there."""


def check_whole(library: Path, lock: Path) -> None:
    """Remove a library that is damaged; a source beside it that is as empty goes, too, and is written again.

    Args:
        lock: held by whoever compiles the library: one that is half written is waited for.

    Raises:
        RemovedError: it was removed.
    """
    try:
        if not _damage(library):
            return
        with FileLock(lock):
            why = _damage(library)
            if not why:
                return
            _warn(library, why)
            library.unlink()
            source = library.with_suffix(".cpp")
            if source.exists() and not source.read_bytes().strip(b"\0"):
                source.unlink()
    except FileNotFoundError:  # another rank has removed it
        why = "it is not there"
    raise RemovedError(f"{library} was damaged: {why}")


def _damage(library: Path) -> str:
    content = library.read_bytes()
    if not content:
        return "it is empty"
    # Other systems, and other machines, have other formats.
    other = content[:4] == b"\x7fELF" and content[4:6] != b"\x02\x01"
    return damage_of(content) if sys.platform == "linux" and not other else ""


def _warn(library: Path, why: str) -> None:
    directory = library.parent.parent
    if directory in _told:
        log.info("%s was damaged: %s", library, why)
        return
    _told.add(directory)
    log.warning(
        "Inductor's cache %s has libraries that are damaged, by a crash or a full disk perhaps, such as %s: %s. They "
        "are removed and compiled again.",
        directory,
        library.name,
        why,
    )
