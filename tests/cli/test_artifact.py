"""`graphshard show`, `verify` and `finish`, and files whose regions are compiled later or elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard
from graphshard.cli.main import main
from graphshard.cross.driver import stand_in
from graphshard.errors import ArgumentError
from graphshard.ir.program import Region
from graphshard.lower.eager import compile_operators
from graphshard.lower.region_store import KeptRegion, Kernels
from graphshard.lower.regions import Compiled
from graphshard.store.artifact_file import read_artifact
from tests.aot.test_artifact import load_error
from tests.exported import Small, export_net, rewritten
from tests.helpers import Blocks
from tests.ranks import FakeWorld


@pytest.fixture(scope="module")
def net_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_net(tmp_path_factory.mktemp("net") / "net.gshard", [(2,), (4,)])


@pytest.fixture
def mesh(fake_world: FakeWorld) -> DeviceMesh:
    fake_world(2)
    return init_device_mesh("cpu", (2,))


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """Export for Inductor, without code."""
    inputs = (torch.zeros(2, 8),)
    return graphshard.export(
        Small(), (2,), tmp_path / "small.gshard", example_inputs=inputs, compile_regions=False, device="cpu"
    )


@pytest.fixture(autouse=True)
def nothing_native() -> Iterator[None]:
    with mock.patch.object(KeptRegion, "load", side_effect=AssertionError("native code is loaded")):
        yield


def printed(capsys: pytest.CaptureFixture[str], *args: Any, status: int = 0) -> str:
    assert main([str(arg) for arg in args]) == status
    return capsys.readouterr().out


@pytest.mark.slow
def test_show(net_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "show", net_file)
    for part in (
        "model      Net\n",
        f"made with  graphshard {graphshard.__version__}, torch {torch.__version__.partition('+')[0]}, eager",
        "device     cpu, any",
        "bucket, reorder",
        "mesh       shard 2: 9 parameters, 336 B of shards per rank",
        "mesh       shard 4: ",
        "programs/0: the model(int64[2, 3], int64[2, 3]): forward and backward, ",
        "gradients of outputs 1, gradients of outputs 0, 1",
        "programs/1: the model(int64[2, 3]): forward, ",
        "programs/2: layers.1(float32[2, 3, 6]): forward and backward",
        "hardware       cpu-gloo",
        "step           ",
        "memory         ",
        "that run as ATen operators; 0 B of code",
    ):
        assert part in text, text


def test_show_does_not_import_torch(net_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from graphshard.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "show", str(net_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == printed(capsys, "show", net_file) + "False\n"


def test_show_graph(net_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "show", net_file, "--graph")
    assert "programs/0 (the model, shard 2)\nforward:\n" in text
    assert "programs/5 (layers.1, shard 4)" in text
    assert "all_gather_into_tensor" in text
    assert "[gather layers.0 in forward]" in text


def test_graph_requires_an_exported_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path), "--graph"]) == 2
    assert "--graph is for files of graphshard.export, which end in .gshard" in capsys.readouterr().err


def test_verify(net_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "verify", net_file)
    assert "net.gshard: whole. " in text
    assert "10 programs for 2 meshes, " in text
    assert text.endswith("; no native code\n")
    copy = tmp_path / "copy.gshard"
    content = bytearray(net_file.read_bytes())
    content[len(content) // 2] ^= 1
    copy.write_bytes(content)
    assert "copy.gshard" in printed(capsys, "verify", copy, status=1)
    assert main(["show", str(copy)]) == 2
    assert "graphshard show: " in capsys.readouterr().err


def test_verify_finds_faults_under_correct_checksums(net_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def other_region(facts: dict[str, Any], members: dict[str, bytes]) -> None:
        name = f"regions/{next(iter(facts['regions']))}.json"
        members[name] = members[name].replace(b'"text": "', b'"text": " ')

    def no_plan(_: dict[str, Any], members: dict[str, bytes]) -> None:
        members["programs/0.json"] = json.dumps({**json.loads(members["programs/0.json"]), "phases": {}}).encode()

    def no_operator(_: dict[str, Any], members: dict[str, bytes]) -> None:
        name = "programs/0.partitioned.json"
        members[name] = members[name].replace(b"aten.mm.default", b"aten.mm.missing")

    text = printed(capsys, "verify", rewritten(net_file, other_region), status=1)
    assert "is another than its key says" in text
    assert "a program cannot be read" in printed(capsys, "verify", rewritten(net_file, no_plan), status=1)
    assert "a backward cannot be read" in printed(capsys, "verify", rewritten(net_file, no_operator), status=1)


def test_finish_compiles_missing_regions(
    unfinished: Path, mesh: DeviceMesh, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "to be compiled on the target, by `graphshard finish`" in printed(capsys, "show", unfinished)
    before = read_artifact(unfinished)
    assert not before.native
    assert before.manifest.environment.cpu is None
    told: list[str] = []

    def compile_every_second(regions: dict[str, Region], show: Callable[[str], None]) -> Compiled:
        for number, (key, region) in enumerate(regions.items()):
            told.append(key)
            made: Any = compile_operators(region)
            made.problem = "Inductor cannot compile it. NotImplementedError: no"
            yield key, made if number % 2 else KeptRegion(key, Kernels("", {"cpp_fused_0": b"library"}))

    with mock.patch("graphshard.lower.inductor.compile_all", compile_every_second):
        text = printed(capsys, "finish", unfinished, "--threads", "3")
    assert told == before.later
    assert f"compiled {(len(before.later) + 1) // 2} of {len(before.later)} regions\n" in text
    assert "Inductor cannot compile it. NotImplementedError: no" in text
    after = read_artifact(unfinished)
    assert after.native
    assert not after.later
    assert after.manifest.environment.threads == 3
    assert "3 threads" in printed(capsys, "show", unfinished)
    assert "native code: trust it as you would a program" in printed(capsys, "verify", unfinished)
    assert "nothing to do" in printed(capsys, "finish", unfinished)
    with mock.patch("torch.get_num_threads", return_value=4):
        error = load_error(unfinished, mesh, Small())
    assert error.field == "threads"


def test_interrupted_finish_keeps_the_file(unfinished: Path) -> None:
    before = unfinished.read_bytes()
    with (
        mock.patch("graphshard.lower.inductor.generate", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        main(["finish", str(unfinished)])
    assert unfinished.read_bytes() == before
    assert list(unfinished.parent.iterdir()) == [unfinished]


def test_unfinished_regions_are_compiled_when_they_are_loaded(
    unfinished: Path, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    with mock.patch("graphshard.lower.inductor.generate", lambda region, *_: lambda: compile_operators(region)):
        model = graphshard.load(unfinished, Small(), mesh)
    assert "Run `graphshard finish" in caplog.text
    model(torch.ones(2, 8)).backward()
    assert model.linear.weight.grad is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_for_gpus_on_a_machine_without_one(
    tmp_path: Path, mesh: DeviceMesh, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cffi")
    path = tmp_path / "blocks.gshard"
    given = {"example_inputs": (torch.zeros(2, 4),), "device": "cuda"}
    graphshard.export(Blocks(2), (8,), path, **given)
    text = printed(capsys, "show", path)
    assert "device     cuda, any" in text
    assert "hardware       h100" in text
    assert "to be compiled on the target" in text
    assert "; no native code" in printed(capsys, "verify", path)
    assert main(["finish", str(path)]) == 2
    assert "there is no GPU here: run this where it will be loaded" in capsys.readouterr().err
    error = load_error(path, mesh, Blocks(2))
    assert "device was cuda when it was exported and is cpu here" in str(error)
    with pytest.raises(ArgumentError, match=r"there is none here: say which one, as in capability=\(9, 0\)"):
        graphshard.export(Blocks(2), (8,), path, **given, compile_regions=True)


@pytest.fixture
def for_gpus(tmp_path: Path) -> Path:
    """Export for any GPU, without code."""
    pytest.importorskip("cffi")
    inputs = (torch.zeros(2, 4),)
    return graphshard.export(Blocks(1), (2,), tmp_path / "blocks.gshard", example_inputs=inputs, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_finish_with_a_gpu(for_gpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing code becomes cubins for the local kind of GPU, as in `export`."""
    pytest.importorskip("triton")
    left = read_artifact(for_gpus).later
    with stand_in((9, 0)):
        text = printed(capsys, "finish", for_gpus)
    artifact = read_artifact(for_gpus)
    assert f"compiled {len(left)} of {len(left)} regions" in text
    assert not artifact.later
    assert not artifact.native
    assert {(row.code, *row.gpus) for row in artifact.manifest.regions.values()} == {("gpu", "9.0")}
    for key in left:
        code = artifact.gpu_code(key, (9, 0), torch.device("cuda", 0))
        assert code.kernels
        assert all(kernel.cubin.startswith(b"\x7fELF") for kernel in code.kernels.values())
    for_others = graphshard.export(
        Blocks(1),
        (2,),
        for_gpus.with_name("known.gshard"),
        example_inputs=(torch.zeros(2, 4),),
        device="cuda",
        capability=(9, 0),
    )
    assert read_artifact(for_others).manifest.regions == artifact.manifest.regions
    assert "; native code" in printed(capsys, "verify", for_gpus)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_finish_with_a_gpu_of_another_kind(for_gpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = for_gpus.read_bytes()
    with stand_in((9, 0)), mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 6)):
        assert main(["finish", str(for_gpus)]) == 2
    told = capsys.readouterr().err
    assert f"{for_gpus}: files have code for GPUs of compute capability 8.0, 9.0, 10.0, and this GPU is of 8.6." in told
    assert "`load` compiles what is left, each time." in told
    assert for_gpus.read_bytes() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize(("here", "codes"), [((9, 0), {("gpu", "9.0")}), ((8, 6), {("later",)})])
