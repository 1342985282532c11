"""Cost of each rank's status reports and of its checks of another rank during training.

    python -m benchmarks.watching [--ranks 8 64 512 1024 4096] [--seconds 10]

First the compute of a rank of two for one check: milliseconds of its thread's time, in which the step waits for the
GIL. Then threads with separate connections check one real TCPStore in another process continuously, for 1,024 ranks:
microseconds of the store's process per check, and its share of a core.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import threading
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn

import graphshard
from graphshard.module.compiled_module import CompiledModule
from graphshard.runtime.health_monitor import HealthMonitor, ProcessIdentity, RankStatus, StepRecord, pause_of
from tests.distributed.twins import world_mesh
from tests.ranks import RankPool

CONNECTIONS = 32


def on_a_rank(rank: int, world_size: int, looks: int) -> float:
    """Return the seconds that a rank computes for a check, after a few steps of a model."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    graphshard.compile(model, world_mesh(), backend="eager")
    for _ in range(8):
        model(torch.ones(4, 16)).sum().backward()
    assert isinstance(model, CompiledModule)
    peers = model._graphshard.agreement.peers
    assert peers is not None
    monitor = peers.monitor
    start = time.thread_time()
    for _ in range(looks):
        monitor.look()
    return (time.thread_time() - start) / looks


class Simulated(HealthMonitor):
    """Rank that is always in its thousandth step."""

    def status(self) -> RankStatus:
        steps = tuple(StepRecord(number, number, "backward of Llama") for number in range(993, 1001))
        doing, where = "runs backward of Llama", "/home/me/train.py:100"
        return RankStatus(self.rank, ProcessIdentity.this(), steps, doing, where=where, beat=self._beat)


def serve(to_parent: Connection) -> None:
    """Serve a store in a separate process until the other end closes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    to_parent.send(store.port)
    while to_parent.recv():
        to_parent.send(time.process_time())


def all_looks(port: int, seconds: float) -> int:
    """Let threads check continuously, and return the number of checks."""
    ranks = tuple(range(1024))
    count, start = [0] * CONNECTIONS, threading.Barrier(CONNECTIONS + 1)

    def run(first: int) -> None:
        store = dist.PrefixStore("watching", dist.TCPStore("127.0.0.1", port, is_master=False))
        mine = [Simulated(ranks, rank, store) for rank in ranks[first::CONNECTIONS]]
        start.wait()
        finish = time.monotonic() + seconds
        while time.monotonic() < finish:
            for monitor in mine:
                monitor.look()
                count[first] += 1
        assert all(monitor.finding is None for monitor in mine)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    start.wait()
    for thread in threads:
        thread.join()
    return sum(count)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 1024, 4096])
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    with RankPool() as pool:
        print(f"a look computes {1e3 * pool.world(2).run(on_a_rank, 1000)[0]:.2f} ms")
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    port = ours.recv()
    ours.send(True)
    before = ours.recv()
    count = all_looks(port, options.seconds)
    ours.send(True)
    spent = (ours.recv() - before) / count
    print(f"the store's process computes {1e6 * spent:.0f} us for a look ({count} looks)")
    print("ranks | each looks every, seconds | looks a second | share of a core that the store takes")
    for size in options.ranks:
        pause = pause_of(size)
        print(f"{size} | {pause:.2f} | {size / pause:.0f} | {spent * size / pause:.3f}")
    ours.send(False)
    process.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
