"""Export with a GPU: the file contains CUDA code, and a loaded model has the bits of `compile`.

Run with `pytest -m gpu`; skipped without a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.cli.main import main
from graphshard.ir.gpus import dotted
from graphshard.store.artifact_file import read_artifact
from tests.helpers import Blocks

pytestmark = pytest.mark.gpu

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Create a world of one NCCL rank."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("nccl", rank=0, world_size=1, store=store)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def exported(path: Path, **options: object) -> Path:
    with torch.device("meta"):
        model = Blocks(2, 64, bias=True)
    inputs = (torch.zeros(8, 64),)
    return graphshard.export(model, [(1,), (8,)], path, example_inputs=inputs, mp_policy=POLICY, **options)


def trained(model: nn.Module) -> list[torch.Tensor]:
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(8, 64, device="cuda")).backward()
        optim.step()
        optim.zero_grad()
    return [param.to_local().clone() for param in model.parameters()]


def twin_of(path: Path, mesh: DeviceMesh, backend: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train a loaded and a compiled model; return both models' parameters."""
    torch.manual_seed(0)
    model = Blocks(2, 64, bias=True)
    twin = graphshard.compile(copy.deepcopy(model), mesh, mp_policy=POLICY, backend=backend)
    graphshard.load(path, model, mesh)
    return trained(model), trained(twin)


def test_loaded_has_the_bits_of_compile(tmp_path: Path, mesh: DeviceMesh) -> None:
    path = exported(tmp_path / "blocks.gshard", backend="eager")
    loaded, compiled = twin_of(path, mesh, "eager")
    assert all(map(torch.equal, loaded, compiled))


def test_loaded_kernels_train_like_compiled_ones(tmp_path: Path, mesh: DeviceMesh) -> None:
    """Up to the order of sums: kernels in a file are not autotuned."""
    path = exported(tmp_path / "blocks.gshard")
    for loaded, compiled in zip(*twin_of(path, mesh, "inductor"), strict=True):
        torch.testing.assert_close(loaded, compiled, rtol=1e-2, atol=1e-3)


def codes_in(path: Path) -> set[tuple[str, ...]]:
    return {(row.code, *row.gpus) for row in read_artifact(path).manifest.regions.values()}


def test_file_has_code_for_the_gpu(tmp_path: Path) -> None:
    path = exported(tmp_path / "blocks.gshard")
    assert read_artifact(path).manifest.environment.device == "cuda"
    assert ("gpu", dotted(torch.cuda.get_device_capability())) in codes_in(path)


def test_finish_adds_the_code(tmp_path: Path, mesh: DeviceMesh) -> None:
    path = exported(tmp_path / "blocks.gshard", compile_regions=False)
    assert read_artifact(path).later
    assert main(["finish", str(path)]) == 0
    assert ("gpu", dotted(torch.cuda.get_device_capability())) in codes_in(path)
    trained(graphshard.load(path, Blocks(2, 64, bias=True), mesh))


def test_compile_has_the_regions_of_the_prediction(mesh: DeviceMesh) -> None:
    """Therefore measurements replace estimates, and kernels are found by key."""
    inputs = (torch.zeros(8, 64),)
    explained = graphshard.explain(
        Blocks(2, 64, bias=True), (1,), example_inputs=inputs, mp_policy=POLICY, device="cuda"
    )
    model = graphshard.compile(Blocks(2, 64, bias=True), mesh, mp_policy=POLICY, example_inputs=inputs)
    (program,) = graphshard.programs(model)
    assert {row.key for row in explained.regions} == set(program.regions)
