"""Ranks of several machines: each region is compiled once, and its file leaves the store once for each machine."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.agreement import Counted
from graphshard.lower import inductor, inductor_cache
from graphshard.lower.inductor_cache import Exchange, exchange_here
from tests.lower.small_regions import INPUT, compute, regions_from
from tests.ranks import Ranks

FIRST = 31000


def _compile(rank: int, size: int, directory: str, fault: str = "") -> tuple[int, dict[str, int], int, list[str]]:
    """Compile as a rank of two machines; return what it generated, read and sent, and what it showed."""
    here = {
        "TORCHINDUCTOR_CACHE_DIR": f"{directory}/machine{rank // 2}",
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
    }
    shown: list[str] = []
    with (
        mock.patch.dict(os.environ, here),
        mock.patch.object(inductor, "generate", side_effect=inductor.generate) as generated,
    ):
        found = exchange_here()
        assert found is not None
        counted = Counted(found.store)
        exchange: Any = Exchange(counted, rank, 1.0 if fault == "no file" else 120.0)  # type: ignore[arg-type]
        largest = 10 if fault == "large files" else 4 << 20
        if fault == "no file" and rank // 2 == 0:
            exchange = SimpleNamespace(claim=exchange.claim, take=exchange.take, give=lambda *args: None)
        with (
            mock.patch.object(inductor_cache, "_LARGEST", largest),
            mock.patch.object(inductor, "exchange_here", return_value=exchange),
        ):
            made = dict(inductor.compile_all(regions_from(FIRST, 2), shown.append))
        dist.barrier()
    for n in range(2):
        (result,) = made[f"region_{n}"]([INPUT])
        torch.testing.assert_close(result, compute(FIRST + n, INPUT))
    files = {key: count for key, count in counted.keys.items() if key.endswith(" file")}
    return generated.call_count, files, counted.sent, [told for told in shown if "another machine" in told]


def test_each_region_is_compiled_once(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(4).run(_compile, str(tmp_path))
    assert sum(result[0] for result in results) == 2
    read = sum((Counter(result[1]) for result in results), Counter())
    assert sorted(read.values()) == [1, 1], "one rank of the other machine reads each file"
    files = [sorted(path.name for path in tmp_path.glob(f"machine{n}/graphshard-regions/*")) for n in range(2)]
    assert files[0] == files[1]
    assert len(files[0]) == 2
    again = ranks(4).run(_compile, str(tmp_path))
    assert [result[:3] for result in again] == [(0, {}, 0)] * 4


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["large files", "no file"])
def test_machines_compile_what_they_do_not_get(ranks: Ranks, tmp_path: Path, fault: str) -> None:
    results = ranks(4).run(_compile, str(tmp_path), fault)
    generated = [sum(result[0] for result in results[first : first + 2]) for first in (0, 2)]
    if fault == "large files":
        assert generated == [2, 2]
    else:  # the first machine gets what the second one has compiled
        assert generated[0] <= 2
        assert generated[1] == 2


@pytest.mark.slow
def test_a_directory_in_common_needs_no_store(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "machine0").mkdir()
    (tmp_path / "machine1").symlink_to("machine0")
    results = ranks(4).run(_compile, str(tmp_path))
    assert sum(result[0] for result in results) == 2
    assert not any(result[1] for result in results)


def test_one_machine_has_no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert exchange_here() is None


def test_a_store_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    """The rank compiles by itself."""
    gone = mock.Mock()
    for name in ("compare_set", "set", "check", "get"):
        getattr(gone, name).side_effect = dist.DistError("gone")
    exchange = Exchange(gone, 0)
    assert exchange.claim("a")
    exchange.give("a", b"file")
    assert exchange.take("a") == b""
