"""torchft averages over groups that come and go: the bits of FSDP2, and a lost group recovers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.twins import assert_same
from tests.integrations.torchft_train import BACK_AT, FAILS_AT, GROUPS, RANKS, STEPS

ROOT = Path(__file__).parents[2]
HAS_TORCHFT = importlib.util.find_spec("torchft") is not None
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_TORCHFT, reason="torchft is not installed")]


def _run(folder: Path, implementation: str, *flags: str) -> None:
    command = [sys.executable, "-m", "tests.integrations.torchft_train", str(folder), implementation, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def _steps(folder: Path, group: int, rank: int) -> dict[int, dict[str, Any]]:
    files = {step: folder / f"{group}-{rank}-{step}.json" for step in range(STEPS)}
    return {step: json.loads(file.read_text()) for step, file in files.items() if file.exists()}


def _values(folder: Path, group: int, rank: int) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"{group}-{rank}.pt", weights_only=True)


def test_two_groups_match_fsdp2(tmp_path: Path) -> None:
    for implementation in ("graphshard", "fsdp2"):
        _run(tmp_path / implementation, implementation)
    for group in range(GROUPS):
        for rank in range(RANKS):
            ours, theirs = (_steps(tmp_path / folder, group, rank) for folder in ("graphshard", "fsdp2"))
            assert ours == theirs
            assert list(ours) == list(range(STEPS))
            assert all(step["groups"] == GROUPS and step["committed"] for step in ours.values())
            assert_same(*(_values(tmp_path / folder, group, rank) for folder in ("graphshard", "fsdp2")), "at the end")
    assert _steps(tmp_path / "graphshard", 0, 0)[0]["loss"] != _steps(tmp_path / "graphshard", 1, 0)[0]["loss"]


def test_a_lost_group_recovers(tmp_path: Path) -> None:
    """The other group continues and provides its state."""
    _run(tmp_path, "graphshard", "--fails")
    for rank in range(RANKS):
        stayed, lost = (_steps(tmp_path, group, rank) for group in range(GROUPS))
        assert list(stayed) == list(range(STEPS))
        assert [stayed[step]["groups"] for step in range(FAILS_AT)] == [GROUPS] * FAILS_AT
        alone = range(FAILS_AT, BACK_AT)
        assert [stayed[step]["groups"] for step in alone] == [1] * len(alone)
        assert not lost.keys() & set(alone)
        assert stayed[STEPS - 1]["groups"] == lost[STEPS - 1]["groups"] == GROUPS
    for rank in range(RANKS):
        assert_same(_values(tmp_path, 0, 0), _values(tmp_path, 1, rank), "at the end")
