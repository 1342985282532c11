"""The examples run as users run them: two processes under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ENVIRONMENT

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = str(EXAMPLES / "train_llama.py")
SIZES = ["--layers", 1, "--dim", 16, "--batch", 1, "--seq", 8, "--steps", 4, "--sample", 0, "--backend", "eager"]
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def _run(*command: Any) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, **os.environ}
    argv = [sys.executable, *map(str, command)]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300, check=False)


def _train(folder: Path, *flags: Any) -> dict[str, Any]:
    """Train the example and return its `--json` output."""
    file = folder / "result.json"
    result = _run(*LAUNCHER, EXAMPLE, *SIZES, "--json", file, *flags)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("example") / "checkpoints"


@pytest.fixture(scope="module")
def uninterrupted(checkpoints: Path) -> dict[str, Any]:
    """Return the result of an uninterrupted run."""
    return _train(checkpoints.parent, "--checkpoint", checkpoints, "--save-every", 2)


def _assert_equal_losses(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert (ours["impl"], theirs["impl"]) == ("graphshard", "fsdp2")
    assert ours["losses"] == theirs["losses"]
    assert ours["grad_norms"] == theirs["grad_norms"]
    assert len(set(ours["losses"])) == 4


def test_equals_fsdp2(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    _assert_equal_losses(uninterrupted, _train(tmp_path, "--impl", "fsdp2"))


def test_equals_fsdp2_in_bf16(tmp_path: Path) -> None:
    _assert_equal_losses(*(_train(tmp_path, "--bf16", "--impl", impl) for impl in ("graphshard", "fsdp2")))


def test_resume_repeats_the_losses(uninterrupted: dict[str, Any], checkpoints: Path) -> None:
    """Resumed from the checkpoint of step 2, steps 3 and 4 equal the uninterrupted run."""
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-2", "step-4"]
    (checkpoints / "step-4").rename(checkpoints.parent / "step-4")
    rest = _train(checkpoints.parent, "--checkpoint", checkpoints, "--resume")
    assert rest["first_step"] == 2
    for key in ("losses", "grad_norms"):
        assert rest[key] == uninterrupted[key][2:]


def test_wrong_flag_is_a_usage_error() -> None:
    result = _run(EXAMPLE, "--resume")
    assert result.returncode == 2
    assert "usage: train_llama.py" in result.stderr
    assert "--resume needs --checkpoint DIR" in result.stderr


def test_a_custom_pass() -> None:
    """The pass is printed at its position in the pipeline, and the model trains with it."""
    result = _run(*LAUNCHER, EXAMPLES / "write_a_pass.py")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    (reorder,) = (index for index, line in enumerate(lines) if line.startswith("reorder"))
    assert lines[reorder + 1].startswith("clip-gradients")
    assert "loss" in lines[-1]


def test_a_faulty_pass_is_named() -> None:
    result = _run(*LAUNCHER, EXAMPLES / "write_a_pass.py", "--fault")
    assert result.returncode == 0, result.stdout + result.stderr
    (first,) = (line for line in result.stdout.splitlines() if line.endswith("<-- first"))
    assert first.startswith("scale-by-mistake")
