"""Checkpoints in one process: damaged ones do not hide others, forged indices have no effect, rotation is safe."""

from __future__ import annotations

import json
import logging
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.checkpoint._manifest import latest_checkpoint, measure, write_manifest
from graphshard.checkpoint._safe_unpickler import INDEX, SafeReader
from graphshard.errors import CheckpointError
from tests.helpers import Blocks
from tests.ranks import reset_distributed


@pytest.fixture(scope="module")
def model() -> Iterator[torch.nn.Module]:
    """Compile a model on one rank with real collectives."""
    reset_distributed()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield graphshard.compile(Blocks(1), init_device_mesh("cpu", (1,)), backend="eager")
    reset_distributed()


def checkpoint(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir()
    (path / "data").write_bytes(b"1234")
    write_manifest(path, measure(path, ["data"]))
    return path


def _with(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: {**manifest, **values}


def _without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: {key: value for key, value in manifest.items() if key != name}


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "deep": lambda _: json.loads("[" * 900 + "]" * 900),
    "no dict": lambda _: [1],
    "nothing": lambda _: None,
    **{f"no {name}": _without(name) for name in ("format", "time", "files")},
    **{f"format {value}": _with(format=value) for value in (2, 0, True, "1", None, 1.5, 10**30)},
    **{f"time {value}": _with(time=value) for value in (math.inf, math.nan, "now", None, True, [1.0])},
    **{f"files {str(value)[:9]}": _with(files=value) for value in ([], None, "data", {"data": 4}, {"data": {}})},
    "more": _with(more=1),
    "a huge name": _with(files={"x" * 10_000: {"bytes": 4, "crc32": 1}}),
    "NUL": _with(files={"a\0b": {"bytes": 4, "crc32": 1}}),
    "outside": _with(files={"../data": {"bytes": 4, "crc32": 1}}),
    "the directory": _with(files={"..": {"bytes": 4, "crc32": 1}}),
    **{
        f"bytes {value}": _with(files={"data": {"bytes": value, "crc32": 1}})
        for value in (-1, 10**30, "4", 4.0, None, True, math.nan)
    },
}
RAW = {
    "very deep": b"[" * 200_000,
    "no text": b"\xff\xfe",
    "empty": b"",
    "Infinity": b'{"format": 1, "time": Infinity, "files": {}}',
    "a long number": b'{"format": 1, "time": ' + b"9" * 10_000 + b', "files": {}}',
    "1e999": b'{"format": 1, "time": 1e999, "files": {}}',
}


@pytest.mark.parametrize("damage", [*DAMAGES, *RAW])
def test_a_damaged_checkpoint_does_not_hide_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """Although it would be the newest; the log has the reason."""
    good, bad = checkpoint(tmp_path, "good"), checkpoint(tmp_path, "newest")
    file = bad / "manifest.json"
    if damage in RAW:
        file.write_bytes(RAW[damage])
    else:
        file.write_text(json.dumps(DAMAGES[damage](json.loads(file.read_text()))))
    with caplog.at_level(logging.INFO, "graphshard.checkpoint._manifest"):
        assert latest_checkpoint(tmp_path) == good
    assert f"not a checkpoint: {bad}" in caplog.text
    assert len(caplog.text) < 2000


def test_rejects_special_files(tmp_path: Path) -> None:
    """A manifest or data that is a FIFO, a device or a directory, and an unreadable directory."""
    import os

    good = checkpoint(tmp_path, "good")
    for number, name in enumerate(("manifest.json", "data")):
        for kind in ("fifo", "device", "directory"):
            path = checkpoint(tmp_path, f"bad-{number}-{kind}") / name
            path.unlink()
            if kind == "fifo":
                os.mkfifo(path)
            elif kind == "device":
                path.symlink_to("/dev/zero")
            else:
                path.mkdir()
    assert latest_checkpoint(tmp_path) == good


# --- forged indices ------------------------------------------------------------------------------------------


def index_of(*instructions: bytes) -> bytes:
    return b"".join((b"\x80\x02", *instructions, b"."))


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


_METADATA = named("torch.distributed.checkpoint.metadata", "Metadata")
_ENCODING = named("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
_TO_DICT = b"}U\x08__init__" + named("torch", "Size") + b"s"
FORGED = {
    "a class's __init__": index_of(_METADATA, b"N", _TO_DICT, b"\x86b"),
    "a class's dict": index_of(_METADATA, _TO_DICT, b"b"),
    "an enumeration's member": index_of(_ENCODING, b"K\x00\x85R", b"}U\x07_value_K\x07s", b"b"),
    "a function": index_of(named("torch.serialization", "_get_layout"), b"N", b"}U\x0c__defaults__)s", b"\x86b"),
    "an attribute that is no field": index_of(_METADATA, b")\x81", b"}U\x09__class__", _METADATA, b"s", b"b"),
    "another attribute of a class": index_of(named("builtins", "getattr"), _METADATA, b"U\x08__init__\x86R"),
    "another attribute of an enumeration": index_of(named("builtins", "getattr"), _ENCODING, b"U\x07__new__\x86R"),
    "another class": index_of(named("os", "system"), b"U\x04true\x85R"),
    "no index": index_of(b"K\x07"),
    "a list": index_of(b"]"),
    "cut off": b"\x80\x02" + _METADATA,
    "no pickle": b"\x00\x01\x02",
    "empty": b"",
}


def classes() -> list[Any]:
    """Return the contents of classes that a forged index could change."""
    kinds = [getattr(metadata, name) for name in metadata.__all__]
    members = [(member.name, member.value, member._value_) for member in metadata._MEM_FORMAT_ENCODING]
    return [dict(vars(kind)) for kind in kinds] + [members, torch.serialization._get_layout.__defaults__]


@pytest.mark.parametrize("name", FORGED)
def test_a_rejected_index_does_not_change_the_process(tmp_path: Path, name: str) -> None:
    before = classes()
    (tmp_path / INDEX).write_bytes(FORGED[name])
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        SafeReader(tmp_path)
    assert classes() == before
    assert metadata.Metadata({}).planner_data is None


def test_members_that_are_pickled_by_name(
    model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Python 3.11.2, unlike 3.11.7."""
    encoding = metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(encoding, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name)))
    graphshard.checkpoint.save_checkpoint(tmp_path / "good", model)
    assert b"getattr" in (tmp_path / "good" / INDEX).read_bytes()
    graphshard.checkpoint.load_checkpoint(tmp_path / "good", model)


def test_rejects_an_index_that_points_outside(model: torch.nn.Module, tmp_path: Path) -> None:
    graphshard.checkpoint.save_checkpoint(tmp_path / "good", model)
    index = SafeReader(tmp_path / "good").index
    assert index.storage_data
    for path in ("../other", "/etc/passwd", "a\0b", "x" * 5000, 7, "", ".."):
        for info in index.storage_data.values():
            info.relative_path = path
        (tmp_path / INDEX).write_bytes(pickle.dumps(index))
        with pytest.raises(CheckpointError, match="which is not a file"):
            SafeReader(tmp_path)


# --- rotation ------------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_stay(model: torch.nn.Module, tmp_path: Path) -> None:
    """By time, not by name; damaged checkpoints and other files are kept."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("text")
    damaged = checkpoint(tmp_path, "damaged")
    (damaged / "data").unlink()
    for name in ("z", "y", "x", "w"):
        graphshard.checkpoint.save_checkpoint(tmp_path / name, model, keep=2)
    assert names(tmp_path) == ["damaged", "file", "notes", "w", "x"]
    graphshard.checkpoint.save_checkpoint(tmp_path / "v", model)
    assert names(tmp_path) == ["damaged", "file", "notes", "v", "w", "x"]
    graphshard.checkpoint.save_checkpoint(tmp_path / "u", model, keep=1)
    assert names(tmp_path) == ["damaged", "file", "notes", "u"]
    graphshard.checkpoint.load_checkpoint(tmp_path / "u", model)


@pytest.mark.parametrize("where", ["write_data", "finish", "rename", "manifest"])
def test_a_failed_save_removes_nothing(
    model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    for name in ("a", "b"):
        graphshard.checkpoint.save_checkpoint(tmp_path / name, model)

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    if where == "rename":
        monkeypatch.setattr(Path, "rename", full_disk)
    elif where == "manifest":
        monkeypatch.setattr("graphshard.checkpoint.save_load.write_manifest", full_disk)
    else:
        monkeypatch.setattr(dcp.FileSystemWriter, where, full_disk)
    with pytest.raises(CheckpointError, match="No space left"):
        graphshard.checkpoint.save_checkpoint(tmp_path / "c", model, keep=1)
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["a", "b"]
    for name in ("a", "b"):
        graphshard.checkpoint.load_checkpoint(tmp_path / name, model)


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(
    model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The new checkpoint is complete."""
    graphshard.checkpoint.save_checkpoint(tmp_path / "a", model)
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if target.name.endswith(".removed"):
            raise OSError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    graphshard.checkpoint.save_checkpoint(tmp_path / "b", model, keep=1)
    assert names(tmp_path) == ["a", "b"]
    assert f"the old checkpoint {tmp_path / 'a'} is not removed" in caplog.text
