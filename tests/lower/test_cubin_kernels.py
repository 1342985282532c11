"""Regions for GPUs in the store: a later process starts their kernels without Inductor and Triton.

Inductor compiles for a GPU that is not here. Triton's interpreter runs what the later process would launch.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from graphshard.codec.program_format import decode_region, encode_region
from graphshard.ir.gpus import properties_of
from graphshard.ir.program import Region
from graphshard.lower import backends, inductor, region_store
from graphshard.lower._batch_compile import TRITON_COMPILER
from graphshard.lower.cubin_kernels import CubinKernel, KernelVariant, LoadedKernel
from graphshard.lower.region_store import KeptRegion, store_here
from graphshard.store.program_library import read_region
from graphshard.utils.archive import read_private
from tests.lower.gpu_stand_in import H100, Launcher, inputs_of_region, on_the_cpu, only_file, plain_region
from tests.ranks import Ranks

pytest.importorskip("triton")
pytest.importorskip("cffi")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")

config: Any = pkgutil.resolve_name("torch._inductor.config")
ROOT = Path(__file__).parents[2]


def _region(index: int = 0) -> Region:
    from graphshard.cross.driver import stand_in  # needs cffi

    with stand_in(H100):
        return plain_region(index)


def _compile(region: Region) -> tuple[Any, list[Any]]:
    """Compile a region with the compiler of training runs; return its function and the tuners of its kernels."""
    from graphshard.cross.driver import compiler_stand_in

    tuners: dict[str, Any] = {}
    stand_in = compiler_stand_in(H100, lambda tuner: tuners.update({tuner.fn.__name__: tuner}))
    with stand_in, config.patch(compile_threads=1), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
        ((_, made),) = backends.compiler_for("inductor")({"region_0": region}, lambda told: None)
    return made, list(tuners.values())


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    region_store._warn.cache_clear()
    return tmp_path / "inductor" / "graphshard-regions"


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    with on_the_cpu(made):
        yield made


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Compile the region on GPU 3; return its file and the number of configurations of each kernel."""
    cache = tmp_path_factory.mktemp("cache")
    with mock.patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": str(cache)}):
        _, tuners = _compile(_region(3))
    return only_file(cache / "graphshard-regions"), [len(tuner.compile_results) for tuner in tuners]


@pytest.fixture
def kept(compiled: tuple[Path, list[int]], directory: Path) -> list[int]:
    directory.mkdir(parents=True)
    shutil.copy(compiled[0], directory)
    return compiled[1]


def test_all_configurations_are_kept(compiled: tuple[Path, list[int]]) -> None:
    """One file has the code, without the number of the GPU, and each cubin once."""
    path, configurations = compiled
    archive = read_private(path)
    assert len(configurations) == 3
    assert sum(configurations) > 3
    stored = archive.facts["kernels"]
    kernels = [CubinKernel.of(facts, [b""] * len(facts["variants"])) for facts in stored.values()]
    assert [name[:10] for name in stored] == ["triton_red", "triton_per", "triton_poi"]
    assert [len(kernel.variants) for kernel in kernels] == configurations
    assert [kernel.writes for kernel in kernels] == [(), (), (0,)]
    cubins = [content for content in archive.members.values() if content.startswith(b"\x7fELF")]
    assert len(cubins) == sum(configurations)
    code = archive.text("code")
    assert "graphshard_gpu" in code
    assert not re.search(r"cuda:3|Guard\(3\)|stream\(3\)|import triton|_inductor", code)


def test_a_warm_start_measures_once(kept: list[int], directory: Path, launcher: Launcher) -> None:
    """It generates nothing; the second one loads one configuration of each kernel."""
    with mock.patch.object(inductor, "generate") as generated:
        found, _ = _compile(_region(5))
        assert isinstance(found, KeptRegion)
        assert [index for _, index in launcher.loaded] == [5] * sum(kept)
        results = found(inputs_of_region())
        assert [result.shape for result in results] == [(8, 4096), (4096,), (32, 32)]
        assert len(launcher.launched) == sum(16 * number + 1 if number > 1 else 1 for number in kept)
        launcher.launched.clear()
        found(inputs_of_region())
        steady = list(launcher.launched)
        assert len(steady) == 3
        launcher.loaded.clear()
        again, _ = _compile(_region(6))
        assert [index for _, index in launcher.loaded] == [6] * 3
        launcher.launched.clear()
        again(inputs_of_region())
        assert launcher.launched == steady  # the fastest in the first launch
    assert generated.call_count == 0
    assert {len(facts["variants"]) for facts in read_private(only_file(directory)).facts["kernels"].values()} == {1}


