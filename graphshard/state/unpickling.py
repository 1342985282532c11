"""Read checkpoints of torch.distributed.checkpoint (DCP) without running what may be hidden in them.

DCP loads its index with `pickle` and values that are no tensors with `torch.load(weights_only=False)`; either runs
whatever code a file asks for. Here the index may refer to DCP's own classes only, and `weights_only=True` must succeed
before DCP loads a value.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.utils import _pytree as pytree

from graphshard.ir.errors import CheckpointError

_PLAIN = (torch.Tensor, int, float, complex, str, bytes, type(None))

INDEX = ".metadata"

_DCP = "torch.distributed.checkpoint"
# What the index consists of, besides dtypes.
_CLASSES = {
    *(f"{_DCP}.metadata.{kind}StorageMetadata" for kind in ("Bytes", "Chunk", "Tensor")),
    *(f"{_DCP}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *(f"{_DCP}.metadata._MEM_FORMAT_ENCODING", f"{_DCP}.filesystem._StorageInfo"),
    *("torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath", "pathlib.WindowsPath"),
}


class SafeReader(dcp.FileSystemReader):
    """Reads a checkpoint from a directory.

    Raises:
        CheckpointError: the index refers to something else than DCP's classes.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        with (directory / INDEX).open("rb") as file:
            self.index: Metadata = _IndexUnpickler(file).load()

    @property
    def files(self) -> set[str]:
        """The names of the files it reads."""
        return {INDEX, *(info.relative_path for info in (self.index.storage_data or {}).values())}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index

    def names(self, *keys: str) -> set[str]:
        """The names that were saved under some keys of the state, such as "optim", "state"."""
        depth = len(keys)
        paths = (self.index.planner_data or {}).values()
        return {path[depth] for path in paths if path[:depth] == keys and len(path) > depth}


class SafePlanner(dcp.DefaultLoadPlanner):
    """Loads values that are no tensors only if they are plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        load_plain(value.getvalue())
        super().load_bytes(read_item, value)


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and f"{module}.{name}" not in _CLASSES:
            raise CheckpointError(f"{INDEX} refers to {module}.{name}, which no index consists of; it is not loaded")
        return super().find_class(module, name)


def serialize_plain(value: Any, name: str) -> bytes:
    """Serialise tensors, numbers, strings, and lists, tuples and dicts of them, for `load_plain`.

    Raises:
        CheckpointError: names what else is in it.
    """
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
    """Load what `serialize_plain` made; tensors are on the CPU.

    Raises:
        CheckpointError: there is something else in it; that was not made.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError("a value is not plain data; it is not loaded") from error
