"""Meshes and models with experts that are rejected, each with an error that names it; no ranks are needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import graphshard
from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.ir.mesh import Axis, Mesh
from graphshard.options.mesh_axes import experts_by_name
from tests.distributed.expert_parallel import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    Moe,
    ShardPlacementResult,
    dense_axes,
    mesh_of,
    needs_placements,
    placements,
)
from tests.distributed.test_tensor_parallel_errors import _mesh
from tests.ranks import FakeWorld

if not hasattr(fsdp, "DataParallelMeshDims"):
    pytest.skip("torch 2.11 has no DataParallelMeshDims", allow_module_level=True)
DataParallelMeshDims = fsdp.DataParallelMeshDims


@pytest.mark.parametrize(
    ("names", "dims", "data"),
    [
        (("dp", "ep"), None, ("dp",)),
        (("dp_replicate", "dp_shard", "ep"), None, ("dp_replicate", "dp_shard")),
        (("dp", "cp", "ep"), None, ("dp_cp",)),
        (("dp", "expert"), None, ("dp",)),
        (("dp", "ep", "tp"), None, ("dp",)),
        (("x", "ep"), {"shard": ("x", "ep")}, ("x",)),
        (("x", "ep"), {"shard": "x"}, None),
        (("dp", "tp"), None, None),
    ],
    ids=str,
)
def test_axes_of_experts(fake_world: FakeWorld, names: Any, dims: Any, data: Any) -> None:
    """All data axes except the expert axis; an axis that `dp_mesh_dims` leaves out is the tensor axis."""
    fake_world(4)
    found = experts_by_name(_mesh(*names), dims and DataParallelMeshDims(**dims))
    assert (found and found.data.mesh_dim_names) == data


def test_rejects_a_second_mesh() -> None:
    own = Mesh.of_shape({"dp": 4}).with_tensor("ep", 2)
    mesh = Mesh.of_shape({"all": 8}).with_experts(own)
    assert [axis.name for axis in mesh.every_axis] == ["all", "dp", "ep"]
    assert mesh.named("dp") == Axis("dp", 4, "shard")
    assert [mesh.distance(mesh.named(name)) for name in ("all", "dp", "ep")] == [1, 2, 1]
    with pytest.raises(ArgumentError, match=r"^mesh has an axis 'dp', and the mesh of expert parameters has"):
        Mesh.of_shape({"dp": 8}).with_experts(own)


def _dealt(sizes: tuple[int, int] = (2, 2)) -> tuple[Moe, DeviceMesh]:
    mesh = mesh_of(*sizes)
    return Moe(mesh["ep"]), mesh


def _none_on_the_axis() -> None:
    graphshard.compile(Moe(None), mesh_of(2, 2))


def _alone() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    graphshard.compile(Moe(mesh), mesh)


def _two_axes() -> None:
    model, _ = _dealt()
    graphshard.compile(model, init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "ep", "expert")))


def _too_few() -> None:
    model, mesh = _dealt()
    model.extra = nn.Parameter(distribute_tensor(torch.randn(1, 4), mesh["ep"], [Shard(0)]))
    graphshard.compile(model, mesh)


def _several() -> None:
    model, mesh = _dealt()
    flat = dense_axes(mesh)

    def placement(param: nn.Parameter) -> Any:
        if param is model.head.weight:
            return ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh["dp"], shard_mesh_dim=0))
        return None

    graphshard.compile(model, mesh, shard_placement_fn=placement)
    assert flat.size() == 4


def _replicas_by_placement() -> None:
    model, mesh = _dealt()

    def placement(param: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), HSDPMeshInfo(mesh, replicate_mesh_dim=1, shard_mesh_dim=0))

    graphshard.compile(model, dense_axes(mesh), shard_placement_fn=placement)


def _same_name() -> None:
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "ep"))
    model = Moe(other["ep"])

    def placement(param: nn.Parameter) -> Any:
        if isinstance(param, torch.distributed.tensor.DTensor):
            return ShardPlacementResult(Shard(0), FSDPMeshInfo(other["x"], shard_mesh_dim=0))
        return None

    graphshard.compile(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("y", "x")), shard_placement_fn=placement)


def _among_neighbors() -> None:
    model, mesh = _dealt()
    graphshard.compile(model, mesh, reshard_after_forward=2)


def _unit_among_neighbors() -> None:
    model, mesh = _dealt((4, 1))
    graphshard.fully_shard(model.layers[0].experts, mesh=mesh["dp"], reshard_after_forward=2)
    graphshard.fully_shard(model, mesh=dense_axes(mesh))


def _three_meshes() -> None:
    model, mesh = _dealt()
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("other",))
    graphshard.fully_shard(model.layers[0].experts, mesh=mesh["dp"])
    graphshard.fully_shard(model.head, mesh=other)
    graphshard.fully_shard(model, mesh=dense_axes(mesh))


def _reduced_apart() -> None:
    model, mesh = _dealt()
    graphshard.compile(model, mesh, backend="eager").set_separate_reduce_scatter_group()


WRONG: dict[str, tuple[Callable[[], None], type[Exception], str]] = {
    "none on the axis": (
        _none_on_the_axis,
        ArgumentError,
        r"^mesh has an expert axis, 'ep', and all parameters of Moe lie alike along it\. Deal the experts out first",
    ),
    "no other axis": (
        _alone,
        ArgumentError,
        r"^mesh \('ep',\) has no axis besides 'ep' to shard experts over",
    ),
    "two expert axes": (_two_axes, ArgumentError, r"has 2 expert axes\. Give it one\.$"),
    "too few": (
        _too_few,
        UnsupportedError,
        r"^parameter extra of shape \[1, 4\] is dealt out along dim 0 to 2 ranks, and some of them get nothing\. Use",
    ),
    "several meshes": (_several, UnsupportedError, r"One other mesh is supported\.$"),
    "wrong mesh info": (
        _replicas_by_placement,
        ArgumentError,
        r"^shard_placement_fn returned a ShardPlacementResult with the mesh_info .* Give FSDPMeshInfo\(mesh",
    ),
    "one name for two axes": (_same_name, ArgumentError, r"each have an axis 'x', along which this rank has others\. "),
    "gathered among neighbors": (
        _among_neighbors,
        UnsupportedError,
        r"^reshard_after_forward=2 with parameters on another mesh, as experts are, is not supported",
    ),
    "a unit gathered among neighbors": (
        _unit_among_neighbors,
        UnsupportedError,
        r"^reshard_after_forward: layers\.0\.experts is sharded over another mesh than the whole, and gathers",
    ),
    "units on three meshes": (
        _three_meshes,
        UnsupportedError,
        r"^mesh: head was sharded over .*, others over .* One other mesh is supported\.$",
    ),
    "a group for reductions": (
        _reduced_apart,
        UnsupportedError,
        r"^set_separate_reduce_scatter_group: parameters of this model lie on two meshes, as those of experts do",
    ),
}


_PLACED = ("several meshes", "wrong mesh info", "one name for two axes")


@pytest.mark.parametrize("name", [pytest.param(n, marks=needs_placements if n in _PLACED else ()) for n in WRONG])
def test_rejects_invalid_meshes_and_models(fake_world: FakeWorld, name: str) -> None:
    fake_world(4)
    run, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        run()


@needs_placements
@pytest.mark.parametrize("run", [graphshard.compile, graphshard.fully_shard])
def test_the_placement_function_is_called_once_per_parameter(fake_world: FakeWorld, run: Callable[..., Any]) -> None:
    """As in FSDP2: the function may have side effects."""
    fake_world(4)
    model, mesh = _dealt()
    function, asked = placements(model, mesh), []
    run(model, mesh=dense_axes(mesh), shard_placement_fn=lambda param: asked.append(id(param)) or function(param))
    assert len(asked) == len(set(asked)) == len(list(model.parameters()))


def test_a_dumped_program_makes_the_groups_of_experts(fake_world: FakeWorld, tmp_path: Path) -> None:
    """Every axis that its code names."""
    fake_world(4)
    model, mesh = _dealt()
    graphshard.compile(model, mesh, backend="eager", dump=tmp_path, example_inputs=(torch.randn(2, 6, 8),))
    (file,) = tmp_path.rglob("backward.py")
    text = file.read_text()
    named = set(re.findall(r"self\.groups\['(\w+)'\]", text))
    made = set(re.findall(r"Executor\.groups\['(\w+)'\] =", text))
    assert {"dp", "ep", "dp_ep"} == named == made
    ranks = torch.arange(4).view(4)
    expressions = re.findall(r"new_subgroups_by_enumeration\((.+)\.tolist\(\)\)", text)
    assert [eval(e, {"ranks": ranks}).tolist() for e in expressions] == [
        [[0, 1, 2, 3]],
        [[0, 2], [1, 3]],
        [[0, 1], [2, 3]],
    ]
