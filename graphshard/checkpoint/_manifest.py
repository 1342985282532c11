"""Files of a checkpoint, so that one that was interrupted, truncated or partly deleted is noticed.

`manifest.json` is written last and holds the size and CRC-32 of every other file. The CRC finds accidents, not malice:
anyone who can change a file can change the manifest.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from graphshard.errors import ArgumentError, CheckpointError, visible
from graphshard.utils.argument_validation import path_of
from graphshard.utils.files import read_file, write_text
from graphshard.utils.json_dataclasses import read, write
from graphshard.utils.text import brief

log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_EARLIER = "Load an earlier checkpoint"
_MAX_BYTES = 256 << 20
# DCP's files and ours: names in one directory, which a file system takes.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


@dataclass(frozen=True)
class StoredFile:
    """A file as it was saved: its length and the checksum of its content."""

    bytes: int
    crc32: int


Files: TypeAlias = Mapping[str, StoredFile]


@dataclass(frozen=True)
class CheckpointManifest:
    """Contents of `manifest.json`; `time` is when the checkpoint was complete, in seconds since 1970."""

    format: Literal[1]
    time: float
    files: dict[str, StoredFile]


def measure(directory: Path, names: Iterable[str]) -> dict[str, StoredFile]:
    """Read files and return their sizes in bytes and their checksums."""
    files = {}
    for name in names:
        size = checksum = 0
        with (directory / name).open("rb") as file:
            while block := file.read(1 << 22):
                size, checksum = size + len(block), zlib.crc32(block, checksum)
        files[name] = StoredFile(size, checksum)
    return files


def write_manifest(directory: Path, files: Files) -> None:
    """Declare a directory complete."""
    manifest = CheckpointManifest(1, time.time(), dict(files))
    write_text(directory / _MANIFEST, json.dumps(write(manifest), indent=1, sort_keys=True) + "\n")
    sync(directory / _MANIFEST)


def read_manifest(directory: Path) -> tuple[float, Files]:
    """Return when a directory was complete, and its files; raise CheckpointError unless all are there, in full."""
    try:
        manifest = read(json.loads(read_file(directory / _MANIFEST, _MAX_BYTES)), CheckpointManifest)
        odd = [name for name in manifest.files if not _NAME.fullmatch(name) or name in (".", "..", _MANIFEST)]
        if odd or not math.isfinite(manifest.time):
            raise ArgumentError(f"{brief(odd[0])} is not a file name" if odd else f"time is {manifest.time}")
    except (ValueError, RecursionError) as error:
        why = visible(str(error), lines=False)[:300]
        raise CheckpointError(
            f"{directory / _MANIFEST} is missing or unreadable ({why}): the checkpoint was interrupted, or it was not "
            f"written by graphshard.checkpoint.save_checkpoint. {_EARLIER}, or use torch.distributed.checkpoint.load."
        ) from error
    for name, expected in manifest.files.items():
        path = directory / name
        size = path.stat().st_size if path.is_file() else None
        if size != expected.bytes:
            what = "is missing" if size is None else f"has {size} bytes instead of {brief(expected.bytes)}"
            raise CheckpointError(f"{path} {what}: it was truncated or removed after it was saved. {_EARLIER}.")
    return manifest.time, manifest.files


def check_contents(directory: Path, files: Files) -> None:
    """Raise CheckpointError if a file's checksum differs from the manifest."""
    for name in files:
        if measure(directory, [name])[name] != files[name]:
            raise CheckpointError(f"{directory / name} was damaged after it was saved (CRC-32). {_EARLIER}.")


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint in a directory that was saved last, or None.

    Complete means that all files have their full length; `load_checkpoint` also reads and checks them. This is not a
    collective: ranks that call it while one of them saves may see different checkpoints. A directory that is damaged
    is left out, and the log says why.

    Raises:
        ArgumentError: `directory` is not a path, or is a file.
    """
    where = path_of("directory", directory, "a directory with checkpoints")
    if where.exists() and not where.is_dir():
        raise ArgumentError(f"directory must be a directory with checkpoints, got the file {brief(str(where))}.")
    return next(iter(complete_checkpoints(where)), None)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in a directory, the one that was saved last first."""
    found: list[tuple[float, Path]] = []
    for path in directory.glob("[!.]*/"):
        try:
            found.append((read_manifest(path)[0], path))
        except (CheckpointError, OSError) as error:
            log.info("not a checkpoint: %s", error)
    return [path for _, path in sorted(found, reverse=True)]


def rotate(directory: Path, keep: int) -> None:
    """Remove complete checkpoints but the last ones; other directories, and damaged ones, are left alone.

    A directory is renamed before it is emptied, so that none is ever half a checkpoint under its name.
    """
    for path in complete_checkpoints(directory)[keep:]:
        try:
            path.rename(path.with_name(f".{path.name}.removed"))
        except OSError as error:
            log.warning("the old checkpoint %s is not removed: %s", path, error)
    for path in directory.glob(".*.removed"):
        shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
