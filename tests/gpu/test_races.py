"""Part "races" of `tests/gpu/run.sh` on a CPU: late collectives have the same bits, and find what would be a race."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import races
from benchmarks.gpu.table import Row
from tests.ranks import Ranks


def _trained(rank: int, world_size: int, late: bool) -> list[Any]:
    return races.trained(rank, world_size, "cpu", "gloo", late=late, offload=False)


def test_late_collectives_have_the_same_bits(ranks: Ranks) -> None:
    found = [ranks(2).run(_trained, late) for late in (True, False)]
    row = races.compared(*found, Row("races"))
    assert not row.failed, row
    assert "6 losses" not in row.note
    assert ", 0 differ; " in row.note
    assert found[0][0][2] > 3 * races.STEPS


def _raced(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Return gathers of ranks: waited for, read too early, and of an input that was written too early."""
    group = races.late_group("gloo")
    found = {}
    for name in ("waited", "read early", "written early"):
        shard, full = torch.full((2,), float(rank)), torch.zeros(4)
        work = dist.all_gather_into_tensor(full, shard, group=group, async_op=True)
        if name == "written early":
            shard.fill_(7.0)
        early = full.clone()
        work.wait()
        found[name] = early if name == "read early" else full
    total = torch.full((2,), float(rank))
    dist.all_reduce(total, group=group)
    return {**found, "sum": total}


def test_races_change_the_numbers(ranks: Ranks) -> None:
    for found in ranks(2).run(_raced):
        assert found["waited"].tolist() == [0, 0, 1, 1]
        assert found["read early"].isnan().all()
        assert found["written early"].tolist() == [7, 7, 7, 7]
        assert found["sum"].tolist() == [1, 1]


def test_another_bit_fails() -> None:
    usual = [[[1.0], [torch.ones(2)], 0]]
    assert not races.compared([[[1.0], [torch.ones(2)], 5]], usual, Row("races")).failed
    for late in ([[1.5], [torch.ones(2)], 5], [[1.0], [torch.zeros(2)], 5], [[1.0], [torch.ones(2)], 0]):
        assert races.compared([late], usual, Row("races")).failed


def test_launches_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective follows a kernel that sleeps, on a stream that follows compute; free blocks are filled before."""
    log: list[str] = []
    blocks = [{"size": 2048, "state": state} for state in ("inactive", "active_allocated", "inactive")]
    late = SimpleNamespace(wait_stream=lambda other: log.append(f"late waits for {other}"))
    cuda = SimpleNamespace(
        memory_snapshot=lambda: [{"blocks": blocks}],
        current_stream=lambda: "compute",
        Stream=lambda: late,
        stream=lambda stream: contextlib.nullcontext(),
        _sleep=lambda cycles: log.append(f"sleeps {cycles}"),
    )
    monkeypatch.setattr(races.torch, "cuda", cuda)
    filled: list[int] = []
    monkeypatch.setattr(races, "_fill", lambda tensors: filled.extend(tensor.nbytes for tensor in tensors))
    group = races.LateGroup(_Inner())  # type: ignore[arg-type]
    out = torch.zeros(4)
    assert group._launch_on_gpu(lambda *_: log.append("runs") or "work", [out], out, (torch.zeros(2), None)) == "work"
    assert log == ["late waits for compute", "sleeps 10000000", "runs"]
    assert filled == [2048, 2048, 16]


class _Inner:
    rank = staticmethod(lambda: 0)
    size = staticmethod(lambda: 2)


@pytest.mark.slow
def test_part_on_a_cpu() -> None:
    """Also the subprocess, in the sanitizer's mode."""
    rows: list[Row] = []
    races.measure(races.Setup.of(dry=True), rows.append)
    assert [row.setting for row in rows] == ["2 ranks", "2 ranks", "one rank"]
    assert not [row for row in rows if row.failed]
