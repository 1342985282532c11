"""Reader of checkpoints of torch.distributed.checkpoint (DCP) that runs no code of theirs.

DCP loads its index with `pickle` and values that are not tensors with `torch.load(weights_only=False)`; either runs
whatever code a file asks for. Here the index may refer to DCP's classes only, and `weights_only=True` must succeed
before DCP loads a value.
"""

from __future__ import annotations

import io
import pickle
import re
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from graphshard.errors import CheckpointError
from graphshard.torch_compat.dtensor import checkpoint_classes
from graphshard.torch_compat.torch_ops import pytree
from graphshard.utils.text import brief

_PLAIN = (torch.Tensor, int, float, complex, str, bytes, type(None))

INDEX = ".metadata"

_DCP = "torch.distributed.checkpoint"
# Names of DCP's files.
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
# Classes in the index; there are dtypes, too.
_CLASSES = {
    *(f"{_DCP}.metadata.{kind}StorageMetadata" for kind in ("Bytes", "Chunk", "Tensor")),
    *(f"{_DCP}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *(f"{_DCP}.metadata._MEM_FORMAT_ENCODING", f"{_DCP}.filesystem._StorageInfo"),
    *("torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath", "pathlib.WindowsPath"),
    *("pathlib._local.PosixPath", "pathlib._local.WindowsPath"),  # as Python 3.13 calls them
}

StorageInfo, MemoryFormatEncoding = checkpoint_classes()
# Of these, classes that pickle makes first and fills afterwards.
_BUILT = (
    *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties),
    *(TensorStorageMetadata, StorageInfo),
)


class SafeReader(dcp.FileSystemReader):
    """Reader of a checkpoint in a directory; CheckpointError if the index refers to other classes than DCP's."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        with (directory / INDEX).open("rb") as file:
            self.index = load_index(file)

    @property
    def files(self) -> set[str]:
        """Names of the files it reads."""
        return {INDEX, *(info.relative_path for info in (self.index.storage_data or {}).values())}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index

    def names(self, *keys: str) -> set[str]:
        """Return the names that were saved under some keys of the state, such as "optim", "state"."""
        depth = len(keys)
        paths = (self.index.planner_data or {}).values()
        return {path[depth] for path in paths if path[:depth] == keys and len(path) > depth}


class SafePlanner(dcp.DefaultLoadPlanner):
    """Load planner that takes tensors and plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        load_plain(value.getvalue())
        super().load_bytes(read_item, value)


def load_index(file: IO[bytes]) -> Metadata:
    """Return the index in a file; raise CheckpointError if it holds something else."""
    try:
        index = _IndexUnpickler(file).load()
        _check_index(index)
    except CheckpointError:
        raise
    except Exception as error:  # of pickle, for odd instructions
        raise CheckpointError(f"{INDEX} is not an index: {type(error).__name__}: {brief(str(error))}") from error
    return index


class _IndexUnpickler(pickle._Unpickler):
    """Unpickler that makes objects of the index's classes, and sets attributes of these alone.

    A pickle may set attributes of classes, too, such as `Metadata.__init__`. This is the unpickler in Python, as the
    one in C cannot be told what to refuse.
    """

    stack: list[Any]

    def load_build(self) -> None:
        state, made = self.stack[-1], self.stack[-2]
        if isinstance(made, TensorProperties):  # it has a `__setstate__`
            known = type(state) is tuple
        else:
            known = type(made) in _BUILT and type(state) is dict and set(state) <= {f.name for f in fields(made)}
        if not known:
            raise CheckpointError(f"{INDEX} sets attributes of {brief(made)}, as no index does; it is not loaded")
        pickle._Unpickler.load_build(self)  # type: ignore[attr-defined]

    dispatch: ClassVar[Any] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.2 pickles members of enumerations
            return _member_of
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and f"{module}.{name}" not in _CLASSES:
            raise CheckpointError(f"{INDEX} refers to {module}.{name}, which no index consists of; it is not loaded")
        return super().find_class(module, name)


def _member_of(kind: Any, name: Any) -> Any:
    """Return a member of the enumeration of memory formats, which is all that `getattr` may be asked for."""
    if kind is not MemoryFormatEncoding or type(name) is not str or name not in MemoryFormatEncoding.__members__:
        raise CheckpointError(f"{INDEX} asks {brief(kind)} for {brief(name)}, as no index does; it is not loaded")
    return MemoryFormatEncoding[name]


def _check_index(index: Any) -> None:
    """Raise CheckpointError unless it is an index that points into its directory."""
    if not isinstance(index, Metadata) or not isinstance(index.state_dict_metadata, dict):
        raise CheckpointError(f"{INDEX} is {brief(index)} and not an index; it is not loaded")
    stored, planned, wrong = index.storage_data or {}, index.planner_data or {}, ""
    if not isinstance(stored, dict) or not isinstance(planned, dict):
        raise CheckpointError(f"{INDEX} does not say where values are; it is not loaded")
    for key, value in index.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(value, (TensorStorageMetadata, BytesStorageMetadata)):
            wrong = f"{brief(value)} under {brief(key)}"
    for key, place in stored.items():
        found = isinstance(key, MetadataIndex) and isinstance(place, StorageInfo)
        if not found or not isinstance(place.relative_path, str) or not _FILE.fullmatch(place.relative_path):
            wrong = f"{brief(key)} at {brief(place)}, which is not a file"
        elif not all(isinstance(number, int) and number >= 0 for number in (place.offset, place.length)):
            wrong = f"a value at {brief(place.offset)}"
    for key, path in planned.items():
        if not isinstance(key, str) or not isinstance(path, tuple):
            wrong = f"{brief(path)} for the name of a value"
    if wrong:
        raise CheckpointError(f"{INDEX} has {wrong}; it is not loaded")


def serialize_plain(value: Any, name: str) -> bytes:
    """Serialize tensors, numbers, strings, and lists, tuples and dicts of them; CheckpointError names another value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    try:
        load_plain(buffer.getvalue())
    except CheckpointError as error:
        leaves, _ = pytree.tree_flatten_with_path(value)
        where, leaf = next(((p, leaf) for p, leaf in leaves if not isinstance(leaf, _PLAIN)), ((), value))
        raise CheckpointError(
            f"{name}{pytree.keystr(where)} is a {type(leaf).__name__}, which is not plain data. Save tensors, numbers, "
            "strings, and lists, tuples and dicts of them"
        ) from error
    return buffer.getvalue()


def load_plain(content: bytes) -> Any:
    """Load what `serialize_plain` made, to the CPU; raise CheckpointError for other values, which are not made."""
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError("a value is not plain data; it is not loaded") from error
