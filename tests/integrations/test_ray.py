"""Ray Train's `TorchTrainer` with two CPU workers: FSDP2's bits, and training resumes after a failure."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.ray_train import FAILS_AT, STEPS

ROOT = Path(__file__).parents[2]
HAS_RAY = importlib.util.find_spec("ray") is not None
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")]


def _run(folder: Path, *flags: str) -> list[list[dict[str, Any]]]:
    """Return the output of each rank, step by step."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.integrations.ray_train", str(folder), *flags]
    # Paths of Ray's sockets must be short.
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TMPDIR": "/tmp"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [[json.loads((folder / f"rank{rank}-step{s}.json").read_text()) for s in range(STEPS)] for rank in range(2)]


def test_one_of_two_workers_fails(tmp_path: Path) -> None:
    whole, failed = _run(tmp_path / "whole"), _run(tmp_path / "failed", "--fails")
    for before, after in zip(whole, failed, strict=True):
        assert [step["loss"] for step in after] == [step["loss"] for step in before]
        assert [step["began_at"] for step in before] == [0] * STEPS
        assert [step["began_at"] for step in after] == [0] * FAILS_AT + [FAILS_AT] * (STEPS - FAILS_AT)
        assert {step["world_size"] for step in before + after} == {2}
    assert whole[0][0]["loss"] != whole[1][0]["loss"]
