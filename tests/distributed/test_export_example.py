"""`examples/export_and_load.py`, run as by a new user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_ranks_train_from_the_exported_file(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples" / "export_and_load.py", "--backend", "eager", "--out", "llama.gshard"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    small = ["--layers", "1", "--dim", "32", "--seq", "8", "--steps", "2"]
    done = subprocess.run(
        [*command, *small], cwd=tmp_path, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=600
    )
    lines = done.stdout.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["exported", "load:", "compile:", "losses", "the"], lines
    assert lines[3] == "losses are equal: True"
    assert [path.name for path in tmp_path.iterdir()] == ["llama.gshard"]
