"""Full disk on one rank: its dump stops with a warning, and all ranks continue with the same results."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import graphshard
from tests.debug.test_full_disk import full_disk
from tests.distributed.nets import Net, rows, train
from tests.distributed.twins import assert_same, fsdp2, world_mesh
from tests.ranks import Ranks


def _dumps(rank: int, world_size: int, folder: Path) -> tuple[list[str], set[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("graphshard.utils.files")
    log.addHandler(handler)
    found: list[Any] = []
    try:
        for compiled in (True, False):
            torch.manual_seed(0)
            model = Net()
            if compiled:
                with patch.dict(os.environ, GRAPHSHARD_DUMP_RANKS="all"):
                    graphshard.compile(model, world_mesh(), backend="eager", dump=folder)
            else:
                fsdp2(model, world_mesh())
            with full_disk() if rank == 1 else contextlib.nullcontext():
                found.append(train(model, [rows(rank), rows(rank + 2, 7, 4)]))  # two programs
    finally:
        log.removeHandler(handler)
    assert_same(found[0], found[1], "training")
    return said, {path.name for path in (folder / f"rank{rank}").rglob("*") if path.is_file()}


def test_the_dump_of_one_rank_stops(ranks: Ranks, tmp_path: Path) -> None:
    (said, files), (warned, left) = ranks(2).run(_dumps, tmp_path)
    assert said == []
    assert len(warned) == 1, (files, left)
    assert warned[0].startswith(f"the dump to {tmp_path}/rank1 stops, and training goes on: OSError: [Errno 27]")
    assert {"index.html", "summary.json"} <= files
    assert left < files
