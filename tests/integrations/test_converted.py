"""Converted training scripts that were written for FSDP2 print the same losses with `--impl fsdp2`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import ENVIRONMENT

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SMALL = ["--backend", "eager", "--layers", "2", "--dim", "16", "--batch", "2"]


def _train(script: str, folder: Path, *flags: Any) -> dict[str, Any]:
    """Run a script and return its `--json` output."""
    file = folder / "losses.json"
    command = [*LAUNCHER, str(EXAMPLES / script), *SMALL, "--json", str(file), *map(str, flags)]
    result = subprocess.run(
        command, env={**ENVIRONMENT, **os.environ}, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(file.read_text())


def test_gpt(tmp_path: Path) -> None:
    """Losses, validation, norms and saved weights, with accumulation, dropout, tied embeddings and two groups."""
    seen, weights = [], []
    for impl in ("graphshard", "fsdp2"):
        flags = ["--impl", impl, "--steps", 4, "--evaluate-every", 2, "--save", tmp_path / f"{impl}.pt"]
        seen.append(_train("train_gpt.py", tmp_path, *flags))
        weights.append(torch.load(tmp_path / f"{impl}.pt"))
    ours, theirs = seen
    assert ours == theirs
    assert len(set(ours["train"])) == 4
    assert len(set(ours["validation"])) == 2
    assert list(weights[0]) == list(weights[1])
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())


def test_fsdp2_example(tmp_path: Path) -> None:
    """Three steps of FSDP2 equal the first three of five; the other two resume from its file."""
    flags, folder = ["--prefetch", "--mixed-precision"], tmp_path / "run"
    theirs = _train("train_fsdp2.py", tmp_path, "--impl", "fsdp2", "--steps", 3, *flags, "--checkpoint", folder)
    ours = _train("train_fsdp2.py", tmp_path, "--steps", 5, *flags)
    assert len(set(ours["losses"])) == 5
    rest = _train("train_fsdp2.py", tmp_path, "--steps", 2, *flags, "--checkpoint", folder)
    assert (theirs["first"], rest["first"]) == (0, 3)
    for key in ("losses", "norms"):
        assert ours[key] == theirs[key] + rest[key]
    assert sorted(path.name for path in folder.iterdir()) == ["00000003.pt", "00000005.pt"]


def test_mixture_of_experts(tmp_path: Path) -> None:
    """Experts distributed to two ranks, with a grouped matmul in bfloat16: FSDP2's losses."""
    ours, theirs = (_train("train_moe.py", tmp_path, "--impl", impl, "--steps", 4) for impl in ("graphshard", "fsdp2"))
    assert ours == theirs
    assert len(set(ours["losses"])) == 4
