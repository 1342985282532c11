"""Files that are never half written, and read only if they are files of a length that can be; best-effort writers."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from graphshard.errors import ArgumentError

# Characters of a file's name that is made of another one.
_LONGEST = 100
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def file_name(name: str) -> str:
    """A name of a module or a pass as one of a file: what no file system or shell minds, of a length that it takes.

    A changed name ends with a hash, so that two names never collide.
    """
    clean = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:_LONGEST].strip(".")
    if clean == name:
        return name
    return f"{clean}~{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def read_file(path: Path, most: int) -> bytes:
    """The content of a regular file. What else there is, such as a device without an end, is not read.

    Args:
        most: bytes that such a file has.

    Raises:
        ArgumentError: there is none, or it is longer; the message begins with the path.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a FIFO without a writer does not block
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, handle)
        found = os.fstat(handle)
        kind = stat.S_IFMT(found.st_mode)
        if kind != stat.S_IFREG:
            raise ArgumentError(f"{path} cannot be read: it is {_KINDS.get(kind, 'no file')}. Give a file.")
        if found.st_size > most:
            raise ArgumentError(f"{path} is not read: it has {found.st_size} bytes, more than {most}. Is it the file?")
        try:
            with open(handle, "rb", closefd=False) as file:
                return file.read(most)
        except OSError as error:
            raise ArgumentError(f"{path} cannot be read: {error.strerror}.") from None


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name in its directory, which is made if need be, and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to `path`, which replaces it if the block ends well and is removed otherwise."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the directory may be gone, too; what happened first is what counts
            os.unlink(name)
        raise


class BestEffort:
    """Writer that stops at its first OSError, with a warning.

    Args:
        name: what the user calls it, for the warning.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._stopped = False

    def __call__(self, write: Callable[..., Any], *args: Any) -> Any:
        """Return the result of `write`, or None if it fails, or failed earlier, because of the disk."""
        if self._stopped:
            return None
        try:
            return write(*args)
        except OSError as error:
            self._stopped = True
            import logging  # which `graphshard --help` has no use for

            text = "%s stops, and training goes on: %s: %s"
            logging.getLogger(__name__).warning(text, self._name, type(error).__name__, error)
            return None
