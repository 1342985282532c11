"""Inductor's cache on disks that are full, read-only or damaged, and among the ranks of a machine.

Inductor never makes libraries again that a crash or a full disk has cut short. To load one fails or ends the process
(SIGBUS), so their headers are read before.

Each rank compiles a share of the regions, and finds the others in the cache. A file locks each region that a rank has
taken. A rank that ends, for any reason, releases its locks, and others compile what is missing. A rank waits for one
region at a time and holds none while it does, so ranks never wait in a circle.

Machines without a directory in common share through the store of the ranks: one rank of all compiles a region, and one
rank of each other machine reads its file (`Exchange`). A rank waits for others when its own regions are there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from filelock import BaseFileLock, FileLock, Timeout

from graphshard.torch_compat.dtensor import rendezvous_store
from graphshard.torch_compat.inductor_settings import inductor_cache
from graphshard.utils.progress import check_cancelled

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
    """Remove a damaged library, and its source if it is empty; raise RemovedError. Its compiler holds the lock."""
    try:
        if not _damage(library):
            return
        with FileLock(lock):
            why = _damage(library)
            if not why:
                return
            directory = library.parent.parent
            if directory in _warned:
                log.info("%s was damaged: %s", library, why)
            else:
                log.warning(
                    "Inductor's cache %s has libraries that are damaged, by a crash or a full disk perhaps, such as "
                    "%s: %s. They are removed and compiled again.",
                    *(directory, library.name, why),
                )
            _warned.add(directory)
            library.unlink()
            source = library.with_suffix(".cpp")
            if source.exists() and not source.read_bytes().strip(b"\0"):
                source.unlink()
    except FileNotFoundError:  # another rank has removed it
        why = "it is not there"
    raise RemovedError(f"{library} was damaged: {why}")


def _damage(library: Path) -> str:
    content = library.read_bytes()
    # Other systems, and other machines, have other formats.
    other = sys.platform != "linux" or (content[:4] == b"\x7fELF" and content[4:6] != b"\x02\x01")
    return "it is empty" if not content else "" if other else damage_of(content)


def damage_of(content: bytes) -> str:
    """Say why a shared library is not complete; without its end it has no table of sections."""
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


_ASKS_EVERY = 0.25
# How long a rank waits for another to compile a region, which takes a second, or a minute on a machine that is busy.
PATIENCE = 180.0


class Claim:
    """Regions that a rank compiles now, by name; other ranks wait for the locked ones."""

    def __init__(self, locks: Mapping[str, BaseFileLock | None]) -> None:
        self.names, self._locks = tuple(locks), dict(locks)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            self.release(name)

    def release(self, name: str) -> None:
        """Release a region that is in the cache, or cannot be compiled."""
        if (lock := self._locks.pop(name, None)) is not None:
            lock.release()


@dataclass
class Claims:
    """Claims on all regions: a share at a time, this rank's first, and then the regions that other ranks had taken.

    A file in `directory` locks each region, by its key; `show` is called with what is waited for.
    """

    shares: Sequence[Sequence[str]]
    keys: Mapping[str, str]
    directory: Path
    show: Callable[[str], None]
    _taken: list[str] = field(default_factory=list, init=False)

    def free(self) -> Iterator[Claim]:
        """Claim regions that are free; several claims may be entered at once."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for share in self.shares:
            locks: dict[str, BaseFileLock | None] = {}
            for name in share:
                lock = self._lock(name)
                try:
                    locks[name] = lock.acquire(timeout=0).lock
                except Timeout:
                    self._taken.append(name)
            if locks:
                yield Claim(locks)

    def others(self) -> Iterator[Claim]:
        """Wait for the regions that others had, and claim each; leave it, and all free ones, before the next."""
        for name in self._taken:
            self.show(f"wait for {name}, which another rank compiles")
            lock = self._lock(name)
            yield Claim({name: lock if _waited_for(lock, name) else None})

    def _lock(self, name: str) -> BaseFileLock:
        return FileLock(self.directory / f"{self.keys[name]}.lock")


def _waited_for(lock: BaseFileLock, name: str) -> bool:
    """Wait for a lock; False if it takes too long."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        check_cancelled()
        try:
            lock.acquire(timeout=_ASKS_EVERY)
        except Timeout:
            continue
        return True
    log.warning("another process has not compiled %s in %.1f s: this one does", name, PATIENCE)
    return False


# Bytes of the largest file that the store of the ranks takes: it refuses 8 MiB.
_LARGEST = 4 << 20


@dataclass(frozen=True)
class Exchange:
    """Files of regions in the store of the ranks of several machines, by their names.

    rank 3      sets "3" once, compiles the region, leaves its file, or nothing if it cannot be kept
    rank 9      finds "3" and waits for the file
    """

    store: dist.Store
    rank: int
    patience: float = PATIENCE

    def claim(self, name: str) -> bool:
        """Return whether this rank is to compile a region."""
        with contextlib.suppress(dist.DistError):
            return self.store.compare_set(f"{name} compiled by", "", str(self.rank)).decode() == str(self.rank)
        return True

    def give(self, name: str, content: bytes) -> None:
        """Leave the file of a region that this rank has compiled."""
        with contextlib.suppress(dist.DistError):
            self.store.set(f"{name} file", content if len(content) <= _LARGEST else b"")  # type: ignore[arg-type]

    def take(self, name: str) -> bytes:
        """Wait for the file of another rank; empty if it does not come."""
        end = time.monotonic() + self.patience
        with contextlib.suppress(dist.DistError):
            while time.monotonic() < end:
                check_cancelled()
                if self.store.check([f"{name} file"]):
                    return self.store.get(f"{name} file")
                time.sleep(_ASKS_EVERY)
        log.warning("no other machine has compiled %s in %.1f s: this one does", name, self.patience)
        return b""


def exchange_here() -> Exchange | None:
    """Return how this rank shares regions with other machines; None if all ranks may be on one."""
    if "LOCAL_WORLD_SIZE" not in os.environ or not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    if dist.get_world_size() <= place_here()[1]:
        return None
    return Exchange(dist.PrefixStore("graphshard/regions", rendezvous_store()), dist.get_rank())


def shares_of(sizes: Mapping[str, int], number: int) -> list[list[str]]:
    """Divide regions, whose sizes are in nodes, into `number` shares of about the same size, equal on all ranks."""
    shares: list[list[str]] = [[] for _ in range(max(1, min(number, len(sizes))))]
    loads = [0] * len(shares)
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        least = loads.index(min(loads))
        shares[least].append(name)
        loads[least] += sizes[name]
    return [[name for name in sizes if name in share] for share in shares]


def place_here() -> tuple[int, int]:
    """Return this process's place among the ranks of its machine, and their number, by default of all ranks."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)
    size = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    return int(os.environ.get("LOCAL_RANK", rank)) % size, size


def cores_here() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
