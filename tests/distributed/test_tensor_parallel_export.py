"""Files for meshes with a tensor axis: made in one process, loaded on real ranks with the bits of compiling there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import graphshard
from graphshard import ArtifactError, UnsupportedError
from graphshard.artifact.members import read_artifact
from tests.distributed.tensor_parallel import Mlps, Tied, mesh_of, mlps, rows, tied
from tests.distributed.test_load import nothing_is_compiled
from tests.distributed.twins import assert_same, grads_of
from tests.ranks import Ranks

SHAPE = {"dp": 2, "tp": 2}


def _mlps(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return mlps(mesh["tp"])


def _tied(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Which rows of its embedding are a rank's own is written in its program."""
    return tied(mesh["tp"])


def _words() -> tuple[torch.Tensor]:
    return (torch.randint(12, (2, 3)),)


MODELS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[], tuple[Any, ...]], int]] = {
    "mlps": (Mlps, _mlps, rows, 1),
    "tied": (Tied, _tied, _words, 2),
}


def _trained(model: nn.Module, batch: Callable[[], tuple[Any, ...]], place: int) -> tuple[list[Any], dict[str, Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + place)
        optimizer.zero_grad()
        loss = model(*batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses, grads_of(model)


def _as_compiled(rank: int, world_size: int, path: str, name: str) -> list[str]:
    mesh = mesh_of(2, 2)
    _, parallelize, batch, _ = MODELS[name]
    place = mesh.get_local_rank("dp")
    expected = _trained(graphshard.compile(parallelize(None, mesh), mesh, backend="eager"), batch, place)
    model = parallelize(None, mesh)
    with nothing_is_compiled():
        graphshard.load(path, model, mesh)
        found = _trained(model, batch, place)
    assert all(map(torch.equal, found[0], expected[0]))
    assert_same(found[1], expected[1], "gradients")
    again = graphshard.compile(parallelize(None, mesh), mesh, backend="eager", artifact=path)
    assert all(map(torch.equal, _trained(again, batch, place)[0], expected[0]))
    return [program.reason for program in graphshard.programs(again)]


@pytest.mark.parametrize("name", MODELS)
def test_losses_of_compile(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """One file for all places on the tensor axis; a program for each where they differ."""
    make, parallelize, batch, programs = MODELS[name]
    path = tmp_path / "model.gshard"
    with torch.device("meta"):
        model = make()
    graphshard.export(
        model, SHAPE, path, example_inputs=batch(), parallelize=parallelize, backend="eager", device="cpu"
    )
    assert not dist.is_initialized()
    places = [row["place"] for row in read_artifact(path).meshes]
    assert places == ([None] if programs == 1 else list(range(programs)))
    reasons = ranks(4).run(_as_compiled, str(path), name, share=False)
    assert reasons == [["exported"]] * 4


def _other(rank: int, world_size: int, path: str) -> list[str]:
    found = []
    for shape, make in (((1, 4), mlps), ((2, 2), _all_along_columns)):
        mesh = mesh_of(*shape)
        with pytest.raises(ArtifactError) as error:
            graphshard.load(path, make(mesh["tp"]), mesh)
        found.append(str(error.value))
    return found


def _all_along_columns(tp: DeviceMesh) -> nn.Module:
    model = Mlps()
    plan = {"up": ColwiseParallel(), "down": ColwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, tp, plan)
    return model


def test_what_does_not_fit(ranks: Ranks, tmp_path: Path) -> None:
    """Another mesh, and another plan, are told."""
    path = tmp_path / "model.gshard"
    graphshard.export(Mlps(), SHAPE, path, example_inputs=rows(), parallelize=_mlps, backend="eager", device="cpu")
    for mesh, plan in ranks(4).run(_other, str(path)):
        assert "mesh was {'dp': 2, 'tp': 2} when it was exported and is {'dp': 1, 'tp': 4} here" in mesh
        assert "of layers.0.down.weight was" in plan


def test_what_is_not_exported(tmp_path: Path) -> None:
    """Axes that files hold no programs for, and GPUs."""
    path = tmp_path / "model.gshard"
    for axis in ("cp", "ep"):
        with pytest.raises(UnsupportedError, match=rf"^export: mesh .* has the axis '{axis}', and files hold programs"):
            graphshard.export(Mlps(), {"dp": 2, axis: 2}, path, example_inputs=rows(), parallelize=_mlps)
    with pytest.raises(UnsupportedError, match=r"^export: parallelize= makes programs for CPUs only"):
        graphshard.export(Mlps(), SHAPE, path, example_inputs=rows(), parallelize=_mlps, device="cuda")
    assert not path.exists()
