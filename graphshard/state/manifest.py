"""Which files a checkpoint consists of, so that one that was interrupted, truncated or partly deleted is noticed.

`manifest.json` is written last and holds the size and CRC-32 of every other file. The CRC finds accidents, not malice:
who can change a file can change the manifest.
"""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from graphshard.ir.errors import CheckpointError
from graphshard.ir.files import write_text

log = logging.getLogger(__name__)

# File name -> {"bytes": size, "crc32": checksum of the contents}
Files: TypeAlias = Mapping[str, Mapping[str, int]]

_MANIFEST = "manifest.json"
_EARLIER = "Load an earlier checkpoint"


def measure(directory: Path, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Read files and return their sizes in bytes and their checksums."""
    files = {}
    for name in names:
        size = checksum = 0
        with (directory / name).open("rb") as file:
            while block := file.read(1 << 22):
                size, checksum = size + len(block), zlib.crc32(block, checksum)
        files[name] = {"bytes": size, "crc32": checksum}
    return files


def write_manifest(directory: Path, files: Files) -> None:
    """Declare a directory complete."""
    manifest = {"format": 1, "time": time.time(), "files": files}
    write_text(directory / _MANIFEST, json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    sync(directory / _MANIFEST)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a directory that holds every file of it in full length, under "files".

    Raises:
        CheckpointError: names the file that is missing or has another size.
    """
    try:
        manifest = json.loads((directory / _MANIFEST).read_text("utf-8"))
        files, _ = {name: int(file["bytes"]) for name, file in manifest["files"].items()}, float(manifest["time"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{directory / _MANIFEST} is missing or unreadable ({error!r}): the checkpoint was interrupted, or it was "
            f"not written by graphshard.save_checkpoint. {_EARLIER}, or use torch.distributed.checkpoint.load."
        ) from error
    for name, expected in files.items():
        path = directory / name
        size = path.stat().st_size if path.is_file() else None
        if size != expected:
            what = "is missing" if size is None else f"has {size} bytes instead of {expected}"
            raise CheckpointError(f"{path} {what}: it was truncated or removed after it was saved. {_EARLIER}.")
    return manifest


def check_contents(directory: Path, files: Files) -> None:
    """Raise CheckpointError if a file's checksum is not that of the manifest."""
    for name in files:
        if measure(directory, [name])[name] != files[name]:
            raise CheckpointError(f"{directory / name} was damaged after it was saved (CRC-32). {_EARLIER}.")


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint in a directory that was saved last, or None.

    Complete means that all files have their full length; `load_checkpoint` also reads and checks them. This is no
    collective: ranks that call it while one of them saves may see different checkpoints.
    """
    found: list[tuple[float, Path]] = []
    for path in Path(directory).glob("[!.]*/"):
        try:
            found.append((read_manifest(path)["time"], path))
        except CheckpointError as error:
            log.info("not a checkpoint: %s", error)
    return max(found)[1] if found else None


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
