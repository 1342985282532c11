"""Inductor's cache on disks that are full, read-only or damaged.

Libraries that a crash or a full disk has cut short are there, so Inductor never makes them again. To load one fails or
ends the process (SIGBUS), so their headers are read before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from graphshard.torch_compat.inductor_settings import inductor_cache

log = logging.getLogger(__name__)

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# Directories that a warning has named: one crash leaves many such libraries.
_warned: set[Path] = set()

# ELF files of 64 bits, little-endian.
ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_STRINGS, _EMPTY = 3, 8


@contextlib.contextmanager
def writable_cache() -> Iterator[str]:
    """Yield the directory of Inductor's cache; if it cannot be written, warn and use a temporary one.

    What was compiled is loaded by then, so the temporary directory is removed at the end.
    """
    given = os.environ.get(VARIABLE)
    try:
        directory = inductor_cache()
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"graphshard")
    except OSError as error:
        warnings.warn(
            f"Inductor's cache cannot be written ({error}): what is compiled now is not kept for another run, nor "
            f"shared with other ranks. Set {VARIABLE} to a directory that can be written.",
            stacklevel=2,
        )
    else:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="graphshard-", ignore_cleanup_errors=True) as directory:
        os.environ[VARIABLE] = directory
        try:
            yield directory
        finally:
            if given is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = given


class RemovedError(Exception):
    """A library was damaged, and has been removed."""


def check_whole(library: Path, lock: Path) -> None:
    """Remove a library that is damaged, and its source if that is as empty.

    Args:
        lock: held by the process that compiles the library: one that is half written is waited for.

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


def damage_of(content: bytes) -> str:
    """Say why a shared library is not complete; "" if its headers do not show damage.

    Linkers put the table of sections at the end, so a library without its end has none.
    """
    try:
        elf_sections(content)
    except (struct.error, IndexError, ValueError) as error:
        return str(error)
    return ""


def elf_sections(content: bytes) -> list[tuple[int, ...]]:
    """Read the table of sections; raises ValueError, IndexError or struct.error if the file is not complete."""
    ident, *_, first, _, _, _, _, size, count, names = ELF_HEADER.unpack_from(content)
    if ident[:6] != b"\x7fELF\x02\x01":
        raise ValueError("it has not the header of an ELF file")
    if size != _SECTION.size:
        raise ValueError("its table of sections is of another format")
    if first + size * count > len(content):
        raise ValueError("it is cut off")
    sections = [_SECTION.unpack_from(content, first + index * size) for index in range(count)]
    for _, kind, _, _, offset, length, *_ in sections:
        if kind != _EMPTY and offset + length > len(content):
            raise ValueError("it is cut off")
    if sections[names][1] != _STRINGS:
        raise ValueError("its table of sections was not written")
    return sections


def _warn(library: Path, why: str) -> None:
    directory = library.parent.parent
    if directory in _warned:
        log.info("%s was damaged: %s", library, why)
        return
    _warned.add(directory)
    log.warning(
        "Inductor's cache %s has libraries that are damaged, by a crash or a full disk perhaps, such as %s: %s. They "
        "are removed and compiled again.",
        directory,
        library.name,
        why,
    )
