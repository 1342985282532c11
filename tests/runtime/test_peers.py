"""What ranks know of each other, at the end of a process."""

from __future__ import annotations

import subprocess
import sys

# Whatever is registered first runs last at exit.
SCRIPT = """
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate() if "graphshard" in thread.name]))
import torch.distributed as dist
from graphshard.ir.distributed_internals import rendezvous_store
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
