"""`unshard` gathers parameters to the device of the mesh, wherever their shards are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard.runtime.unsharded
from graphshard.ir.mesh import Mesh
from graphshard.ir.operators import copied_to
from graphshard.ir.param_table import build_table
from graphshard.ir.units import precision_of
from graphshard.runtime.process_groups import make_groups
from graphshard.runtime.shards import Storage, param_refs, shard_module
from graphshard.runtime.unsharded import start_gathering
from tests.ranks import FakeWorld


@pytest.mark.parametrize("width", [4, 256], ids=["packed", "as they are"])
def test_shards_on_the_host_are_gathered_on_the_device(
    fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """NCCL does not support host tensors. The meta device replaces the GPU.

    The copies synchronize with the host (`tests/ir/test_operators.py`, and the race detector of streams).
    """
    copied: list[torch.Tensor] = []

    def copies(shards: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        copied.extend(copied_to(shards, device))
        return list(copied)

    monkeypatch.setattr(graphshard.runtime.unsharded, "copied_to", copies)
    fake_world(2)
    mesh, host = init_device_mesh("cpu", (2,)), torch.device("cpu")
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    axes = Mesh.of(mesh)
    table = build_table(model, mesh=axes, units=(), precision=precision_of(None, ()), reshard_after_forward=None)
    shard_module(model, table, mesh, host, Storage(host))
    pairs = [(ref.row, ref.param) for ref in param_refs(model, table)]
    for device in ("cpu", "meta"):
        copied.clear()
        arriving = start_gathering(pairs, axes, make_groups(axes, mesh), torch.device(device))
        full = {name: value.wait() for name, value in arriving.items()}
        assert [shard.device.type for shard in copied] == [device] * len(pairs)
        assert {value.device.type for value in full.values()} == {device}
        assert {name: value.shape for name, value in full.items()} == {row.name: row.shape for row in table}
