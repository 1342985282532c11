"""Store of compiled regions: the next process finds code by its dependencies, and checks it."""

from __future__ import annotations

import logging
import os
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from graphshard.ir.program import Region
from graphshard.lower import inductor, region_store
from graphshard.lower._background_warmup import VECTOR_INSTRUCTIONS
from graphshard.lower.backends import begin_compiling, compiler_for
from graphshard.lower.region_store import KeptRegion, Store, store_here
from graphshard.lower.regions import Boxed
from graphshard.torch_compat.fake_tensors import FakeTensorMode, ShapeEnv
from graphshard.utils.archive import read_private, write_archive
from tests.lower.small_regions import INPUT, compute, region_of, regions_from, values

ROOT = Path(__file__).parents[2]
config: Any = pkgutil.resolve_name("torch._inductor.config")
ALONE = """
import sys
import torch
from graphshard.lower._background_warmup import VECTOR_INSTRUCTIONS
from graphshard.lower.backends import begin_compiling, compiler_for
from tests.lower.small_regions import compute, INPUT, regions_from, values
torch.set_num_threads(int(sys.argv[1]))
begin_compiling("inductor", torch.device("cpu"))
made = dict(compiler_for("inductor")(regions_from(20300, 1), lambda told: None))
torch.testing.assert_close(values(made), [compute(20300, INPUT)])
print([name for name in sys.modules if name.startswith("torch._inductor.compile_fx")])
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty store."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    region_store._warn.cache_clear()
    return tmp_path / "inductor" / "graphshard-regions"


def _compiled(regions: dict[str, Region]) -> dict[str, Boxed]:
    return dict(compiler_for("inductor")(regions, lambda told: None))


def _generated() -> Any:
    return mock.patch.object(inductor, "generate", side_effect=inductor.generate)


@pytest.mark.slow
def test_the_next_process_finds_compiled_regions(directory: Path) -> None:
    """The same bits, and the same code with its kernels is shown."""
    regions = regions_from(20000, 2)
    assert not store_here().has("cpu")
    first = _compiled(regions)
    assert store_here().has("cpu")
    with _generated() as generated:
        second = _compiled(regions)
    assert generated.call_count == 0
    assert all(isinstance(fn, KeptRegion) for fn in second.values())
    for name, fn in second.items():
        assert fn.source_code == first[name].source_code  # type: ignore[attr-defined]
        assert 'extern "C"' in fn.source_code  # type: ignore[attr-defined]
    for one, other in zip(values(first), values(second), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("kept")
@pytest.mark.slow
def test_another_process_does_not_import_inductor() -> None:
    """It starts nothing for compilers either."""
    command = [sys.executable, "-c", ALONE, str(torch.get_num_threads())]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_finds_regions_stored_meanwhile_by_another_rank(kept: Region) -> None:
    """Both ranks look before either has compiled."""
    with _generated() as generated:
        found = dict(inductor.compile_all({"region_0": kept}, lambda told: None))
    assert generated.call_count == 0
    assert isinstance(found["region_0"], KeptRegion)


def test_no_warmup_with_stored_regions(kept: Region, directory: Path) -> None:
    with mock.patch.object(VECTOR_INSTRUCTIONS, "begin") as begun:
        begin_compiling("inductor", torch.device("cpu"))
        assert begun.call_count == 0
        shutil.rmtree(directory)
        begin_compiling("inductor", torch.device("cpu"))
        assert begun.call_count == 1


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "threads": lambda: mock.patch.object(torch, "get_num_threads", return_value=77),
    "setting of Inductor": lambda: config.patch(max_autotune=True),
    "variable": lambda: mock.patch.dict("os.environ", {"CXXFLAGS": "-O0"}),
    "processor": lambda: mock.patch.object(region_store, "instruction_set", return_value={"avx9": "yes"}),
    "graphshard's source": lambda: mock.patch.object(region_store, "own_files", return_value="other"),
    "torch's build": lambda: mock.patch.object(torch.version, "git_version", "other"),
    "version of Python": lambda: mock.patch.object(sys, "version", "4.0"),
    "deterministic algorithms": lambda: mock.patch.object(
        torch, "are_deterministic_algorithms_enabled", return_value=True
    ),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_keys_depend_on(name: str, kept: Region) -> None:
    with SURROUNDINGS[name]():
        assert store_here().find(kept) is None
    assert store_here().find(kept) is not None


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Region, Path]:
    """Compile a region; return it and the file of its code."""
    (region,) = regions_from(20300, 1).values()
    cache = tmp_path_factory.mktemp("cache")
    with mock.patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": str(cache)}):
        _compiled({"region_0": region})
    (path,) = (cache / "graphshard-regions").iterdir()
    return region, path


@pytest.fixture
def kept(compiled: tuple[Region, Path], directory: Path) -> Region:
    """Store a region's code."""
    region, path = compiled
    directory.mkdir(parents=True)
    shutil.copy(path, directory)
    return region


