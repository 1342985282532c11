"""Threads and messages of the health monitor, also at interpreter exit."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from graphshard.errors import PeerError
from graphshard.runtime.health_monitor import (
    MAKES,
    WARNS_AFTER,
    WARNS_WHILE_COMPILING,
    Finding,
    HealthMonitor,
    ProcessIdentity,
    RankStatus,
)

# The first registered function runs last at exit.
START = """
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate() if "graphshard" in thread.name]))
import torch.distributed as dist
from graphshard.torch_compat.dtensor import rendezvous_store
from graphshard.runtime.peers import Peers
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
"""
ENDS = """
peers = Peers((0, 1), rendezvous_store(), False, 600.0)
print([thread.name for thread in threading.enumerate() if "graphshard" in thread.name])
dist.destroy_process_group()
"""
MEETS_ALONE = """
import json, zlib
from graphshard.runtime.health_monitor import ProcessIdentity, RankStatus, StepRecord
peers = Peers((0, 1), rendezvous_store(), True, 0.6)
steps = (StepRecord(1, zlib.crc32(b"forward\\ngather"), "forward"),)
peers._store.set("1", json.dumps(RankStatus(1, ProcessIdentity.this(), steps)))
with peers.step("forward", "gather"):
    pass
"""


def test_no_thread_remains_at_interpreter_exit() -> None:
    """Also right after the process group is destroyed: a C++ thread would abort the process."""
    done = subprocess.run([sys.executable, "-c", START + ENDS], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["['graphshard watch']", "[]"], done.stderr
    assert done.returncode == 0


def test_a_rank_that_meets_alone_gives_up() -> None:
    """GRAPHSHARD_CHECK is set on this rank only, and the other one has started the step."""
    done = subprocess.run([sys.executable, "-c", START + MEETS_ALONE], capture_output=True, text=True, timeout=300)
    assert (
        "PeerError: rank 0 runs forward and has waited 1 s for rank 1: rank 1 is in the user's program, after 1 steps."
        in done.stderr
    )


@pytest.fixture
def monitor() -> HealthMonitor:
    """Create the monitor of the first of two ranks, without its thread."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return HealthMonitor((0, 1), 0, store)


def test_a_rank_warns_once_about_a_late_rank(monitor: HealthMonitor, caplog: pytest.LogCaptureFixture) -> None:
    other = RankStatus(1, ProcessIdentity.this())
    with caplog.at_level(logging.WARNING, "graphshard"):
        monitor.begin("Model", "")
        monitor.warn_if_late(other)
        assert not caplog.messages, "it has only begun"
        monitor._began -= WARNS_AFTER + 5
        monitor.warn_if_late(other)
        monitor.warn_if_late(other)
    (message,) = caplog.messages
    assert message.startswith(f"rank 0 runs Model in step 1 and has waited {WARNS_AFTER + 5:.0f} s for rank 1: rank 1")


def test_a_rank_that_compiles_is_not_late(monitor: HealthMonitor, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks share compilation, so each waits for others at a cold start."""
    other = RankStatus(1, ProcessIdentity.this(), doing=f"{MAKES} of Model (first call)")
    with caplog.at_level(logging.WARNING, "graphshard"):
        monitor.doing = other.doing
        monitor.wait_at("1.0")
        monitor._began -= WARNS_AFTER + 5
        monitor.warn_if_late(other)
        assert not caplog.messages
        monitor._began -= WARNS_WHILE_COMPILING
        monitor.warn_if_late(other)
    assert "makes a program of Model" in caplog.text


def test_following_ranks_do_not_warn(monitor: HealthMonitor, caplog: pytest.LogCaptureFixture) -> None:
    """They have started no step since then in which they could wait."""
    with caplog.at_level(logging.WARNING, "graphshard"):
        monitor.follow(3)
        monitor.doing = "compares programs"
        monitor.warn_if_late(RankStatus(1, ProcessIdentity.this()))
    assert not caplog.messages


def _start_and_wait(thread: threading.Thread) -> None:
    thread.start()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        time.sleep(0.01)


def test_a_launched_step_runs_until_the_device_has_completed_it(
    monitor: HealthMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    """Then a finding about a later step says nothing; before, the main thread gets the error where it waits."""
    done = threading.Event()
    ended = Finding("ended", 1, 2, "rank 1 has ended, after 1 steps.")
    with caplog.at_level(logging.WARNING, "graphshard"):
        monitor.begin("forward of Net (gather: 2)", "")
        monitor.end(lambda: True)
        monitor._found(ended)
        assert not caplog.messages
        monitor.end(done.is_set)
        monitor._found(ended)
        assert not monitor.aborted, "rank 1 has launched it, too"
        monitor._found_at -= 10
        thread = threading.Thread(target=monitor._found, args=(ended,))
        with pytest.raises(PeerError, match=r"rank 1 has ended, .* Rank 0 runs forward of Net .*, in step 1"):
            _start_and_wait(thread)
        thread.join()
    assert monitor.aborted
    (line,) = caplog.messages
    assert "Rank 0 runs forward of Net (gather: 2), in step 1." in line


def test_a_rank_that_stands_still_is_an_error_while_the_host_waits(
    monitor: HealthMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    other = RankStatus(1, ProcessIdentity.this())
    with caplog.at_level(logging.WARNING, "graphshard"):
        monitor.begin("forward of Net (gather: 2)", "")
        monitor._began -= WARNS_AFTER + 1
        monitor.end(lambda: False)
        monitor.warn_if_late(other)
        monitor.warn_if_late(other)
    (line,) = caplog.messages
    assert line.startswith("rank 0 runs forward of Net (gather: 2) in step 1 and has waited 5 s for rank 1: rank 1 is")
