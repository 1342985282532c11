"""`async_save_checkpoint` saves a snapshot of the call while training continues, completely or not at all."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import graphshard
from graphshard.checkpoint import save_load
from graphshard.checkpoint._manifest import latest_checkpoint
from graphshard.checkpoint.save_load import Ranks as Together
from graphshard.checkpoint.save_load import Save, write
from graphshard.errors import ArgumentError, CheckpointError
from tests.distributed.test_checkpoint import steps, trainer
from tests.ranks import RankError, Ranks


@contextmanager
def held() -> Iterator[threading.Event]:
    """Block writes until the event is set."""
    go_on = threading.Event()

    def waits(save: Save, ranks: Together) -> None:
        assert go_on.wait(60)
        write(save, ranks)

    with patch.object(save_load, "write", waits):
        yield go_on


def _saves(rank: int, world_size: int, impl: str, folder: Path) -> list[float]:
    model, optim = trainer(impl, seed=1)
    steps(model, optim, 0, 2)
    with held() as go_on:
        future = graphshard.checkpoint.async_save_checkpoint(
            folder / "step-2", model, optim, extra={"step": 2}, per_rank=rank
        )
        losses = steps(model, optim, 2, 5)  # training has its collectives
        dist.barrier()
        assert not future.done()
        assert latest_checkpoint(folder) is None
        go_on.set()
        losses += steps(model, optim, 5, 7)  # during the write
        future.result()
    assert latest_checkpoint(folder) == folder / "step-2"
    return losses


def _goes_on(rank: int, world_size: int, impl: str, folder: Path) -> list[float]:
    model, optim = trainer(impl, seed=2)
    extra, per_rank = graphshard.checkpoint.load_checkpoint(folder / "step-2", model, optim)
    assert (extra, per_rank) == ({"step": 2}, rank)
    return steps(model, optim, 2, 7)


@pytest.mark.parametrize("impl", ["graphshard", "fsdp2"])
@pytest.mark.slow
def test_saves_a_snapshot_of_the_call(ranks: Ranks, tmp_path: Path, impl: str) -> None:
    assert ranks(2).run(_saves, impl, tmp_path) == ranks(2).run(_goes_on, impl, tmp_path)


def _one_after_the_other(rank: int, world_size: int, folder: Path) -> None:
    model, optim = trainer("graphshard", seed=1)
    futures = []
    for step in range(4):
        steps(model, optim, step, step + 1)
        futures.append(
            graphshard.checkpoint.async_save_checkpoint(folder / f"step-{step}", model, optim, extra=step, keep=2)
        )
        assert all(future.done() for future in futures[:-1])
    with pytest.raises(CheckpointError, match=r"step-3'?: it exists already"):  # the write has finished
        graphshard.checkpoint.async_save_checkpoint(folder / "step-3", model, optim)
    for future in futures:
        future.result()
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-3"]
    assert graphshard.checkpoint.load_checkpoint(folder / "step-2", model, optim) == (2, None)


@pytest.mark.slow
def test_writes_one_checkpoint_at_a_time(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_one_after_the_other, tmp_path)


def _fails_on_one(rank: int, world_size: int, folder: Path) -> None:
    model, optim = trainer("graphshard", seed=1)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("graphshard").addHandler(handler)

    def full(save: Save, ranks: Together) -> None:
        if rank == 1:
            (save.partial / "rank-1.pt").mkdir()  # so the write fails
        write(save, ranks)

    with patch.object(save_load, "write", full):
        future = graphshard.checkpoint.async_save_checkpoint(folder / "first", model, optim)
        steps(model, optim, 0, 2)
        with pytest.raises(CheckpointError, match=r"^cannot save .*first'?: IsADirectoryError: .* \(rank 1\)$"):
            future.result()
    assert [line for line in said if "cannot save" in line and "(rank 1)" in line]
    assert latest_checkpoint(folder) is None
    graphshard.checkpoint.async_save_checkpoint(folder / "first", model, optim).result()
    assert latest_checkpoint(folder) == folder / "first"


@pytest.mark.slow
def test_an_error_on_one_rank_is_raised_on_all_and_training_continues(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_fails_on_one, tmp_path)


def _dies(rank: int, world_size: int, folder: Path) -> None:
    model, optim = trainer("graphshard", seed=1)
    graphshard.checkpoint.async_save_checkpoint(folder / "first", model, optim).result()

    def dies(save: Save, ranks: Together) -> None:
        if rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        write(save, ranks)

    with patch.object(save_load, "write", dies):
        start = time.monotonic()
        future = graphshard.checkpoint.async_save_checkpoint(folder / "second", model, optim)
        with pytest.raises(
            CheckpointError, match=r"cannot save .*second.*: a rank ended, or the process group did"
        ) as it:
            future.result()
    (folder / "told").write_text(f"{time.monotonic() - start:.1f} s: {it.value}")


def test_a_rank_dies_during_the_write(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 of 2: died with exit code -9"):
        ranks(2).run(_dies, tmp_path)
    deadline = time.monotonic() + 10
    while not (tmp_path / "told").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert float((tmp_path / "told").read_text().split()[0]) < 10
    assert latest_checkpoint(tmp_path) == tmp_path / "first"


def _of_a_group(rank: int, world_size: int, folder: Path) -> None:
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(ArgumentError, match="group must be a process group that this rank is in"):
            graphshard.checkpoint.async_save_checkpoint(folder / "some", nn.Linear(1, 1), group=group)
        return
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    graphshard.checkpoint.async_save_checkpoint(folder / "some", model, group=group, per_rank={"of": rank}).result()
    found: Any = graphshard.checkpoint.load_checkpoint(folder / "some", model, group=group)
    assert found == (None, {"of": rank})


@pytest.mark.slow
def test_save_on_some_of_the_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks(3).run(_of_a_group, tmp_path)
