"""What ranks know of each other, at the end of a process."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from graphshard.runtime.standing import Standing
from graphshard.runtime.status import Process, Status
from graphshard.runtime.waiting import SAYS_SO_AFTER
from tests.conftest import FakeWorld

# Whatever is registered first runs last at exit.
SCRIPT = """
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate() if "graphshard" in thread.name]))
import torch.distributed as dist
from graphshard.torch_compat.dtensor import rendezvous_store
from graphshard.runtime.peers import Peers
from graphshard.runtime.waiting import Settings
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
peers = Peers((0, 1), rendezvous_store(), Settings.read())
print([thread.name for thread in threading.enumerate() if "graphshard" in thread.name])
dist.destroy_process_group()
"""


def test_no_thread_is_left_when_the_interpreter_is_taken_down() -> None:
    """Also where the process group has just been destroyed: a thread in C++ would end the process by an abort."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["['graphshard watch']", "[]"], done.stderr
    assert done.returncode == 0


@pytest.fixture
def standing(fake_world: FakeWorld) -> Iterator[Standing]:
    """That of the first of two ranks."""
    fake_world(2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = Standing((0, 1), store, "test")
    yield made
    made.forget()


def test_a_rank_that_waits_for_one_behind_says_so_once(standing: Standing, caplog: pytest.LogCaptureFixture) -> None:
    other = Status(1, Process.this())
    with caplog.at_level(logging.WARNING, "graphshard"):
        standing.begin("Model", "")
        standing.behind(other)
        assert not caplog.messages, "it has only begun"
        standing._since -= SAYS_SO_AFTER + 5
        standing.behind(other)
        standing.behind(other)
    (message,) = caplog.messages
    assert message.startswith(f"rank 0 runs Model in step 1 and has waited {SAYS_SO_AFTER + 5:.0f} s; rank 1")


def test_ranks_that_follow_others_leave_it_to_them(standing: Standing, caplog: pytest.LogCaptureFixture) -> None:
    """They have begun no step of their own since which they could be waiting."""
    with caplog.at_level(logging.WARNING, "graphshard"):
        standing.follow(3)
        standing.doing = "compares programs"
        standing.behind(Status(1, Process.this()))
    assert not caplog.messages
