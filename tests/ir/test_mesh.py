"""Mesh axes by role, and rejected meshes."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from graphshard.errors import ArgumentError
from graphshard.ir.mesh import Axis, AxisPlacement, DTensorLayout, Mesh, by_itself, seen_shape
from tests.ranks import FakeWorld

ONE = Mesh((Axis("shard", 8, "shard"),))
TWO = Mesh((Axis("replicate", 2, "replicate"), Axis("shard", 4, "shard")))


# --- from shapes and device meshes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "mesh"),
    [
        (8, ONE),
        ((8,), ONE),
        ([8], ONE),
        ({"shard": 8}, ONE),
        ({"dp": 3}, Mesh((Axis("dp", 3, "shard"),))),
        ((2, 4), TWO),
        ({"replicate": 2, "shard": 4}, TWO),
        # The position gives the role, not the name.
        ({"shard": 2, "replicate": 4}, Mesh((Axis("shard", 2, "replicate"), Axis("replicate", 4, "shard")))),
    ],
    ids=str,
)
def test_shapes(shape: Any, mesh: Mesh) -> None:
    """The last axis shards, the first of two replicates; unnamed axes are named after their roles."""
    assert Mesh.of_shape(shape) == mesh


def test_device_meshes(fake_world: FakeWorld) -> None:
    """Names come from the mesh; two axes need names, unless only the shape counts."""
    fake_world(8)
    named = init_device_mesh("cpu", (2, 4), mesh_dim_names=("nodes", "gpus"))
    axes = Mesh((Axis("nodes", 2, "replicate"), Axis("gpus", 4, "shard")))
    assert Mesh.of(named) == Mesh.of_shape(named) == axes
    assert Mesh.of(init_device_mesh("cpu", (8,))) == ONE
    unnamed = init_device_mesh("cpu", (2, 4))
    assert Mesh.of_shape(unnamed) == TWO
    with pytest.raises(ArgumentError, match=r"^mesh has two axes without names\. Name them, as in init_device_mesh"):
        Mesh.of(unnamed)


def test_an_axis_that_only_replicates() -> None:
    """Internally an axis of one rank shards, which is hidden from users."""
    mesh = Mesh.of_shape({"dp": 4, "dp/1": 1})
    assert (mesh.only_replicates, mesh.replicate, mesh.shard) == (True, Axis("dp", 4, "replicate"), by_itself("dp"))
    assert mesh.placements(0) == (Replicate(),)
    cut = DTensorLayout((8, 4), (AxisPlacement("tp", 0),))
    assert mesh.with_tensor("tp", 2).placements(0, cut) == (Replicate(), Shard(0))
    assert seen_shape({"dp": 4, "dp/1": 1, "tp": 2}) == ({"dp": 4, "tp": 2}, "dp")
    for shape in ({"dp": 4, "dp/1": 2}, {"dp": 4, "shard": 1}):
        assert not Mesh.of_shape(shape).only_replicates
        assert seen_shape(shape) == (shape, None)


def test_device_meshes_with_too_many_axes(fake_world: FakeWorld) -> None:
    fake_world(8)
    wanted = r"^mesh must have one axis \(to shard over\) or two \(to replicate and to shard over\), got 3 "
    named = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(
        ArgumentError, match=wanted + r"\(\('a', 'b', 'c'\)\)\. Pass those axes of it, such as mesh\['b'"
    ):
        Mesh.of(named)
    with pytest.raises(ArgumentError, match=wanted + r"\(no axis names\)\. Pass those axes of it, after naming them"):
        Mesh.of(init_device_mesh("cpu", (2, 2, 2)))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("8", "mesh must be a DeviceMesh or a shape such as (8,), (2, 4) or {'replicate': 2, 'shard': 4}, got '8'."),
        (True, "mesh must be a DeviceMesh or a shape such as (8,), (2, 4) or {'replicate': 2, 'shard': 4}, got True."),
        (2.0, "mesh must be a DeviceMesh or a shape such as (8,), (2, 4) or {'replicate': 2, 'shard': 4}, got 2.0."),
        (0, "mesh must have positive sizes, got 0."),
        ((-1, 2), "mesh must have positive sizes, got (-1, 2)."),
        ({}, "mesh must have positive sizes, got {}."),
        ((), "mesh must have positive sizes, got ()."),
        ({"shard": "8"}, "mesh must have positive sizes, got {'shard': '8'}."),
        (
            (2, 2, 2),
            "mesh must have one axis (to shard over) or two (to replicate and to shard over), got 3: (2, 2, 2).",
        ),
    ],
)
def test_wrong_shapes(shape: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        Mesh.of_shape(shape)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            (Axis("dp", 2, "replicate"), Axis("dp", 4, "shard")),
            "mesh has 2 axes with the name 'dp'. Give each a different name.",
        ),
        (
            (Axis("a", 2, "shard"), Axis("b", 4, "shard")),
            "mesh has 2 axes with the role 'shard'. Give each a different role.",
        ),
        (
            (Axis("a", 2, "shard"), Axis("b", 4, "shrad")),
            "mesh has an axis 'b' with the role 'shrad'. Use one of 'replicate', 'shard', 'regather', 'inner', "
            "'tensor', 'pipeline'.",
        ),
        (
            (Axis("a", 2, "replicate"),),
            "mesh has no axis with the role 'shard'. Add one; of size 1 it cuts nothing.",
        ),
        ((), "mesh has no axis with the role 'shard'. Add one; of size 1 it cuts nothing."),
    ],
)
def test_rejects_invalid_axes(axes: Any, message: str) -> None:
    """However a mesh is created, including from a file."""
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        Mesh(axes)


# --- queries ------------------------------------------------------------------------------------------------------


def test_axes_by_role() -> None:
    assert (ONE.shard, ONE.replicate, ONE.regather) == (Axis("shard", 8, "shard"), None, None)
    assert (TWO.shard.size, TWO.replicate) == (4, Axis("replicate", 2, "replicate"))
    assert TWO.named("shard") == TWO.shard
    with pytest.raises(KeyError, match="tensor"):
        TWO.named("tensor")


def test_regather_among_neighbors() -> None:
    """An axis for communication that is not part of the grid: it adds no ranks."""
    mesh = TWO.with_regather(2)
    assert mesh.regather == mesh.named("shard/2") == Axis("shard/2", 2, "regather")
    assert (mesh.axes, mesh.grid) == ((*TWO.axes, mesh.regather), TWO.axes)
    assert (mesh.size, mesh.shape, str(mesh)) == (8, {"replicate": 2, "shard": 4}, "replicate 2, shard 4")
    assert mesh.placements(1) == TWO.placements(1)
    assert mesh != TWO
    assert Mesh.of_shape(mesh.shape) == TWO


def test_rejects_the_name_of_a_neighbor_axis() -> None:
    taken = Mesh.of_shape({"shard/2": 2, "shard": 4})
    with pytest.raises(ArgumentError, match="mesh has 2 axes with the name 'shard/2'"):
        taken.with_regather(2)


def test_distance_of_ranks() -> None:
    """Along the inner axis ranks are adjacent, along the outer one they are an inner axis apart."""
    mesh = TWO.with_regather(2)
    assert [mesh.distance(axis) for axis in mesh.axes] == [4, 1, 1]
    assert [mesh.place(axis) for axis in mesh.axes] == [0, 1, 1]


def test_placements() -> None:
    assert ONE.placements(0) == (Shard(0),)
    assert TWO.placements(1) == (Replicate(), Shard(1))


def test_another_size() -> None:
    assert TWO.resized("shard", 16) == Mesh.of_shape((2, 16))
    assert TWO.resized("regather", 16) == TWO


def test_plain_data() -> None:
    """Hashable, and convertible to JSON."""
    assert {TWO: 1}[Mesh.of_shape((2, 4))] == 1
    data = json.loads(json.dumps(asdict(TWO.with_regather(2))))
    assert Mesh(tuple(Axis(**axis) for axis in data["axes"])) == TWO.with_regather(2)
