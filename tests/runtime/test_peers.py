"""Threads and messages of the health monitor, also at interpreter exit."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch.distributed as dist

from graphshard.runtime.health_monitor import WARNS_AFTER, HealthMonitor, ProcessIdentity, RankStatus

# The first registered function runs last at exit.
SCRIPT = """
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate() if "graphshard" in thread.name]))
import torch.distributed as dist
from graphshard.torch_compat.dtensor import rendezvous_store
from graphshard.runtime.peers import Peers
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
peers = Peers((0, 1), rendezvous_store(), False, 600.0)
print([thread.name for thread in threading.enumerate() if "graphshard" in thread.name])
dist.destroy_process_group()
"""


def test_no_thread_remains_at_interpreter_exit() -> None:
    """Also right after the process group is destroyed: a C++ thread would abort the process."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["['graphshard watch']", "[]"], done.stderr
    assert done.returncode == 0


@pytest.fixture
def monitor() -> HealthMonitor:
    """Create the monitor of the first of two ranks, without its thread."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return HealthMonitor((0, 1), 0, store)


def test_a_rank_warns_once_about_a_late_rank(monitor: HealthMonitor, caplog: pytest.LogCaptureFixture) -> None:
    other = RankStatus(1, ProcessIdentity.this())
    with caplog.at_level(logging.WARNING, "graphshard"):
        monitor.begin("Model", "")
        monitor.warn_if_behind(other)
        assert not caplog.messages, "it has only begun"
        monitor._step_began -= WARNS_AFTER + 5
        monitor.warn_if_behind(other)
        monitor.warn_if_behind(other)
    (message,) = caplog.messages
    assert message.startswith(f"rank 0 runs Model in step 1 and has waited {WARNS_AFTER + 5:.0f} s; rank 1")


def test_following_ranks_do_not_warn(monitor: HealthMonitor, caplog: pytest.LogCaptureFixture) -> None:
    """They have started no step since then in which they could wait."""
    with caplog.at_level(logging.WARNING, "graphshard"):
        monitor.follow(3)
        monitor.doing = "compares programs"
        monitor.warn_if_behind(RankStatus(1, ProcessIdentity.this()))
    assert not caplog.messages