def test_inductors_choice_is_kept(directory: Path, launcher: Launcher) -> None:
    """The first launch tunes with Inductor; the second one loads what was chosen, and measures nothing."""
    _, tuners = _compile(_region())
    chosen = []
    for tuner in tuners:
        chosen.append(tuner.compile_results[-1].config)
        if len(tuner.compile_results) > 1:
            assert len(read_private(only_file(directory)).facts["kernels"]) == len(tuners)
            tuner.save_cache_hook(chosen[-1], 1.5, triton_cache_hash="a")
    rows = [kernel["variants"] for kernel in read_private(only_file(directory)).facts["kernels"].values()]
    assert [[row["constants"] for row in variants] for variants in rows] == [[config.kwargs] for config in chosen]
    found, _ = _compile(_region())
    found(inputs_of_region())
    assert len(launcher.loaded) == len(launcher.launched) == len(tuners)


def test_measured_launches_change_copies(launcher: Launcher) -> None:
    """Without memory for copies the first configuration is taken."""
    text = "def launcher(in_out_ptr0, xnumel, stream):\n    runner(1, 1, 1, stream, in_out_ptr0, xnumel)"
    variants = [KernelVariant(f"add_{n}", text, "Oi", 1, 1, 0, {}, b"\x7fELF") for n in (1, 10)]

    def add(function: str, *args: Any) -> None:
        *_, (value, _, null), _ = args
        assert null is None
        value += int(function.partition(" ")[0].rpartition("_")[2])

    value = torch.zeros(4)
    with mock.patch.object(launcher, "_launch_kernel", add):
        kernel = LoadedKernel(CubinKernel(tuple(variants), (0,)), 0)
        kernel.run(value, 4, stream=7)
        assert value.tolist() == [10.0] * 4
        kernel = LoadedKernel(CubinKernel(tuple(variants), (0,)), 0)
        with mock.patch.object(torch.Tensor, "clone", side_effect=torch.OutOfMemoryError):
            kernel.run(value, 4, stream=7)
    assert value.tolist() == [11.0] * 4
    assert [variant.name for variant in kernel.kernel.variants] == ["add_1"]


