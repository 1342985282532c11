"""Artifacts for GPUs and meshes with model-parallel axes, exported without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _random

import graphshard
from graphshard.cli.main import main
from graphshard.cross.gpu_kernels import read_cubin
from graphshard.errors import ArtifactError, CaptureError
from graphshard.store.artifact_file import read_artifact
from graphshard.store.artifact_manifest import cubin_file
from tests.distributed.tensor_parallel import Mlps, Tied, mesh_of, mlps, rows, tied
from tests.distributed.test_axes_export import CASES, SHAPE, as_compiled
from tests.exported import rewritten
from tests.ranks import FakeWorld, Ranks

pytest.importorskip("cffi")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU"),
]

CUDA = torch.device("cuda", 0)
# Attention of the other cases is a GPU operator.
RUN_ANYWHERE = ("tied", "mlps", "ring", "neighbors", "context alone")


def _tied(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    assert mesh.device_type == "cuda"
    return tied(mesh["tp"])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a model whose embedding is sharded along the vocabulary: each coordinate has a separate program."""
    pytest.importorskip("triton")
    path = tmp_path_factory.mktemp("axes") / "tied.gshard"
    words = torch.zeros(2, 3, dtype=torch.int64)
    return graphshard.export(
        Tied(), SHAPE, path, example_inputs=(words,), parallelize=_tied, device="cuda", capability=(9, 0)
    )


@pytest.mark.slow
def test_regions_become_cubins(file: Path) -> None:
    artifact = read_artifact(file)
    regions = {key: row for key, row in artifact.manifest.regions.items() if row.gpus}
    assert len(regions) >= 2
    for key, row in regions.items():
        code = artifact.gpu_code(key, (9, 0), CUDA)
        assert len(code.kernels) == len(row.gpus["9.0"]) > 0
        for kernel in row.gpus["9.0"]:
            content = artifact.archive.members[cubin_file(kernel.cubin)]
            assert content.startswith(b"\x7fELF")
            assert read_cubin(kernel.name, content).capability == (9, 0)


def test_each_coordinate_has_a_program(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [row.place for row in read_artifact(file).manifest.meshes] == [0, 1]
    assert main(["show", str(file)]) == 0
    text = capsys.readouterr().out
    assert "device     cuda, compute capability 9.0\n" in text
    for place in (0, 1):
        assert f"mesh       dp 2, tp 2, place {place}: " in text
    assert " registers, no spills, " in text
    assert main(["verify", str(file)]) == 0


def test_rejects_cpus(file: Path, fake_world: FakeWorld) -> None:
    fake_world(4)
    mesh = mesh_of(2, 2)
    with pytest.raises(ArtifactError, match="device was cuda when it was exported and is cpu here"):
        graphshard.load(file, tied(mesh["tp"]), mesh)


def _for_cpu(path: Path) -> Path:
    """Relabel the programs from GPU to CPU."""

    def relabel(facts: dict[str, Any], members: dict[str, bytes]) -> None:
        facts["environment"]["device"] = "cpu"
        for name, content in members.items():
            members[name] = content.replace(b'"cuda:0"', b'"cpu"').replace(b'"cuda"', b'"cpu"')

    return rewritten(path, relabel)


@pytest.mark.parametrize("name", RUN_ANYWHERE)
@pytest.mark.slow
def test_programs_for_gpus_have_the_bits_of_compile(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Programs captured for a GPU run on CPUs: they contain no device of the exporting process."""
    shape, make, parallelize, batch, places = CASES[name]
    with torch.device("meta"):
        model = make()
    path = graphshard.export(
        model,
        shape,
        tmp_path / "model.gshard",
        example_inputs=batch(),
        parallelize=parallelize,
        backend="eager",
        device="cuda",
    )
    assert not dist.is_initialized()
    artifact = read_artifact(path)
    assert [row.place for row in artifact.manifest.meshes] == ([None] if places == 1 else list(range(places)))
    assert b'"cuda' in artifact.archive.members["programs/0.json"]
    assert ranks(4).run(as_compiled, str(_for_cpu(path)), name, "h100") == [["exported"]] * 4


def _export_mlps(folder: Path, **options: Any) -> Path:
    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return mlps(mesh["tp"], 1)

    file, inputs = folder / "model.gshard", rows()
    return graphshard.export(
        Mlps(1), SHAPE, file, example_inputs=inputs, parallelize=parallelize, device="cuda", **options
    )


@pytest.mark.slow
def test_several_kinds_of_gpu_share_a_file(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    path = _export_mlps(tmp_path, capability=[(8, 0), (10, 0)])
    kinds = [set(row.gpus) for row in read_artifact(path).manifest.regions.values() if row.gpus]
    assert kinds
    assert all(kind == {"8.0", "10.0"} for kind in kinds)


class _Dropped(Mlps):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = nn.functional.dropout(self.layers[0].up.weight, 0.5)
        return super().forward(x) + weight.to_local().sum()


def test_dropout_of_a_distributed_tensor(tmp_path: Path) -> None:
    """torch distributes the random numbers on a GPU; earlier draws on the meta device have no effect."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        made = mlps(mesh["tp"])
        model.layers = made.layers
        nn.init.normal_(model.get_parameter("layers.0.up.weight"))

    with pytest.raises(CaptureError, match=r"(?s)test_axes_for_cuda\.py.*dropout"):
        graphshard.export(
            _Dropped(), SHAPE, tmp_path / "x.gshard", example_inputs=rows(), parallelize=parallelize, device="cuda"
        )
    assert not dist.is_initialized()


@pytest.mark.slow
def test_the_cpu_generator_is_restored(tmp_path: Path) -> None:
    before = _random._rng_tracker
    _export_mlps(tmp_path, backend="eager")
    assert _random._rng_tracker is before
