"""Who compiles which region: shares of equal size, locks of processes that live, die or hang."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from graphshard.ir.wanted import wanted_while
from graphshard.lower import shares
from graphshard.lower.shares import claims, place_here, shares_of

KEYS = {"region_0": "aa", "region_1": "bb", "region_2": "cc"}
HOLDS = """
import sys, time, filelock
lock = filelock.FileLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


def _holder(path: Path) -> subprocess.Popen[str]:
    """A process that holds a lock."""
    path.parent.mkdir(exist_ok=True)
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_shares_are_about_equal() -> None:
    sizes = {"a": 10, "b": 200, "c": 100, "d": 90, "e": 5}
    assert shares_of(sizes, 2) == [["b", "e"], ["a", "c", "d"]]
    assert shares_of(sizes, 1) == [list(sizes)]


def test_there_are_no_more_shares_than_regions() -> None:
    assert shares_of({"a": 1, "b": 1}, 8) == [["a"], ["b"]]
    assert shares_of({}, 8) == [[]]


def test_the_place_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert place_here() == (3, 8)
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert place_here() == (0, 1)


def test_all_is_claimed_by_a_process_alone(tmp_path: Path) -> None:
    told: list[str] = []
    found = []
    for claim in claims([["region_1"], ["region_0", "region_2"]], KEYS, tmp_path / "locks", told.append):
        with claim:
            found.append(claim.names)
    assert found == [("region_1",), ("region_0", "region_2")]
    assert told == []


def test_what_another_has_taken_comes_last_and_is_waited_for(tmp_path: Path) -> None:
    with _holder(tmp_path / "locks" / "bb.lock") as other:
        told: list[str] = []
        found = []
        try:
            for claim in claims([["region_1", "region_0"], ["region_2"]], KEYS, tmp_path / "locks", told.append):
                with claim:
                    found.append(claim.names)
                if len(found) == 2:
                    assert told == []
                    other.kill()  # it leaves its lock
        finally:
            other.kill()
    assert found == [("region_0",), ("region_2",), ("region_1",)]
    assert told == ["wait for region_1, which another rank compiles"]


def test_no_lock_is_held_while_another_is_waited_for(tmp_path: Path) -> None:
    """Or ranks that have taken what the other needs would wait for ever."""
    locks = tmp_path / "locks"
    with _holder(locks / "bb.lock") as other:
        try:

            def check() -> None:
                for name in ("aa", "cc"):
                    FileLock(locks / f"{name}.lock").acquire(timeout=0).lock.release()
                other.kill()

            with wanted_while(check):
                for claim in claims([["region_0", "region_1", "region_2"]], KEYS, locks, lambda told: None):
                    with claim:
                        pass
        finally:
            other.kill()


def test_a_region_is_released_when_it_is_done(tmp_path: Path) -> None:
    (claim,) = claims([["region_0", "region_1"]], KEYS, tmp_path, lambda told: None)
    with claim:
        claim.release("region_0")
        FileLock(tmp_path / "aa.lock").acquire(timeout=0).lock.release()
        with pytest.raises(TimeoutError):
            FileLock(tmp_path / "bb.lock").acquire(timeout=0)
    FileLock(tmp_path / "bb.lock").acquire(timeout=0).lock.release()


def test_a_process_that_hangs_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shares, "PATIENCE", 0.5)
    with _holder(tmp_path / "locks" / "aa.lock") as other:
        try:
            (claim,) = claims([["region_0"]], KEYS, tmp_path / "locks", lambda told: None)
            with claim:
                assert claim.names == ("region_0",)
        finally:
            other.kill()
    assert "another process has not compiled region_0 in 0.5 s: this one does" in caplog.text


def test_the_wait_ends_when_the_work_is_not_wanted_any_more(tmp_path: Path) -> None:
    def failed() -> None:
        raise RuntimeError("rank 1 has ended")

    with _holder(tmp_path / "locks" / "aa.lock") as other:
        try:
            start = time.monotonic()
            with wanted_while(failed), pytest.raises(RuntimeError, match="rank 1 has ended"):
                list(claims([["region_0"]], KEYS, tmp_path / "locks", lambda told: None))
            assert time.monotonic() - start < 60
        finally:
            other.kill()