def test_export_with_a_gpu(tmp_path: Path, here: tuple[int, int], codes: set[tuple[str, ...]]) -> None:
    """For unknown kinds of GPUs, regions are compiled at loading."""
    pytest.importorskip("cffi")
    pytest.importorskip("triton")
    given: dict[str, Any] = {"example_inputs": (torch.zeros(2, 4),), "device": "cuda"}
    with stand_in((9, 0)), mock.patch.object(torch.cuda, "get_device_capability", return_value=here):
        artifact = read_artifact(graphshard.export(Blocks(1), (2,), tmp_path / "blocks.gshard", **given))
        assert {(row.code, *row.gpus) for row in artifact.manifest.regions.values()} == codes
        assert artifact.manifest.environment.device == "cuda"
        if here == (8, 6):
            with pytest.raises(ArgumentError, match=r"needs a GPU of compute capability 8\.0, 9\.0, 10\.0"):
                graphshard.export(Blocks(1), (2,), tmp_path / "x.gshard", compile_regions=True, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mesh": (2, 2, 2)}, "mesh must have one axis (to shard over) or two (to replicate and to shard over), got 3"),
        ({"accumulate": "yes"}, "accumulate must be True or False, got 'yes'"),
        ({"mesh": []}, "mesh must"),
        ({"mode": "test"}, "mode must be one of 'training', 'inference', 'both', got 'test'"),
        ({"example_inputs": None}, "export needs example_inputs, example_kwargs or calls"),
        ({"calls": [(1,)]}, "calls must be a list of graphshard.Call"),
        ({"calls": [graphshard.Call((torch.zeros(2, 4),), entry="layer")]}, "entry='layer' is no submodule of Blocks"),
        ({"calls": [graphshard.Call((torch.zeros(2, 4),), gradients=[(3,)])]}, "differentiable through outputs 0 only"),
        ({"device": "tpu"}, "device must be one of 'cpu', 'cuda', got 'tpu'"),
        ({"colour": 1}, "export() got an unexpected keyword argument 'colour'"),
        ({"path": "/nowhere/b.gshard"}, "'/nowhere/b.gshard' cannot be written"),
    ],
)
def test_wrong_arguments(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    arguments = {"mesh": (2,), "path": tmp_path / "b.gshard", "example_inputs": (torch.zeros(2, 4),), **given}
    with pytest.raises(ArgumentError) as caught:
        graphshard.export(Blocks(1), backend="eager", **arguments)
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())
