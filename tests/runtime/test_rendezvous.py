"""Rendezvous of ranks: here threads with a real store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.agreement import Counted
from graphshard.errors import PeerError
from graphshard.runtime import peers
from graphshard.runtime.peers import Rendezvous


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def tell(first: int, theirs: str, mine: str) -> str:
    return f"rank {first} says {theirs}, another one {mine}"


def patient(waited: float) -> None:
    assert waited < 30


def each(store: dist.Store, size: int, act: Callable[[Rendezvous], Any]) -> tuple[list[Any], list[Counted]]:
    """Run all ranks concurrently; return their results and requests."""
    assert isinstance(store, dist.TCPStore)
    connections = [dist.TCPStore("127.0.0.1", store.port, is_master=False) for _ in range(size)]
    counted = [Counted(dist.PrefixStore("meeting", connection)) for connection in connections]
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(act, [Rendezvous(own, "step 1", 0, rank, size) for rank, own in enumerate(counted)]))  # type: ignore[arg-type]
    return found, counted


def comes(*texts: str) -> Callable[[Rendezvous], str]:
    def act(meeting: Rendezvous) -> str:
        meeting.join(texts[min(meeting.rank, len(texts) - 1)], tell, patient)
        return meeting.end(patient)

    return act


def test_equal_texts(store: dist.Store) -> None:
    found, counted = each(store, 8, comes("a" * 10_000))
    assert found == [""] * 8
    assert sum(one.sent for one in counted) < 10_000 + 8 * 1000, "one text, and a hash for each rank"
    assert sum(one.read for one in counted) < 8 * 200
    assert sum(one.requests for one in counted) == 3 * 8 + 2, "the first one leaves its text, the last one ends it"


def test_a_different_text(store: dist.Store) -> None:
    """All ranks learn which one, and texts are compared once."""
    found, counted = each(store, 8, comes("a" * 10_000, "a" * 10_000, "b" * 10_000, "a" * 10_000))
    assert len(set(found)) == 1
    assert found[0].count("a" * 10_000) == found[0].count("b" * 10_000) == 1
    assert sum(one.requests for one in counted) <= 4 * 8


@pytest.mark.slow
def test_texts_are_sent_once(store: dist.Store) -> None:
    def act(meeting: Rendezvous) -> str:
        meeting.join(str(meeting.rank) * 10_000, lambda *_: "no two are the same", patient)
        return meeting.end(patient)

    found, counted = each(store, 8, act)
    assert set(found) == {"no two are the same"}
    assert 10_000 <= sum(one.sent for one in counted) < 10_000 + 8 * 1000
    assert 10_000 <= sum(one.read for one in counted) < 10_000 + 8 * 1000


def test_one_rank_fails(store: dist.Store) -> None:
    """Waiting ranks, for others or for data, learn the reason at any rendezvous of the step."""

    def act(meeting: Rendezvous) -> Any:
        if meeting.rank == 0:
            return replace(meeting, number=5).fail("no capture")
        with pytest.raises(PeerError, match="no capture") as caught:
            meeting.take(patient) if meeting.rank == 1 else comes("a")(replace(meeting, number=1))
        return caught.value.rank

    assert each(store, 3, act)[0][1:] == [0] * 2


def test_one_rank_sends_a_text(store: dist.Store) -> None:
    def act(meeting: Rendezvous) -> Any:
        return meeting.give("a plan") if meeting.rank == 0 else meeting.take(patient)

    assert each(store, 3, act)[0][1:] == ["a plan"] * 2


def _take_on(machines: int, plan: str) -> Callable[[Rendezvous], Any]:
    """Let ranks take a text, as many on each machine."""

    def act(meeting: Rendezvous) -> Any:
        if meeting.rank == 0:
            return meeting.give(plan)
        machine.name = f"node {meeting.rank % machines}"
        return meeting.take(patient)

    return act


machine = threading.local()


def test_a_text_leaves_the_store_once_for_each_machine(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks of a machine read a file; a plan is text that repeats itself."""
    monkeypatch.setattr(peers, "_machine", lambda: machine.name)
    plan = "".join(f"all-gather block {n} of 126 after matmul {n % 7}\n" for n in range(7000))
    found, counted = each(store, 33, _take_on(4, plan))
    assert found[1:] == [plan] * 32
    read = sum((one.keys for one in counted), Counter())
    assert read["step 1.0 text for all"] == 4
    assert max(count for key, count in read.items() if "given" not in key) == 7  # the path of the file
    assert sum(one.read for one in counted) < 4 * len(plan) / 4 + 32 * 300
    assert max(one.requests for one in counted[1:]) == 4


@pytest.mark.parametrize("fault", ["no file", "another file", "no directory"])
def test_ranks_without_the_file_read_the_store(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    monkeypatch.setattr(peers, "_machine", lambda: "node")
    (tmp_path / "changed").write_bytes(b"another text")
    paths = {"no file": "/nowhere", "another file": str(tmp_path / "changed")}
    if fault in paths:
        monkeypatch.setattr(peers, "_copy_of", lambda content: paths[fault])
    else:
        monkeypatch.setattr(peers, "_copies", lambda: SimpleNamespace(name=str(tmp_path / "missing")))
    found, counted = each(store, 4, _take_on(1, "a plan"))
    assert found[1:] == ["a plan"] * 3
    assert sum(one.keys["step 1.0 text for all"] for one in counted) == 3


def test_waiting_can_be_cancelled(store: dist.Store) -> None:
    def impatient(waited: float) -> None:
        if waited > 0.2:
            raise TimeoutError(f"waited for {waited:.1f} s")

    meeting = Rendezvous(store, "step 1", 0, 0, 2)
    meeting.join("a", tell, impatient)
    with pytest.raises(TimeoutError, match=r"waited for 0\.[23] s"):
        meeting.end(impatient)


def test_the_largest_number(store: dist.Store) -> None:
    """All ranks know it when all have arrived, in any order."""

    def act(meeting: Rendezvous) -> int:
        meeting.raise_to(10 - abs(5 - meeting.rank))
        comes("")(meeting)
        return meeting.most()

    assert each(store, 8, act)[0] == [10] * 8
