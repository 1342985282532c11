"""Cost of comparing programs between ranks: bytes, requests and seconds against the number of ranks.

    python -m benchmarks.agreement [--ranks 8 64 512 1024 4096] [--text-bytes 200000]

Up to 64 threads, each with its own connection to one real TCPStore, stand for several ranks each, which all arrive
before they wait. They meet once with equal texts and once with one rank that differs. `all texts` is the traffic if
every rank reads the text of every other one. The last table is of a text that rank 0 gives to all, with eight ranks on
a machine.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist

from graphshard.runtime import peers
from graphshard.runtime.peers import Rendezvous

CONNECTIONS = 64
HEADER = ("ranks", "differs", "seconds", "bytes sent", "bytes read", "requests/rank", "checks/rank", "all texts, bytes")


@dataclass
class Counted:
    """Connection to a store that counts the traffic of keys and values, without TCP's overhead."""

    store: Any
    sent: int = 0
    read: int = 0
    requests: int = 0
    checks: int = 0
    keys: Counter[str] = field(default_factory=Counter)  # how often each was read

    def set(self, key: str, value: str) -> None:
        self._ask(key, value)
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self._ask(key)
        self.keys[key] += 1
        return self._answer(self.store.get(key))

    def add(self, key: str, amount: int) -> int:
        self._ask(key, "1")
        self.read += 8
        return int(self.store.add(key, amount))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self._ask(key, value)
        return self._answer(self.store.compare_set(key, expected, value))

    def check(self, keys: list[str]) -> bool:
        self.checks += 1
        self.sent += sum(map(len, keys))
        return bool(self.store.check(keys))

    def _ask(self, *parts: str) -> None:
        self.requests += 1
        self.sent += sum(map(len, parts))

    def _answer(self, value: bytes) -> bytes:
        self.read += len(value)
        return value


def tell(first: int, theirs: str, mine: str) -> str:
    return f"the texts of rank {first} and of this one differ"


def meet(counted: Sequence[Counted], texts: Sequence[str]) -> tuple[float, list[str]]:
    """Let a rank for each text meet the others, and return the seconds until the last one knows."""
    ends: list[str] = []
    start = threading.Barrier(len(counted) + 1)

    def run(first: int) -> None:
        mine = range(first, len(texts), len(counted))
        meetings = {rank: Rendezvous(counted[first], "step 1", 0, rank, len(texts)) for rank in mine}  # type: ignore[arg-type]
        start.wait()
        for rank, meeting in meetings.items():
            meeting.join(texts[rank], tell, lambda waited: None)
        ends.extend(meeting.end(lambda waited: None) for meeting in meetings.values())

    threads = [threading.Thread(target=run, args=(first,)) for first in range(len(counted))]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began, ends


def give(counted: Sequence[Counted], size: int, text: str) -> float:
    """Give a text of rank 0 to all ranks, and return the seconds until the last one has it."""
    here = threading.local()
    start = threading.Barrier(len(counted) + 1)

    def run(first: int) -> None:
        start.wait()
        for rank in range(first, size, len(counted)):
            here.machine = f"machine {rank // 8}"
            meeting = Rendezvous(counted[first], "step 1", 0, rank, size)  # type: ignore[arg-type]
            if rank == 0:
                meeting.give(text)
            else:
                assert meeting.take(lambda waited: None) == text

    threads = [threading.Thread(target=run, args=(first,)) for first in range(len(counted))]
    with mock.patch.object(peers, "_machine", side_effect=lambda: here.machine):
        for thread in threads:
            thread.start()
        start.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 1024, 4096])
    parser.add_argument("--text-bytes", type=int, default=200_000)
    options = parser.parse_args()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connections = [dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(CONNECTIONS)]
    text = json.dumps([{}, ["x" * (options.text_bytes - 10)]])
    print(" | ".join(HEADER))
    for size in options.ranks:
        for differs in (False, True):
            texts = [text] * (size - 1) + [text.upper() if differs else text]
            counted = [Counted(dist.PrefixStore(f"{size} {differs}", store)) for store in connections[:size]]
            seconds, ends = meet(counted, texts)
            assert len(ends) == size
            assert {end != "" for end in ends} == {differs}
            row = (
                str(size),
                "one rank" if differs else "none",
                f"{seconds:.3f}",
                f"{sum(c.sent for c in counted):,}",
                f"{sum(c.read for c in counted):,}",
                f"{sum(c.requests for c in counted) / size:.1f}",
                f"{sum(c.checks for c in counted) / size:.1f}",
                f"{size * (size - 1) * len(text):,}",
            )
            print(" | ".join(row), flush=True)
    lines = "".join(f"all-gather block {n // 9} of 126, member {n % 9}, after region {n}\n" for n in range(9999))
    print("ranks | seconds | reads of the text | bytes read")
    for size in options.ranks:
        counted = [Counted(dist.PrefixStore(f"{size} gives", store)) for store in connections[:size]]
        seconds = give(counted, size, lines[: options.text_bytes])
        reads = sum(c.keys["step 1.0 text for all"] for c in counted)
        print(f"{size} | {seconds:.3f} | {reads} | {sum(c.read for c in counted):,}", flush=True)


if __name__ == "__main__":
    main()
