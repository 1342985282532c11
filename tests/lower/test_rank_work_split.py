"""Which process compiles which region: equal shares, and locks of processes that live, die or hang."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from graphshard.ir.program import Region
from graphshard.lower import inductor
from graphshard.lower.eager import compile_operators
from graphshard.lower.inductor_cache import Claim, Claims, place_here, shares_of
from graphshard.lower.regions import Boxed
from graphshard.utils.progress import cancelled_by
from tests.lower.small_regions import regions_from

KEYS = {"region_0": "aa", "region_1": "bb", "region_2": "cc"}
HOLDS = """
import sys, time, filelock
lock = filelock.FileLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


def claims(
    shares: list[list[str]], directory: Path, show: Callable[[str], None] = lambda told: None
) -> Iterator[Claim]:
    """Yield all claims, one after the other."""
    found = Claims(shares, KEYS, directory, show)
    yield from found.free()
    yield from found.others()


def _holder(path: Path) -> subprocess.Popen[str]:
    """Start a process that holds a lock."""
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


def test_position_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert place_here() == (3, 8)
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert place_here() == (0, 1)


def test_a_single_process_claims_everything(tmp_path: Path) -> None:
    told: list[str] = []
    found = []
    for claim in claims([["region_1"], ["region_0", "region_2"]], tmp_path / "locks", told.append):
        with claim:
            found.append(claim.names)
    assert found == [("region_1",), ("region_0", "region_2")]
    assert told == []


def test_regions_of_others_come_last_and_are_waited_for(tmp_path: Path) -> None:
    with _holder(tmp_path / "locks" / "bb.lock") as other:
        told: list[str] = []
        found = []
        try:
            for claim in claims([["region_1", "region_0"], ["region_2"]], tmp_path / "locks", told.append):
                with claim:
                    found.append(claim.names)
                if len(found) == 2:
                    assert told == []
                    other.kill()  # its lock file remains
        finally:
            other.kill()
    assert found == [("region_0",), ("region_2",), ("region_1",)]
    assert told == ["wait for region_1, which another rank compiles"]


def test_holds_no_lock_while_waiting(tmp_path: Path) -> None:
    """Otherwise ranks that hold each other's regions would deadlock."""
    locks = tmp_path / "locks"
    with _holder(locks / "bb.lock") as other:
        try:

            def check() -> None:
                for name in ("aa", "cc"):
                    FileLock(locks / f"{name}.lock").acquire(timeout=0).lock.release()
                other.kill()

            with cancelled_by(check):
                for claim in claims([["region_0", "region_1", "region_2"]], locks):
                    with claim:
                        pass
        finally:
            other.kill()


def test_a_region_is_released_when_it_is_done(tmp_path: Path) -> None:
    (claim,) = claims([["region_0", "region_1"]], tmp_path)
    with claim:
        claim.release("region_0")
        FileLock(tmp_path / "aa.lock").acquire(timeout=0).lock.release()
        with pytest.raises(TimeoutError):
            FileLock(tmp_path / "bb.lock").acquire(timeout=0)
    FileLock(tmp_path / "bb.lock").acquire(timeout=0).lock.release()


def test_does_not_wait_forever_for_a_hanging_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("graphshard.lower.inductor_cache.PATIENCE", 0.5)
    with _holder(tmp_path / "locks" / "aa.lock") as other:
        try:
            (claim,) = claims([["region_0"]], tmp_path / "locks")
            with claim:
                assert claim.names == ("region_0",)
        finally:
            other.kill()
    assert "another process has not compiled region_0 in 0.5 s: this one does" in caplog.text


def test_the_wait_ends_on_cancellation(tmp_path: Path) -> None:
    def failed() -> None:
        raise RuntimeError("rank 1 has ended")

    with _holder(tmp_path / "locks" / "aa.lock") as other:
        try:
            start = time.monotonic()
            with cancelled_by(failed), pytest.raises(RuntimeError, match="rank 1 has ended"):
                list(claims([["region_0"]], tmp_path / "locks"))
            assert time.monotonic() - start < 60
        finally:
            other.kill()


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record what `compile_all` does as the first of three ranks on a machine, without compiling."""
    found: list[str] = []

    def generate(region: Region, name: str, batch: object) -> Callable[[], Boxed]:
        found.append(f"generate {name}")
        return lambda: found.append(f"load {name}") or compile_operators(region)  # type: ignore[func-returns-value]

    monkeypatch.setattr(inductor, "generate", generate)
    monkeypatch.setattr(inductor, "place_here", lambda: (0, 3))
    monkeypatch.setattr(inductor, "cores_here", lambda: 3)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return found


def test_code_generation_overlaps_compilation(events: list[str]) -> None:
    made = dict(inductor.compile_all(regions_from(30100, 3), lambda told: None))
    assert sorted(made) == ["region_0", "region_1", "region_2"]
    assert events == [
        *("generate region_0", "generate region_1", "load region_0"),
        *("generate region_2", "load region_1", "load region_2"),
    ]


def test_loads_and_releases_before_waiting(events: list[str], tmp_path: Path) -> None:
    regions = regions_from(30200, 3)
    locks = {name: tmp_path / "graphshard-locks" / f"{region.key}.lock" for name, region in regions.items()}
    with _holder(locks["region_1"]) as other:
        told: list[str] = []

        def show(line: str) -> None:
            told.append(line)
            if line.startswith("wait"):
                assert events[2:] == ["load region_0", "load region_2"]
                for name in ("region_0", "region_2"):
                    FileLock(locks[name]).acquire(timeout=0).lock.release()
                other.kill()

        try:
            made = dict(inductor.compile_all(regions, show))
        finally:
            other.kill()
    assert "wait for region_1, which another rank compiles" in told
    assert sorted(made) == ["region_0", "region_1", "region_2"]
    assert events[-2:] == ["generate region_1", "load region_1"]
