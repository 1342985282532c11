"""`save_checkpoint` and `load_checkpoint`: training resumes exactly, and damaged checkpoints are rejected."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import graphshard
from graphshard.checkpoint._manifest import latest_checkpoint, measure, read_manifest, write_manifest
from graphshard.checkpoint._safe_unpickler import SafeReader, load_plain, serialize_plain
from graphshard.errors import CheckpointError
from tests.distributed.twins import assert_same, fsdp2, world_mesh
from tests.ranks import RankError, Ranks


class Net(nn.Module):
    """Two blocks of odd width and a head of one row: shards are uneven, and empty on trailing ranks."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.norm = nn.BatchNorm1d(dim)
        self.head = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x))


def trainer(impl: str, seed: int, dim: int = 7) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model and its optimizer, sharded by graphshard or by FSDP2."""
    torch.manual_seed(seed)
    model = Net(dim)
    if impl == "fsdp2":
        fsdp2(model, world_mesh())
    else:
        graphshard.compile(model, world_mesh(), backend="eager")
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def steps(model: nn.Module, optim: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Train on the same rows on every rank, so the result does not depend on the number of ranks."""
    losses = []
    for step in range(first, last):
        x = torch.randn(4, model.norm.num_features, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def _save(rank: int, world_size: int, impl: str, path: Path) -> list[float]:
    model, optim = trainer(impl, seed=1)
    steps(model, optim, 0, 2)
    extra = {"step": 2, "note": ["text", 1.5, None], "tensor": torch.arange(3)}
    graphshard.checkpoint.save_checkpoint(
        path, model, optim, extra=extra, per_rank={"rng": torch.get_rng_state(), "rank": rank}
    )
    return steps(model, optim, 2, 5)


def _load(rank: int, world_size: int, impl: str, path: Path) -> tuple[list[float], Any]:
    model, optim = trainer(impl, seed=2)
    steps(model, optim, 7, 8)  # loading replaces these values
    extra, per_rank = graphshard.checkpoint.load_checkpoint(path, model, optim)
    assert (extra["step"], extra["note"]) == (2, ["text", 1.5, None])
    assert torch.equal(extra["tensor"], torch.arange(3))
    return steps(model, optim, extra["step"], 5), per_rank and per_rank["rank"]


@pytest.mark.parametrize(
    ("writer", "written_by", "reader", "read_by"),
    [("graphshard", 2, "graphshard", 2), ("fsdp2", 2, "graphshard", 3), ("graphshard", 3, "fsdp2", 2)],
    ids=["resume", "from-fsdp2", "to-fsdp2"],
)
@pytest.mark.quick_cases("from-fsdp2")
def test_resumed_training_equals_uninterrupted_training(
    ranks: Ranks, tmp_path: Path, writer: str, written_by: int, reader: str, read_by: int
) -> None:
    """A rank that did not exist at the save finds no rank-specific data."""
    losses = ranks(written_by).run(_save, writer, tmp_path / "step-2")[0]
    expected = [(losses, rank if rank < written_by else None) for rank in range(read_by)]
    loaded = ranks(read_by).run(_load, reader, tmp_path / "step-2")
    if written_by == read_by:
        assert loaded == expected
    else:  # gradients are summed over another number of ranks, in another order
        assert [rank for _, rank in loaded] == [rank for _, rank in expected]
        torch.testing.assert_close(torch.tensor([losses for losses, _ in loaded]), torch.tensor([losses] * read_by))


# --- damaged checkpoints ------------------------------------------------------------------------------------


class _Harmful:
    """An object that creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def _truncate(path: Path, name: str) -> None:
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: len(content) // 2])


def _flip(path: Path, name: str) -> None:
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)


def _replace(path: Path, name: str, content: bytes) -> None:
    """Forge a file and update the manifest."""
    (path / name).write_bytes(content)
    names = json.loads((path / "manifest.json").read_text())["files"]
    write_manifest(path, measure(path, names))


def _forge_value(path: Path) -> None:
    """Replace the first value that is not a tensor with something harmful."""
    for info in SafeReader(path).index.storage_data.values():
        content = bytearray((path / info.relative_path).read_bytes())
        piece = bytes(content[info.offset : info.offset + info.length])
        harmful = pickle.dumps(_Harmful(path / "harm"), protocol=2)
        if not isinstance(load_plain(piece), Tensor) and len(harmful) <= len(piece):
            content[info.offset : info.offset + info.length] = harmful.ljust(len(piece), b"\0")
            _replace(path, info.relative_path, bytes(content))
            return
    raise AssertionError("no value to forge")


DATA = "__1_0.distcp"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (shutil.rmtree, r"manifest\.json is missing or unreadable .* the checkpoint was interrupted"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), r"manifest\.json is missing .* Load an earlier"),
    "half a manifest": (lambda path: _truncate(path, "manifest.json"), r"manifest\.json is missing or unreadable"),
    "no shards": (lambda path: (path / DATA).unlink(), r"__1_0\.distcp is missing: it was truncated or removed"),
    "half the shards": (lambda path: _truncate(path, DATA), r"__1_0\.distcp has \d+ bytes instead of \d+: .* earlier"),
    "a wrong bit": (lambda path: _flip(path, DATA), r"__1_0\.distcp was damaged after it was saved \(CRC-32\)"),
    "no index": (lambda path: (path / ".metadata").unlink(), r"\.metadata is missing"),
    "half an index": (lambda path: _truncate(path, ".metadata"), r"\.metadata has \d+ bytes instead"),
    "no data of rank 1": (lambda path: (path / "rank-1.pt").unlink(), r"rank-1\.pt is missing"),
    "forged index": (
        lambda path: _replace(path, ".metadata", pickle.dumps(_Harmful(path / "harm"))),
        r"\.metadata refers to posix\.mkdir, which no index consists of",
    ),
    "forged extra": (
        lambda path: _replace(path, "extra.pt", pickle.dumps(_Harmful(path / "harm"), protocol=2)),
        "not plain data",
    ),
    "forged value": (_forge_value, "not plain data"),
}


def _damaged(rank: int, world_size: int, folder: Path) -> tuple[dict[str, str], list[float], list[float]]:
    """Load copies of a checkpoint with each damage; return the messages, and check that nothing changes."""
    model, optim = trainer("graphshard", seed=1)
    steps(model, optim, 0, 1)
    graphshard.checkpoint.save_checkpoint(folder / "good", model, optim)
    expected = steps(model, optim, 1, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    messages = {}
    for number, (name, (damage, _)) in enumerate(DAMAGES.items()):
        path = folder / f"bad-{number}"
        if rank == 0:
            shutil.copytree(folder / "good", path)
            damage(path)
        dist.barrier()
        with pytest.raises(CheckpointError) as caught:
            graphshard.checkpoint.load_checkpoint(path, model, optim)
        messages[name] = str(caught.value)
        if name != "forged value":  # found only when the value is read
            assert_same(dict(model.state_dict()), before, name)
        dist.barrier()
        assert not (path / "harm").exists()
    graphshard.checkpoint.load_checkpoint(folder / "good", model, optim)
    return messages, expected, steps(model, optim, 1, 3)


def test_rejects_damaged_checkpoint_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Nothing is changed, nothing harmful is unpickled, and the intact checkpoint still loads."""
    for messages, expected, losses in ranks(3).run(_damaged, tmp_path):
        for name, (_, pattern) in DAMAGES.items():
            assert re.search(pattern, messages[name]), f"{name}: {messages[name]}"
            assert messages[name].startswith(f"cannot load '{tmp_path}/bad-")
        assert losses == expected
    forged = {f"bad-{number}" for number, name in enumerate(DAMAGES) if name.startswith(("forged", "a wrong"))}
    complete = {path.name for path in tmp_path.iterdir() if latest_checkpoint_is(path)}
    assert complete == {"good", *forged}


def latest_checkpoint_is(path: Path) -> bool:
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


class _Deeper(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Linear(7, 7))


def _other_model(rank: int, world_size: int, folder: Path) -> list[str]:
    model, optim = trainer("graphshard", seed=1)
    graphshard.checkpoint.save_checkpoint(folder / "model", model)
    graphshard.checkpoint.save_checkpoint(folder / "both", model, optim)
    deeper = graphshard.compile(_Deeper(), world_mesh(), backend="eager")
    graphshard.checkpoint.save_checkpoint(folder / "deeper", deeper)
    wider, _ = trainer("graphshard", seed=1, dim=9)
    head = torch.optim.AdamW(model.head.parameters())
    messages = []
    for name, *into in [
        ("model", deeper),
        ("deeper", model),
        ("model", wider),
        ("model", model, optim),
        ("both", model, head),
    ]:
        before = {key: value.clone() for key, value in into[0].state_dict().items()}
        with pytest.raises(CheckpointError) as caught:
            graphshard.checkpoint.load_checkpoint(folder / name, *into)
        assert_same(dict(into[0].state_dict()), before, name)
        messages.append(str(caught.value).removeprefix(f"cannot load '{folder / name}': "))
    return messages


def test_rejects_checkpoint_of_another_model(ranks: Ranks, tmp_path: Path) -> None:
    for deeper, shallower, wider, optimizer, head in ranks(2).run(_other_model, tmp_path):
        assert "Missing key in checkpoint state_dict: model.blocks.2" in deeper
        assert "it holds blocks.2.bias, blocks.2.weight, which model or optimizers have not" in shallower
        assert "Size mismatch" in wider
        assert "model.blocks.0.weight" in wider
        assert "Missing key in checkpoint state_dict: optim." in optimizer
        assert "it holds state of blocks.0.bias, state of blocks.0.weight," in head


# --- failures while saving ----------------------------------------------------------------------------------


def _failing_saves(rank: int, world_size: int, folder: Path) -> list[str]:
    model, optim = trainer("graphshard", seed=1)
    graphshard.checkpoint.save_checkpoint(folder / "first", model, optim)

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    def attempt(name: str, **options: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            graphshard.checkpoint.save_checkpoint(folder / name, model, optim, **options)
        dist.barrier()
        assert latest_checkpoint(folder) == folder / "first"
        return str(caught.value).removeprefix(f"cannot save '{folder / name}': ")

    messages = [
        attempt("first"),
        attempt("second", extra={"path": folder}),
        attempt("second", per_rank=folder if rank else 0),
    ]
    optim.param_groups[0]["note"] = folder
    messages.append(attempt("second"))
    del optim.param_groups[0]["note"]
    for where in ("write_data", "finish"):
        with pytest.MonkeyPatch.context() as patch:
            if rank == (1 if where == "write_data" else 0):
                patch.setattr(dcp.FileSystemWriter, where, full_disk)
            messages.append(attempt("second"))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Path, "write_bytes", full_disk)
        messages.append(attempt("second"))
    assert (folder / ".second.partial").exists()
    graphshard.checkpoint.save_checkpoint(folder / "second", model, optim)
    dist.barrier()
    assert latest_checkpoint(folder) == folder / "second"
    assert sorted(path.name for path in folder.iterdir()) == ["first", "second"]
    return messages


def test_failure_of_one_rank_is_an_error_on_all(ranks: Ranks, tmp_path: Path) -> None:
    advice = ", which is not plain data. Save tensors, numbers, strings, and lists, tuples and dicts of them"
    for exists, path, per_rank, group, *disk in ranks(2).run(_failing_saves, tmp_path):
        assert exists == "it exists already. Remove it, or choose another name (rank 0)"
        assert path == f"extra['path'] is a PosixPath{advice} (rank 0)"
        assert per_rank == f"per_rank is a PosixPath{advice} (rank 1)"
        assert group.startswith("state['optim']['param_groups'][0]['note'] is a PosixPath")
        assert group.endswith("(rank 0, 1)")
        full = "OSError: [Errno 28] No space left on device"
        assert disk == [f"{full} (rank 1)", f"{full} (rank 0)", f"{full} (rank 1)"]


def _die(rank: int, world_size: int, folder: Path) -> None:
    model, optim = trainer("graphshard", seed=1)
    if rank == 1:
        dcp.FileSystemWriter.write_data = lambda *_: os._exit(9)
    graphshard.checkpoint.save_checkpoint(folder / "second", model, optim)


@pytest.mark.slow
def test_killed_while_saving(ranks: Ranks, tmp_path: Path) -> None:
    """The other ranks do not wait for the dead one, and the next run resumes from the previous checkpoint."""
    losses = ranks(2).run(_save, "graphshard", tmp_path / "first")[0]
    with pytest.raises(RankError, match="rank 1 of 2: died with exit code 9"):
        ranks(2).run(_die, tmp_path)
    assert (tmp_path / ".second.partial").exists()
    assert latest_checkpoint(tmp_path) == tmp_path / "first"
    assert ranks(2).run(_load, "graphshard", tmp_path / "first")[0] == (losses, 0)


# --- manifests, in one process ------------------------------------------------------------------------------


def test_latest_ignores_incomplete_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None
    for number, name in enumerate(["step-9", "step-10", ".step-11.partial", "step-12"]):
        monkeypatch.setattr("time.time", lambda number=number: float(number))
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_bytes(b"1234")
        write_manifest(tmp_path / name, measure(tmp_path / name, ["data"]))
    (tmp_path / "notes.txt").write_text("a file")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-12"
    (tmp_path / "step-12" / "data").write_bytes(b"123")
    assert latest_checkpoint(str(tmp_path)) == tmp_path / "step-10"  # also a str
    (tmp_path / "step-10" / "data").unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-9"
    (tmp_path / "step-9" / "manifest.json").write_text('{"files": {"data": 4}, "time": 1}')
    assert latest_checkpoint(tmp_path) is None


def test_plain_data(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, "text", (True, b"bytes")], "tensor": torch.randn(2, 3, dtype=torch.bfloat16)}
    loaded = load_plain(serialize_plain(value, "it"))
    assert torch.equal(loaded.pop("tensor"), value.pop("tensor"))
    assert loaded == value
    with pytest.raises(CheckpointError, match=r"^it\['path'\] is a PosixPath, which is not plain data\. Save tensors"):
        serialize_plain({"path": tmp_path}, "it")
    content = pickle.dumps(_Harmful(tmp_path / "harm"), protocol=2)
    with pytest.raises(CheckpointError, match="not plain data"):
        load_plain(content)
    assert not (tmp_path / "harm").exists()