def test_nothing_is_measured_while_a_graph_is_captured(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def launcher(in_ptr0, stream):\n    runner(1, 1, 1, stream, in_ptr0)"
    variants = [KernelVariant(f"k{n}", text, "O", 0, 1, 0, {}, b"\x7fELF") for n in range(2)]
    loaded = LoadedKernel(CubinKernel(tuple(variants)), 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    loaded.run(torch.zeros(1), stream=7)
    assert launcher.launched == [("k0", (1, 1, 1))]
    assert len(loaded.kernel.variants) == 2


@pytest.mark.usefixtures("kept")
def test_kernels_that_the_driver_refuses_are_compiled_again(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    with mock.patch.object(launcher, "_load_kernel", side_effect=RuntimeError("no kernel image")):
        made, _ = _compile(_region())
    assert not isinstance(made, KeptRegion)
    assert "no kernel image" in caplog.text
    assert "compiled again" in caplog.text


@pytest.mark.usefixtures("kept", "launcher")
def test_another_gpu_or_compiler_has_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    region = _region()
    assert store_here().find(region) is not None
    with mock.patch.object(region_store, "version", return_value="9.9"):
        assert store_here().find(region) is None
    with mock.patch.object(region_store, "version", side_effect=PackageNotFoundError):
        assert store_here().find(region) is None
    other = SimpleNamespace(**{**properties_of(H100), "multi_processor_count": 114})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: other)
    assert store_here().find(region) is None


@pytest.mark.usefixtures("kept", "launcher")
def test_processes_of_inductor_are_not_started(directory: Path) -> None:
    with mock.patch.object(TRITON_COMPILER, "begin") as begun:
        backends.begin_compiling("inductor", torch.device("cuda"))
        assert begun.call_count == 0
        shutil.rmtree(directory)
        backends.begin_compiling("inductor", torch.device("cuda"))
        assert begun.call_count == 1


@pytest.mark.usefixtures("kept")
def test_a_stored_program_finds_its_regions(kept: list[int], launcher: Launcher) -> None:
    """A file of the compile cache has the operators of a region for a GPU; its code is found by their text."""
    region = _region(3)
    stored = json.loads(json.dumps(encode_region(region)))
    artifact: Any = SimpleNamespace(
        manifest=SimpleNamespace(regions={region.key: SimpleNamespace(code="later")}),
        region=lambda key, device: decode_region(key, stored, device),
    )
    with mock.patch.object(inductor, "generate") as generated:
        found, _ = read_region(artifact, region.key, "inductor", torch.device("cuda", 5))
    assert generated.call_count == 0
    assert isinstance(found, KeptRegion)
    assert [index for _, index in launcher.loaded] == [5] * sum(kept)


def _cold(rank: int, size: int, directory: str) -> tuple[int, int, int]:
    """Compile two regions for the GPU of a rank; return regions generated, kernels compiled, and cubins loaded."""
    from graphshard.cross.driver import compiler_stand_in, stand_in

    here = {"TORCHINDUCTOR_CACHE_DIR": directory, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    launcher, tuners = Launcher(), list[Any]()
    with mock.patch.dict(os.environ, here), on_the_cpu(launcher), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
        with stand_in(H100):
            other = (8, 32), (32, 2048), (8, 2048)
            regions = {"region_0": plain_region(rank), "region_1": plain_region(rank, other)}
        with (
            compiler_stand_in(H100, lambda tuner: tuners.append(tuner.fn.__name__)),
            mock.patch.object(inductor, "generate", side_effect=inductor.generate) as generated,
        ):
            dict(backends.compiler_for("inductor")(regions, lambda told: None))
    return generated.call_count, len(set(tuners)), len(launcher.loaded)


@pytest.mark.slow
def test_ranks_with_gpus_share_compilation(ranks: Ranks, tmp_path: Path) -> None:
    """Each region is compiled by one rank, for the GPUs of both; in the next launch by none."""
    cold = ranks(2).run(_cold, str(tmp_path))
    assert sum(generated for generated, _, _ in cold) == 2
    assert all((generated < 2) == (loaded > 0) for generated, _, loaded in cold)
    warm = ranks(2).run(_cold, str(tmp_path))
    assert [(generated, kernels) for generated, kernels, _ in warm] == [(0, 0), (0, 0)]


UNKEPT: dict[str, Callable[[Any], Any]] = {
    "memory that starts at zero": lambda tuner: setattr(tuner, "reset_to_zero_arg_names", ["out_ptr0"]),
    "Triton's own launcher": lambda tuner: setattr(tuner.compile_results[0], "kernel", object()),
    "more configurations later": lambda tuner: tuner.inductor_meta.update(coordinate_descent_tuning=True),
    "another release": lambda tuner: setattr(tuner, "compile_results", None),
}


@pytest.mark.parametrize("name", UNKEPT)
def test_kernels_that_are_not_kept(name: str, directory: Path) -> None:
    def asked(tuner: Any) -> Any:
        UNKEPT[name](tuner)
        return cubin_kernel(tuner)

    cubin_kernel = inductor._cubin_kernel
    with mock.patch.object(inductor, "_cubin_kernel", asked):
        made, tuners = _compile(_region())
    assert tuners
    assert not isinstance(made, KeptRegion)
    assert not list(directory.glob("*.region"))


WARM = """
import json, sys
import torch
from graphshard.lower import backends
from tests.lower import gpu_stand_in as tests

launcher, region, before, started = tests.Launcher(), tests.plain_region(), set(sys.modules), []
processes = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")
sys.addaudithook(lambda event, args: started.append(event) if event in processes else None)
with tests.on_the_cpu(launcher):
    backends.begin_compiling("inductor", torch.device("cuda"))
    ((_, made),) = backends.compiler_for("inductor")({"region_0": region}, lambda told: None)
    made(tests.inputs_of_region())
new = {name for name in set(sys.modules) - before if name.startswith(("torch._inductor", "torch._dynamo", "triton"))}
print(json.dumps([len(launcher.loaded), sorted(new), "torch._inductor.compile_fx" in sys.modules, started]))
"""


COLD = """
import json
from tests.lower.test_cubin_kernels import _compile, _region

print(json.dumps([len(tuner.compile_results) for tuner in _compile(_region(3))[1]]))
"""


def test_a_warm_process_imports_neither_inductor_nor_triton() -> None:
    """It starts no process either. Both are new: earlier tests of this one may have changed what keys depend on."""
    found = []
    for code in (COLD, WARM):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[1] == [sum(found[0]), [], False, []]


INTERPRETED = r"""
import json, os, re
import torch
from graphshard.lower import cubin_kernels
from graphshard.lower.region_store import store_here
from types import SimpleNamespace
from tests.cross.interpreted import interpreted
from tests.lower import gpu_stand_in as tests

archive, made = tests.archive_here(), []
rows = [row["constants"] for kernel in archive.facts["kernels"].values() for row in kernel["variants"]]

class Interpreter:
    def _load_kernel(self, path, name, shared, index):
        source = re.search(rf"'{name}', '{{3}}.*?@triton.jit\n(def .*?)'{{3}}", archive.text("shown"), re.DOTALL)[1]
        kernel = SimpleNamespace(name=name, source=f"# {json.dumps(rows[len(made)])}, 1 warps\n{source}")
        made.append(interpreted(kernel))
        return "module", made[-1], 32, 0

    def _launch_kernel(self, function, x, y, z, warps, shared, types, values, stream):
        assert len(types) == len(values)
        function([value for value in values if value is not None], [x, y, z])

del os.environ["TRITON_INTERPRET"]  # code depends on it
cubin_kernels._LAUNCHES = cubin_kernels._ROUNDS = 1
with tests.on_the_cpu(Interpreter()):
    found = store_here().find(tests.plain_region())
    os.environ["TRITON_INTERPRET"] = "1"
    for _ in range(2):
        for result, right in zip(found(tests.inputs_of_region()), tests.gated(*tests.inputs_of_region()), strict=True):
            torch.testing.assert_close(result, right)
print(len(made))
"""


@pytest.mark.slow
def test_kept_kernels_compute_the_region(kept: list[int], tmp_path: Path) -> None:
    """All configurations run in Triton's interpreter, with the launchers that were kept."""
    command = [sys.executable, "-W", "ignore", "-c", INTERPRETED, "file", str(tmp_path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == sum(kept)
