"""Killing ranks while they save checkpoints loses nothing. `python -m benchmarks.kills` does it 200 times."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_nothing_is_lost_when_ranks_are_killed() -> None:
    # In a separate process, because the ranks are forks.
    command = [sys.executable, "-m", "benchmarks.kills", "--kills", "8", "--seed", "3"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=Path(__file__).parents[2])
    assert run.returncode == 0, run.stdout + run.stderr
    (told,) = re.findall(
        r"^8 kills: (\d+) steps trained, step (\d+) saved last, 0 faults; (\d+) times", run.stdout, re.M
    )
    trained, saved, _ = map(int, told)
    assert trained >= saved > 0
