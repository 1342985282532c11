"""Elastic jobs on three torchrun nodes: when the number of ranks changes, training resumes from a checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.utils.distributed import get_free_port

from tests.ranks import ENVIRONMENT

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"
SIZES = ["--layers", "1", "--dim", "16", "--batch", "1", "--seq", "8", "--backend", "eager"]
# Short timeouts: lost nodes are detected soon, and ranks do not wait for more nodes than exist.
RENDEZVOUS = "last_call_timeout=3,keep_alive_interval=3,keep_alive_max_attempt=5,join_timeout=120"


class Job:
    """Nodes that train and write to a folder."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self._folder, self._flags, self._port = folder, flags, get_free_port()
        self.nodes: list[subprocess.Popen[bytes]] = []

    def start_node(self) -> subprocess.Popen[bytes]:
        """Start one more node with one rank."""
        launcher = ["--nnodes", "1:3", "--nproc-per-node", "1", "--max-restarts", "100", "--monitor-interval", "0.2"]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self._port}", "--rdzv-conf", RENDEZVOUS]
        flags = [*SIZES, "--folder", str(self._folder), "--steps", "100000", "--save-every", "3", *self._flags]
        node = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *launcher, *rendezvous, str(EXAMPLE), *flags],
            env={**ENVIRONMENT, **os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            start_new_session=True,
            stdout=subprocess.DEVNULL,
        )
        self.nodes.append(node)
        return node

    def steps(self) -> list[dict[str, Any]]:
        """Return the steps reported so far."""
        file = self._folder / "steps.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for(self, what: str, holds: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Wait until a condition on the steps holds."""
        end = time.monotonic() + 240
        while not holds(self.steps()):
            assert time.monotonic() < end, f"no {what} after {self.steps()[-3:]}"
            assert any(node.poll() is None for node in self.nodes), f"all nodes have ended before {what}"
            time.sleep(0.1)


@contextlib.contextmanager
def job(folder: Path, *flags: str) -> Iterator[Job]:
    """Run a job and kill all nodes at the end."""
    running = Job(folder, list(flags))
    try:
        yield running
    finally:
        for node in running.nodes:
            kill(node)


def kill(node: subprocess.Popen[bytes]) -> None:
    """Kill a node as if its machine lost power."""
    with contextlib.suppress(psutil.NoSuchProcess):  # torchrun starts its ranks in separate sessions
        launcher = psutil.Process(node.pid)
        for process in (launcher, *launcher.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    node.wait()


def _train_on_a_changing_number_of_ranks(folder: Path, *flags: str) -> list[dict[str, Any]]:
    with job(folder, *flags) as running:
        running.start_node()
        running.start_node()
        running.wait_for("steps on 2 ranks", lambda steps: sum(s["ranks"] == 2 for s in steps) >= 4)
        third = running.start_node()
        running.wait_for("steps on 3 ranks", lambda steps: sum(s["ranks"] == 3 for s in steps) >= 4)
        kill(third)
        running.wait_for("steps on 2 ranks again", lambda steps: [s["ranks"] for s in steps[-4:]] == [2] * 4)
    return running.steps()


def _assert_one_run(steps: list[dict[str, Any]]) -> None:
    """Check that no step is skipped, that restarts only repeat steps after a checkpoint, and that losses agree."""
    sizes = [size for i, size in enumerate(s["ranks"] for s in steps) if i == 0 or size != steps[i - 1]["ranks"]]
    # A node may be alone until another joins.
    assert [size for size in sizes if size > 1] == [2, 3, 2]
    for before, after in itertools.pairwise(steps):
        assert before["step"] - 3 <= after["step"] <= before["step"] + 1
    losses: dict[int, float] = {}
    for each in steps:
        assert losses.setdefault(each["step"], each["loss"]) == pytest.approx(each["loss"], rel=1e-3)
    assert losses[max(losses)] < losses[1]


def test_two_ranks_then_three_then_two(tmp_path: Path) -> None:
    """Ranks compile again each time."""
    steps = _train_on_a_changing_number_of_ranks(tmp_path)
    _assert_one_run(steps)


def test_an_artifact_serves_every_number_of_ranks(tmp_path: Path) -> None:
    """The same with programs exported before."""
    artifact = tmp_path / "elastic.gshard"
    command = [sys.executable, str(EXAMPLE), *SIZES, "--export", str(artifact)]
    subprocess.run(command, env={**ENVIRONMENT, **os.environ}, check=True, timeout=300)
    _assert_one_run(_train_on_a_changing_number_of_ranks(tmp_path / "run", "--artifact", str(artifact)))
