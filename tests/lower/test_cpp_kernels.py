"""Kernels of several regions compiled together have the code and bits of separate ones, whatever fails."""

from __future__ import annotations

import os
import pkgutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from filelock import FileLock

from graphshard.lower import _batch_compile, inductor
from graphshard.lower._batch_compile import Batch, Pending
from graphshard.lower.inductor import compile_all
from graphshard.lower.inductor_cache import check_whole, damage_of
from graphshard.lower.region_store import Store
from graphshard.lower.regions import compile_seconds
from graphshard.utils.progress import cancelled_by
from tests.lower.small_regions import INPUT, compile_inductor, compute, regions_from, values


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty Inductor cache and no region store."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(inductor, "store_here", lambda: Store(None))


def _counted() -> Any:
    """Count the compiler runs by graphshard."""
    run = _batch_compile.Compilers.run
    return mock.patch.object(_batch_compile.Compilers, "run", autospec=True, side_effect=run)


def _inductors() -> Any:
    """Count the compiler runs by Inductor."""
    CppBuilder = pkgutil.resolve_name("torch._inductor.cpp_builder.CppBuilder")
    return mock.patch.object(CppBuilder, "build", autospec=True, side_effect=CppBuilder.build)


@pytest.mark.slow
def test_regions_are_compiled_together(tmp_path: Path) -> None:
    """Code and bits equal separate compilation."""
    regions = regions_from(1000, 3)
    compile_inductor(regions_from(900, 1)["region_0"], "warm")  # prepares the CPU query
    with _counted() as runs, _inductors() as inductors:
        made = dict(compile_all(regions, lambda told: None))
    assert runs.call_count == 1
    assert inductors.call_count == 0
    assert min(compile_seconds.pop(region.key) for region in regions.values()) > 0.01, "code of each is generated"
    _batch_compile.CppPythonBindingsCodeCache.cache_clear()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "another")  # the fixture restores it
    with mock.patch.object(_batch_compile, "compile_together"), _inductors() as inductors:
        alone = {name: compile_inductor(region, name) for name, region in regions.items()}
    assert inductors.call_count >= 3
    for name, fn in made.items():
        assert _without_paths(fn) == _without_paths(alone[name])
    for one, other in zip(values(made), values(alone), strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(values(made), [compute(1000 + n, INPUT) for n in range(3)])


def _without_paths(fn: Any) -> str:
    return "\n".join(line for line in fn.source_code.splitlines() if "#include" not in line and "# AOT ID" not in line)


@pytest.mark.slow
def test_the_next_process_finds_them_in_the_cache(tmp_path: Path) -> None:
    """No code is generated, and no compiler runs."""
    regions = regions_from(2000, 2)
    first = dict(compile_all(regions, lambda told: None))
    _batch_compile.CppPythonBindingsCodeCache.cache_clear()
    before = _hits()
    with _counted() as runs, _inductors() as inductors:
        second = dict(compile_all(regions, lambda told: None))
    assert (runs.call_count, inductors.call_count, _hits() - before) == (0, 0, 2)
    for one, other in zip(values(first), values(second), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_the_code_depends_on_the_number_of_threads() -> None:
    """Sums over several threads round differently."""
    regions, threads = regions_from(9000, 1), torch.get_num_threads()
    dict(compile_all(regions, lambda told: None))
    before = _hits()
    try:
        torch.set_num_threads(threads + 1)
        dict(compile_all(regions, lambda told: None))
    finally:
        torch.set_num_threads(threads)
    assert _hits() == before
    dict(compile_all(regions, lambda told: None))
    assert _hits() == before + 1


def _hits() -> int:
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_hit"]


@pytest.mark.parametrize("problem", [RuntimeError("ended with 1"), OSError(28, "No space left on device")])
@pytest.mark.slow
def test_incompatible_kernels_are_compiled_separately(problem: Exception) -> None:
    first = 3000 + len(str(problem))
    with mock.patch.object(_batch_compile.Compilers, "run", side_effect=problem):
        made = dict(compile_all(regions_from(first, 2), lambda told: None))
    torch.testing.assert_close(values(made), [compute(first + n, INPUT) for n in range(2)])


def test_a_kernel_that_does_not_compile_runs_as_operators() -> None:
    """The others are not affected."""
    add = Batch.add

    def broken(self: Batch, argtypes: list[str], source: str) -> Pending:
        return add(self, argtypes, source.replace(number, "no such thing"))

    number = repr(1 + 1 / 4001)

    with (
        mock.patch.object(Batch, "add", broken),
        pytest.warns(UserWarning, match="Inductor cannot compile region_1 .*CppCompileError"),
    ):
        made = dict(compile_all(regions_from(4000, 2), lambda told: None))
    assert hasattr(made["region_0"], "source_code")
    assert not hasattr(made["region_1"], "source_code")
    torch.testing.assert_close(values(made), [compute(4000 + n, INPUT) for n in range(2)])


def test_compilers_are_killed_when_work_is_cancelled() -> None:
    """If a rank becomes unneeded, or on Ctrl-C: no wait, no thread and no lock remains."""
    begun, ended = threading.Event(), threading.Event()

    def run(self: _batch_compile.Compilers, *_: Any) -> str:
        begun.set()
        while not self.ended:
            ended.wait(0.01)
        ended.set()
        raise RuntimeError("ended")

    def check() -> None:
        if begun.is_set():
            raise KeyboardInterrupt

    regions = regions_from(5000, 2)
    with mock.patch.object(_batch_compile.Compilers, "run", run), cancelled_by(check), pytest.raises(KeyboardInterrupt):
        dict(compile_all(regions, lambda told: None))
    assert ended.is_set()
    assert not any(thread.name.startswith("graphshard-compilers") for thread in threading.enumerate())
    made = dict(compile_all(regions, lambda told: None))
    torch.testing.assert_close(values(made), [compute(5000 + n, INPUT) for n in range(2)])


def test_other_threads_get_kernels_at_once() -> None:
    """torch.compile in another thread, while regions are generated here."""
    found: list[torch.Tensor] = []

    def another() -> None:
        found.append(torch.compile(lambda x: (x / 6001).exp().sin())(INPUT))

    with Batch(1) as batch, batch.collecting() as scopes:
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
        assert scopes == []
    torch.testing.assert_close(found[0], (INPUT / 6001).exp().sin())


@pytest.mark.slow
def test_damaged_cache_entries_are_regenerated(tmp_path: Path) -> None:
    regions = regions_from(8000, 2)
    first = dict(compile_all(regions, lambda told: None))
    entries = [path for path in (tmp_path / "inductor" / "fxgraph").rglob("*") if path.is_file()]
    assert len(entries) == 2
    for path in entries:
        path.write_bytes(b"damaged")
    before = _hits()
    second = dict(compile_all(regions, lambda told: None))
    assert _hits() == before
    for one, other in zip(values(first), values(second), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(sys.platform != "linux", reason="libraries of other systems are no ELF files")
@pytest.mark.parametrize(("first", "left"), [(10000, 0), (10100, 5000), (10200, -100)])
@pytest.mark.quick_cases("10000-0")
def test_damaged_libraries_are_compiled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int, left: int
) -> None:
    """One warning covers all of them. (This process would not read them again; another would die with SIGBUS.)"""
    regions = regions_from(first, 2)
    made = values(dict(compile_all(regions, lambda told: None)))
    libraries = _libraries(tmp_path)
    assert len(libraries) == 2
    for path in libraries:
        content = path.read_bytes()
        path.unlink()  # this process keeps what it has loaded
        path.write_bytes(content[:left])
    _batch_compile.CppPythonBindingsCodeCache.cache_clear()
    again = dict(compile_all(regions, lambda told: None))
    assert all(hasattr(fn, "source_code") for fn in again.values())
    for one, other in zip(made, values(again), strict=True):
        assert torch.equal(one, other)
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "has libraries that are damaged, by a crash or a full disk perhaps, such as c" in warning.message
    assert all(damage_of(path.read_bytes()) == "" for path in _libraries(tmp_path))


def test_an_empty_source_is_rewritten(tmp_path: Path) -> None:
    regions = regions_from(10300, 1)
    made = values(dict(compile_all(regions, lambda told: None)))
    (library,) = _libraries(tmp_path)
    for path in (library, library.with_suffix(".cpp")):
        path.unlink()
        path.write_bytes(b"")
    _batch_compile.CppPythonBindingsCodeCache.cache_clear()
    assert torch.equal(values(dict(compile_all(regions, lambda told: None)))[0], made[0])
    assert library.with_suffix(".cpp").read_bytes()
    assert damage_of(library.read_bytes()) == ""


def _libraries(tmp_path: Path) -> list[Path]:
    """Return the libraries of kernels; Inductor's CPU queries have other names."""
    return list((tmp_path / "inductor").rglob("*.main.so"))


def test_waits_for_a_library_that_is_being_written(tmp_path: Path) -> None:
    library, lock = tmp_path / "library.so", tmp_path / "lock"
    content = Path(torch._C.__file__).read_bytes()
    library.write_bytes(content[:10])
    with ThreadPoolExecutor(1) as pool:
        with FileLock(lock):
            checked = pool.submit(check_whole, library, lock)
            assert not wait([checked], 0.2).done
            library.write_bytes(content)
        assert checked.result() is None
    assert library.read_bytes() == content
