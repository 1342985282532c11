"""Shards as DTensors."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh

from graphshard.ir.mesh import Mesh
from graphshard.ir.param_table import build_table
from graphshard.ir.units import Precision
from graphshard.runtime.shards import Storage, shard_in, shard_module
from tests.helpers import Blocks
from tests.ranks import FakeWorld


def test_offloaded_shards_stay_on_the_host(fake_world: FakeWorld) -> None:
    """On a GPU mesh, to which `DTensor.from_local` would move them; no GPU is needed."""
    fake_world(2)
    model = Blocks(2, 8)
    mesh = init_device_mesh("cuda", (2,))
    table = build_table(model, mesh=Mesh.of(mesh), units=(), precision=Precision(), reshard_after_forward=None)
    shard_module(model, table, mesh, torch.device("cuda"), Storage(torch.device("cpu")))
    assert {shard_in(param).device.type for param in model.parameters()} == {"cpu"}
    assert {param.device_mesh.device_type for param in model.parameters()} == {"cuda"}
