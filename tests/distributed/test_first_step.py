"""Ranks of a machine share the compilation of regions in a first step, and detect the death of a rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

import graphshard
from graphshard.errors import PeerError
from graphshard.lower import inductor
from graphshard.lower.inductor_cache import cores_here
from tests.distributed.twins import world_mesh
from tests.helpers import Blocks
from tests.ranks import RankError, Ranks

pytestmark = pytest.mark.slow


def _compile_as_torchrun(rank: int, world_size: int, cache: str) -> Any:
    """Compile a model on ranks as started by torchrun, with an empty cache."""
    own = {"TORCHINDUCTOR_CACHE_DIR": cache, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ.update(own)
    counters["inductor"].clear()
    torch.manual_seed(0)
    return graphshard.compile(Blocks(3, width=12, bias=True), world_mesh())


def _first_step(rank: int, world_size: int, cache: str) -> tuple[int, int, dict[str, str], float]:
    model = _compile_as_torchrun(rank, world_size, cache)
    loss = model(torch.full((5, 12), rank + 1.0))
    loss.backward()
    calls = model._graphshard.tracer.compiled
    sources = {key: call.source for key, call in calls.items() if call.source}
    found = counters["inductor"]
    return found["fxgraph_cache_miss"], found["fxgraph_cache_hit"], sources, loss.item()


def test_each_region_is_compiled_by_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    """All ranks load all regions from the cache; the next launch compiles none."""
    first = ranks(2).run(_first_step, str(tmp_path / "inductor"))
    number = len(first[0][2])
    assert number >= 3
    assert sum(misses for misses, _, _, _ in first) == number
    assert all(hits == 0 for _, hits, _, _ in first)
    assert first[0][2] == first[1][2]
    if cores_here() > 1:
        assert all(misses for misses, _, _, _ in first)
    second = ranks(2).run(_first_step, str(tmp_path / "inductor"))
    assert [(misses, hits) for misses, hits, _, _ in second] == [(0, 0)] * 2
    assert [loss for *_, loss in second] == [loss for *_, loss in first]


def _dies(rank: int, world_size: int, cache: str, found: str) -> None:
    model = _compile_as_torchrun(rank, world_size, cache)

    def generate(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    start = time.monotonic()
    with mock.patch.object(inductor, "generate", generate if rank == 1 else inductor.generate):
        try:
            model(torch.ones(5, 12))
        except PeerError as error:
            Path(found).write_text(f"{time.monotonic() - start:.0f} {error}")
            raise


def test_a_rank_that_dies_during_compilation_does_not_block_others(ranks: Ranks, tmp_path: Path) -> None:
    """It holds locks of its share; another rank takes them over, or gives up when it learns of the death."""
    with pytest.raises(RankError, match="PeerError"):
        ranks(2).run(_dies, str(tmp_path / "inductor"), str(tmp_path / "found"))
    seconds, _, message = (tmp_path / "found").read_text().partition(" ")
    assert "rank 1 has died" in message or "rank 1 has ended" in message, message
    assert float(seconds) < 120
