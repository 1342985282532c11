"""Status that a rank reports: another thread reads the position of the main thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from graphshard.runtime.health_monitor import users_line

# Collections let the main thread return from functions while another thread reads their frames.
ASKED = """
import gc, threading, time
from graphshard.runtime.health_monitor import users_line

class Loop:
    def __init__(self): self.me = self
    def __del__(self): time.sleep(1e-4)  # lets the other thread go on

def deep(n):
    return deep(n - 1) + 1 if n else Loop() is None

def ask():
    while not over.is_set():
        Loop()
        files.add(users_line().rpartition(":")[0])

files = set()
for threshold in (3, 11, 50):
    over = threading.Event()
    gc.set_threshold(threshold)
    thread = threading.Thread(target=ask)
    thread.start()
    end = time.monotonic() + 2
    while time.monotonic() < end:
        deep(900)
    over.set()
    thread.join()
assert gc.isenabled()
print(*files)
"""


def test_a_rank_is_not_said_to_be_in_a_library() -> None:
    library = Path(torch.__file__).parents[1] / "networkx" / "algorithms" / "flow" / "preflowpush.py"
    scope: dict[str, Any] = {}
    exec(compile("def discharge(ask): return ask()", str(library), "exec"), scope)
    assert scope["discharge"](users_line).startswith(f"{__file__}:")


@pytest.mark.slow
def test_reading_the_position_of_a_thread_survives_collections(tmp_path: Path) -> None:
    """Before Python 3.12 a collection can free a frame that is becoming an object; the process crashed."""
    script = tmp_path / "train.py"
    script.write_text(ASKED)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(script)]
