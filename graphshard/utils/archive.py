"""Archives: files of named members with facts about them, whole or absent, and checked to the last byte when read.

    {"format": 12, ..., "members": {"a.json": 812}}     the facts, one line of JSON
    sha256:3f0c...  [ed25519:...]                       digest of everything else, and its signature
    ...                                                 the members one after the other, compressed with zlib

The compile cache, the cache of regions and artifacts are archives. A file is read into memory once and checked before
anything in it is interpreted, and no name in it is ever a path on the disk. The digest finds damage, not forgery:
a writer of the file can write its digest. A signature finds forgery. This module needs no torch.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphshard.errors import ArgumentError, ArtifactError
from graphshard.utils.files import read_file, replacing

FORMAT = 12
# Seconds that writing a file takes at most, and after which its writer must have been killed.
WRITES_FOR = 60.0
_LEFT_BEHIND = 3600.0
_LONGEST = 16 << 30
# Bytes of members for each byte of a file; a file that would unpack to more is a bomb.
_MAX_RATIO = 200
_CHECK = re.compile(rb"sha256:([0-9a-f]{64})(?: ed25519:([0-9a-f]{128}))?")
_AGAIN = "Copy or export it again"

# Signs a digest.
Signer = Callable[[bytes], bytes]
# Checks the signature of a file, which is None without one; of a damaged file the digest is empty.
Verifier = Callable[[Path, bytes, bytes | None], None]


@dataclass(frozen=True)
class Archive:
    """A file that was read and checked: the facts of its first line, and its members by name."""

    path: Path
    facts: Mapping[str, Any]
    members: Mapping[str, bytes]

    def json(self, name: str) -> Any:
        """Return the content of a JSON member; raise ArtifactError if it is missing or is not JSON."""
        try:
            return json.loads(self.members[name])
        except KeyError:
            raise ArtifactError(f"{self.path} has no {name}: it was not written by graphshard.export.") from None
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"{self.path}: {name} is not JSON: {error}") from None

    def text(self, name: str) -> str:
        """Return the content of a text member."""
        return self.members[name].decode("utf-8", errors="replace") if name in self.members else ""


def write_archive(
    path: Path, facts: Mapping[str, Any], members: Mapping[str, bytes], sign: Signer | None = None
) -> None:
    """Write a file that is whole or absent, or raise OSError; equal contents make equal files."""
    sizes = {name: len(content) for name, content in members.items()}
    line = json.dumps({"format": FORMAT, **facts, "members": sizes}, allow_nan=False).encode()
    content = b"".join(members.values())
    body = zlib.compress(content, 1)
    if len(content) > _most_in(body):
        body = zlib.compress(content, 0)
    digest = _digest(line, body)
    check = b"sha256:" + digest
    if sign is not None:
        check += b" ed25519:" + sign(digest).hex().encode()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(b"\n".join([line, check, body]))


def read_archive(path: Path, verify: Verifier | None = None) -> Archive:
    """Read a file and check every byte of it, and its signature by `verify`, before it is interpreted.

    Raises:
        ArtifactError: the file is missing, damaged, changed, or has another format.
    """
    try:
        content = read_file(path, _LONGEST)
    except ArgumentError as error:
        raise ArtifactError(str(error)) from None
    line, _, rest = content.partition(b"\n")
    check, _, body = rest.partition(b"\n")
    found = _CHECK.fullmatch(check)
    digest = _digest(line, body)
    whole = found is not None and found[1] == digest
    if verify is not None:
        signature = bytes.fromhex(found[2].decode()) if found is not None and found[2] else None
        verify(path, digest if whole else b"", signature)
    if not whole:
        raise ArtifactError(f"{path} is not whole, or was changed after it was written (SHA-256). {_AGAIN}.")
    try:
        facts = json.loads(line)
        version = facts.pop("format")
        sizes = facts.pop("members")
        if version == FORMAT and type(version) is int:
            return Archive(path, facts, _members(sizes, body))
    except Exception as error:  # contents with the right digest that `write_archive` does not write
        raise ArtifactError(f"{path} was not written by graphshard ({error!r}). {_AGAIN}.") from None
    raise ArtifactError(
        f"{path} has format {version!r}, this version of graphshard reads {FORMAT}. Export it again with this version, "
        "or load it with the one that wrote it.",
        field="format",
    )


def read_private(path: Path) -> Archive:
    """Read a file that no other user could have written, since its code will run.

    Raises:
        ArtifactError: it is damaged, or another user may have written it.
        OSError: it is gone, or cannot be read.
    """
    for place in (path, path.parent):
        if others_can_write(place):
            raise ArtifactError(f"{place} can be written by other users, who could put code there")
    if not path.exists():
        raise FileNotFoundError(path)
    return read_archive(path)


def _members(sizes: dict[str, int], body: bytes) -> dict[str, bytes]:
    total, unpacker = sum(sizes.values()), zlib.decompressobj()
    # A total of -1 would be no limit.
    is_possible = min(sizes.values(), default=0) >= 0 and total <= _most_in(body)
    content = unpacker.decompress(body, total + 1) if is_possible else b""
    if len(content) != total or not unpacker.eof or unpacker.unused_data:
        raise ValueError(f"the members have {total} bytes, and it holds others")
    reader = io.BytesIO(content)
    return {name: reader.read(size) for name, size in sizes.items()}


def _most_in(body: bytes) -> int:
    """Return the most bytes that `write_archive` compresses to a body of this length."""
    return _MAX_RATIO * max(len(body), 1024)


def _digest(line: bytes, body: bytes) -> bytes:
    found = hashlib.sha256(line + b"\n")
    found.update(body)
    return found.hexdigest().encode()


def others_can_write(place: Path) -> bool:
    """Return whether users except this one and root could have written a file, or files in a directory."""
    if not hasattr(os, "getuid"):
        return False
    about = os.stat(place)
    return about.st_uid not in (os.getuid(), 0) or bool(about.st_mode & stat.S_IWOTH)


def is_being_written(path: Path) -> bool:
    """Return whether another process is writing the file, or was killed a moment ago while it did."""
    with contextlib.suppress(OSError):
        return any(time.time() - used(found) < WRITES_FOR for found in path.parent.glob(f".{glob.escape(path.name)}.*"))
    return False


def touch(path: Path) -> None:
    """Record that a file was used now."""
    with contextlib.suppress(OSError):
        os.utime(path)


def remove(path: Path) -> bool:
    """Remove a file; return False if it cannot be removed, or is gone."""
    try:
        path.unlink()
    except OSError:
        return False
    return True


def remove_oldest(paths: Iterable[Path], limit: int, keep: Path | None = None) -> int:
    """Remove the least recently used files except `keep` until others have at most `limit` bytes; return how many."""
    total, removed = 0, 0
    for path in sorted(paths, key=lambda path: (used(path), path), reverse=True):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
            if total > limit and path != keep:
                removed += remove(path)
    return removed


def remove_left_behind(directory: Path, ending: str, older: float = _LEFT_BEHIND) -> None:
    """Remove temporary files of killed processes, `older` seconds old, for files with this ending."""
    with contextlib.suppress(OSError):
        for path in directory.glob(f".*{ending}.*"):
            if time.time() - used(path) >= older:
                remove(path)


def used(path: Path) -> float:
    """Return when a file was last written or used, in seconds since 1970; 0 if it does not exist."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
