"""Artifacts for meshes with model-parallel axes, exported in one process, have the bits of compiling on ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import graphshard
from graphshard.aot import load
from graphshard.errors import ArgumentError, ArtifactError
from graphshard.store.artifact_file import read_artifact
from tests.distributed.context_parallel import ATTENTIONS, VOCAB, Decoder
from tests.distributed.expert_parallel import WIDTH, Moe
from tests.distributed.tensor_parallel import Mlps, Tied, mesh_of, mlps, rows, tied
from tests.distributed.test_plans_of_meshes import Odd, few_rows, odd
from tests.distributed.twins import assert_same, grads_of
from tests.exported import nothing_is_compiled
from tests.ranks import Ranks

SHAPE = {"dp": 2, "tp": 2}


class Case(NamedTuple):
    """A model for a mesh; its programs may depend on a rank's coordinates."""

    shape: dict[str, int]
    make: Callable[[], nn.Module]
    parallelize: Callable[[Any, DeviceMesh], nn.Module]
    batch: Callable[[], tuple[Any, ...]]
    places: int


def _mlps(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return mlps(mesh["tp"])


def _tied(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Parallelize the tied model; the program contains the rank's rows of the embedding."""
    return tied(mesh["tp"])


def _words() -> tuple[torch.Tensor]:
    return (torch.randint(12, (2, 3)),)


def _sequences() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(VOCAB, (2, 4)), torch.randint(VOCAB, (2, 4))


def _context(name: str, shape: dict[str, int], places: int) -> Case:
    """Build a case whose program contains the rank's positions, unless it has all positions of some heads."""
    return Case(
        shape,
        lambda: Decoder(ATTENTIONS[name], None),
        lambda model, mesh: Decoder(ATTENTIONS[name], mesh["cp"]),
        _sequences,
        places,
    )


def _experts(shape: dict[str, int]) -> Case:
    return Case(
        shape,
        lambda: Moe(None, layers=1),
        lambda model, mesh: Moe(mesh["ep"], layers=1),
        lambda: (torch.randn(2, 6, WIDTH),),
        1,
    )


def _neighbors(name: str, shape: dict[str, int], ring: int, places: int) -> Case:
    """Share sequences between ranks that form no axis of the mesh, or all of a data axis."""

    def parallelize(model: Any, mesh: DeviceMesh) -> nn.Module:
        sizes = (4 // ring, ring)
        return Decoder(ATTENTIONS[name], init_device_mesh(mesh.device_type, sizes, mesh_dim_names=("a", "b"))["b"])

    return Case(shape, lambda: Decoder(ATTENTIONS[name], None), parallelize, _sequences, places)


CASES = {
    "mlps": Case(SHAPE, Mlps, _mlps, rows, 1),
    "odd": Case(SHAPE, Odd, lambda model, mesh: odd(mesh["tp"]), few_rows, 2),
    "tied": Case(SHAPE, Tied, _tied, _words, 2),
    "gathered": _context("gathered", {"dp": 2, "cp": 2}, 2),
    "by heads": _context("by heads", {"dp": 2, "cp": 2}, 1),
    "ring": _context("ring", {"dp_replicate": 2, "dp_shard": 1, "cp": 2}, 2),
    "context alone": _context("ring", {"cp": 4}, 4),
    "neighbors": _neighbors("ring", {"dp": 4}, 2, 2),
    "neighbors by heads": _neighbors("by heads", {"dp": 4}, 2, 1),
    "neighbors and replicas": _neighbors("gathered", {"replicate": 2, "dp": 2}, 2, 2),
    "neighbors on a context axis": _neighbors("ring", {"dp": 1, "cp": 4}, 2, 4),
    "all of a data axis": _neighbors("ring", {"dp": 4}, 4, 4),
    "experts": _experts({"dp": 2, "ep": 2}),
    "experts and replicas": _experts({"replicate": 2, "dp": 1, "ep": 2}),
}


def _mesh(shape: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))


def _trained(
    model: nn.Module, batch: Callable[[], tuple[Any, ...]], mesh: DeviceMesh
) -> tuple[list[Any], dict[str, Any]]:
    """Return losses and gradients; ranks of a tensor axis have the same batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    place = dist.get_rank() // (mesh["tp"].size() if "tp" in mesh.mesh_dim_names else 1)
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + place)
        optimizer.zero_grad()
        loss = model(*batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses, grads_of(model)


def as_compiled(rank: int, world_size: int, path: str, name: str, hardware: str | None = None) -> list[str]:
    """Train the loaded model next to one compiled here; return the reasons of the loaded model's programs."""
    shape, _, parallelize, batch, _ = CASES[name]
    mesh = _mesh(shape)
    expected = _trained(graphshard.compile(parallelize(None, mesh), mesh, backend="eager"), batch, mesh)
    model = parallelize(None, mesh)
    with nothing_is_compiled():
        graphshard.load(path, model, mesh)
        found = _trained(model, batch, mesh)
    assert all(map(torch.equal, found[0], expected[0]))
    assert_same(found[1], expected[1], "gradients")
    again = graphshard.compile(parallelize(None, mesh), mesh, backend="eager", artifact=path, hardware=hardware)
    assert all(map(torch.equal, _trained(again, batch, mesh)[0], expected[0]))
    return [program.reason for program in graphshard.programs(again)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_losses_match_compile(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """One file for all coordinates on these axes, with separate programs if they differ."""
    shape, make, parallelize, batch, places = CASES[name]
    path = tmp_path / "model.gshard"
    with torch.device("meta"):
        model = make()
    graphshard.export(
        model, shape, path, example_inputs=batch(), parallelize=parallelize, backend="eager", device="cpu"
    )
    assert not dist.is_initialized()
    stored = [row.place for row in read_artifact(path).manifest.meshes]
    assert stored == ([None] if places == 1 else list(range(places)))
    reasons = ranks(4).run(as_compiled, str(path), name)
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


def test_rejects_a_different_mesh_or_plan(ranks: Ranks, tmp_path: Path) -> None:
    """The errors name a different mesh, and a different plan."""
    path = tmp_path / "model.gshard"
    graphshard.export(Mlps(), SHAPE, path, example_inputs=rows(), parallelize=_mlps, backend="eager", device="cpu")
    for mesh, plan in ranks(4).run(_other, str(path)):
        assert "mesh was {'dp': 2, 'tp': 2} when it was exported and is {'dp': 1, 'tp': 4} here" in mesh
        assert "of layers.0.down.weight was" in plan


def _context_of_others(rank: int, world_size: int, path: str) -> list[str]:
    found = []
    for shape in ({"dp": 1, "cp": 4}, {"dp": 4}, {"cp": 2, "dp": 2}):
        mesh = _mesh(shape)
        with pytest.raises(ArtifactError if "dp" in next(iter(shape)) else ArgumentError) as error:
            graphshard.load(path, Decoder(ATTENTIONS["by heads"], mesh["cp"] if "cp" in shape else None), mesh)
        found.append(str(error.value))
    mesh = _mesh({"dp": 2, "cp": 2})
    with pytest.raises(ArtifactError) as caught:
        graphshard.load(path, Decoder(ATTENTIONS["by heads"], mesh["cp"]), mesh["dp", "cp"]._flatten("dp_cp"))
    return [*found, str(caught.value)]


@pytest.mark.slow
def test_rejects_the_same_number_of_ranks_on_other_axes(ranks: Ranks, tmp_path: Path) -> None:
    """All of them shard over four ranks; the model's communication differs."""
    path = tmp_path / "model.gshard"
    shape, make, parallelize, batch, _ = CASES["by heads"]
    graphshard.export(
        make(), shape, path, example_inputs=batch(), parallelize=parallelize, backend="eager", device="cpu"
    )
    was = "mesh was {'dp': 2, 'cp': 2} when it was exported and is "
    for narrower, none, order, flat in ranks(4).run(_context_of_others, str(path)):
        assert was + "{'dp': 1, 'cp': 4} here" in narrower
        assert was + "{'dp': 4} here" in none
        assert "data axes that replicate are outermost" in order
        assert was + "{'dp_cp': 4} here" in flat


def _without_group(rank: int, world_size: int, path: str) -> str:
    model = CASES["neighbors"].parallelize(None, mesh := _mesh({"dp": 4}))
    with mock.patch.object(load, "group_of", return_value=None), pytest.raises(ArtifactError) as error:
        graphshard.load(path, model, mesh)
    assert error.value.field == "mesh"
    return str(error.value)


@pytest.mark.slow
def test_neighbors_without_a_group(ranks: Ranks, tmp_path: Path) -> None:
    """A model built differently on the ranks than for the export has no process group for its programs."""
    path = tmp_path / "model.gshard"
    shape, make, parallelize, batch, _ = CASES["neighbors"]
    graphshard.export(
        make(), shape, path, example_inputs=batch(), parallelize=parallelize, backend="eager", device="cpu"
    )
    for rank, message in enumerate(ranks(4).run(_without_group, str(path))):
        first = rank // 2 * 2
        assert f"communicates among neighbours (dp/2), ranks [{first}, {first + 1}] here, and this process" in message
        assert "Make the model as it was made for the export" in message


def test_a_limit_with_uneven_shards(tmp_path: Path) -> None:
    """Ranks report memory with a plan, and export has no plan."""
    shape, make, parallelize, batch, _ = CASES["odd"]
    given = {"example_inputs": batch(), "parallelize": parallelize, "device": "cpu", "backend": "eager"}
    with pytest.raises(
        ArgumentError, match=r"^memory_limit=1000 cannot be kept in a file for a mesh on .* Leave it out"
    ):
        graphshard.export(make(), shape, tmp_path / "odd.gshard", memory_limit=1000, **given)