UNUSED: dict[str, Callable[[], Any]] = {
    "Inductor keeps nothing": lambda: config.patch(fx_graph_cache=False),
    "no cache is wanted": lambda: config.patch(force_disable_caches=True),
    "what Inductor does is to be seen": lambda: config.patch({"trace.enabled": True}),
    "a function of the user's": lambda: config.patch(post_grad_custom_post_pass=lambda graph: None),
}


@pytest.mark.parametrize("name", UNUSED)
def test_the_store_is_disabled_by(name: str, kept: Region, directory: Path) -> None:
    with UNUSED[name]():
        here = store_here()
        assert not here.has("cpu")
        assert here.find(kept) is None
        here.keep(kept, mock.Mock(source="", libraries={}), "")
    assert len(list(directory.iterdir())) == 1


@pytest.mark.parametrize("damage", [b"", b"one byte"])
def test_a_damaged_file_is_regenerated(
    damage: bytes, kept: Region, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = directory.iterdir()
    whole = path.read_bytes()
    middle = len(whole) // 2
    changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    path.write_bytes(changed if damage == b"one byte" else damage)
    with _generated() as generated:
        made = _compiled({"region_0": kept})
    assert generated.call_count == 1
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "cannot be used" in warning.message
    assert "It was removed, and is compiled again" in warning.message
    assert read_private(path).facts["region"] == kept.key
    torch.testing.assert_close(values(made), [compute(20300, INPUT)])


def test_code_that_does_not_load_is_regenerated(kept: Region, directory: Path) -> None:
    """The file is intact, but its library is for another machine, for example."""
    (path,) = directory.iterdir()
    found = read_private(path)
    (library,) = found.facts["libraries"]
    write_archive(path, {"libraries": [library]}, {**found.members, library: b"\x7fELF of another machine"})
    with _generated() as generated:
        torch.testing.assert_close(values(_compiled({"region_0": kept})), [compute(20300, INPUT)])
    assert generated.call_count == 1


def test_the_oldest_are_removed(kept: Region, directory: Path) -> None:
    (path,) = directory.iterdir()
    others = [path.with_stem(f"{path.stem[:-1]}-{number}") for number in range(3)]
    for number, other in enumerate(others):
        shutil.copy(path, other)
        os.utime(other, (number, number))
    with mock.patch.object(region_store, "LIMIT", 3 * path.stat().st_size):
        store_here().shrink()
    assert sorted(directory.iterdir()) == sorted([path, *others[1:]])


def test_a_directory_that_cannot_be_written(directory: Path) -> None:
    """Regions are compiled, and not stored."""
    directory.parent.mkdir()
    directory.write_text("a file where the directory would be")
    torch.testing.assert_close(values(_compiled(regions_from(20600, 1))), [compute(20600, INPUT)])


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return (torch.ops.graphshard_store_tests.doubled(x) * 3).exp().sum(1)


def test_custom_operators_are_not_stored(directory: Path) -> None:
    """A custom operator may be registered differently tomorrow with the same text."""
    with torch.library._scoped_library("graphshard_store_tests", "DEF") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: x * 2, "CPU")
        library.impl("doubled", lambda x: torch.empty_like(x), "Meta")
        region = region_of(_doubled)
        store_here().keep(region, mock.Mock(source="", libraries={}), "")
        assert not directory.exists()
        assert store_here().find(region) is None


def test_dynamic_sizes_are_not_stored(directory: Path) -> None:
    """Compilation may learn more about the sizes."""
    region = region_of(lambda x: (x * 2).exp().sum(1), tracing_mode="symbolic")
    store_here().keep(region, mock.Mock(source="", libraries={}), "")
    assert not directory.exists()


def test_regions_of_other_devices_are_not_stored(directory: Path) -> None:
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        region = region_of(lambda x: (x * 2).exp().sum(1), [torch.empty(4, 8, device="xpu")])
    store_here().keep(region, mock.Mock(source="", libraries={}), "")
    assert store_here().find(region) is None
    assert not directory.exists()


def test_without_a_directory(kept: Region) -> None:
    nothing = Store(None)
    nothing.shrink()
    assert not nothing.has("cpu")
    assert nothing.find(kept) is None
