"""What it costs that each rank says how it is doing, and looks at another one, while training goes on.

    python -m benchmarks.watching [--ranks 8 64 512 1024 4096] [--seconds 10]

First what a rank of two computes for one look: milliseconds of its thread's time, in which the step waits for Python's
lock. Then threads with connections of their own to one real TCPStore in another process stand for
all ranks of a job: requests a second, the seconds that the store's process computes in each second, and how far the
looks fall behind.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn

import graphshard
from graphshard.module.sharded_module import ShardedModule
from graphshard.runtime.status import Finding, Process, Status, Step
from graphshard.runtime.watch import Watch
from tests.distributed.twins import world_mesh
from tests.ranks import RankPool

CONNECTIONS = 32


def on_a_rank(rank: int, world_size: int, looks: int) -> float:
    """Seconds that a rank computes for a look, after a few steps of a model."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    graphshard.compile(model, world_mesh(), backend="eager")
    for _ in range(8):
        model(torch.ones(4, 16)).sum().backward()
    assert isinstance(model, ShardedModule)
    peers = model._graphshard.agreement.peers
    assert peers is not None
    watch = Watch(peers, peers._own_store)
    start = time.thread_time()
    for _ in range(looks):
        watch.look(peers)
    return (time.thread_time() - start) / looks


@dataclass
class Simulated:
    """A rank that is always in its thousandth step."""

    rank: int
    ranks: tuple[int, ...]
    findings: list[Finding] = field(default_factory=list)

    def status(self, beat: int) -> Status:
        steps = tuple(Step(number, number, "backward of Llama") for number in range(993, 1001))
        return Status(
            self.rank, Process.this(), steps, "runs backward of Llama", where="/home/me/train.py:100", beat=beat
        )

    def is_current(self) -> bool:
        return True

    def behind(self, other: Status) -> None:
        pass

    def found(self, finding: Finding) -> None:
        self.findings.append(finding)

    def leave(self, why: str) -> None:
        pass


def serve(to_parent: Connection) -> None:
    """A store, in a process of its own, until the other end says that it is enough."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    to_parent.send(store.port)
    while to_parent.recv():
        to_parent.send(time.process_time())


def all_looks(port: int, size: int, seconds: float) -> tuple[float, int]:
    """Let as many ranks look; how late the last look of each was, at most, and how many there were."""
    ranks = tuple(range(size))
    count, late = [0] * CONNECTIONS, [0.0] * CONNECTIONS
    start, finish = threading.Barrier(CONNECTIONS), time.monotonic() + seconds

    def run(first: int) -> None:
        store = dist.PrefixStore(str(size), dist.TCPStore("127.0.0.1", port, is_master=False))
        mine = [Simulated(rank, ranks) for rank in ranks[first::CONNECTIONS]]
        watches = [Watch(peers, store) for peers in mine]
        start.wait()
        due = time.monotonic()
        while due < finish and watches:
            due += watches[0].pause
            for watch, peers in zip(watches, mine, strict=True):
                watch.look(peers)
                count[first] += 1
            late[first] = time.monotonic() - due
            time.sleep(max(0.0, due - time.monotonic()))
        assert not any(peers.findings for peers in mine)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(late), sum(count)


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
    print("ranks | looks a second | store's CPU seconds a second | late by, seconds")
    for size in options.ranks:
        ours.send(True)
        before = ours.recv()
        late, count = all_looks(port, size, options.seconds)
        ours.send(True)
        spent = ours.recv() - before
        print(
            f"{size} | {count / options.seconds:.0f} | {spent / options.seconds:.3f} | {max(late, 0):.2f}", flush=True
        )
    ours.send(False)
    process.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
