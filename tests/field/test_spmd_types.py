"""Plain parameters with annotations of spmd_types, as torchtitan's default backend makes them, sharded by FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.torch_version import TorchVersion

import graphshard
from graphshard.errors import UnsupportedError
from tests.distributed.twins import assert_same, params_of
from tests.ranks import FakeWorld, Ranks

spmd = pytest.importorskip("spmd_types", reason="pip install spmd-types")
READ_BY_FSDP2 = pytest.mark.skipif(TorchVersion(torch.__version__) < "2.14", reason="FSDP2 reads them from 2.14 on")


def _model(mesh: DeviceMesh) -> Any:
    from torch.distributed.fsdp import DataParallelMeshDims

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    for param in model.parameters():
        spmd.assert_type(param, {mesh.get_group(axis): spmd.R for axis in mesh.mesh_dim_names or ()})
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    return model


def _train(model: nn.Module) -> dict[str, Any]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), {}
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(torch.rand(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
    return found


def _takes_over(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    ours, theirs = _model(mesh), _model(mesh)
    graphshard.compile(ours, backend="eager")
    assert_same(_train(ours), _train(theirs), "losses")
    assert_same(params_of(ours), params_of(theirs), "parameters")
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(UnsupportedError, match=r"parameter 0\.weight has annotations of spmd_types on other axes"):
        graphshard.compile(_model(both), backend="eager")


@READ_BY_FSDP2
def test_annotated_parameters_are_taken_over(ranks: Ranks) -> None:
    ranks(2).run(_takes_over)


@pytest.mark.parametrize("sharding", [graphshard.compile, graphshard.fully_shard])
def test_gradients_that_annotations_want_summed_over_other_axes(fake_world: FakeWorld, sharding: Any) -> None:
    """They would silently not be: an error names the parameter. Invariant ones need no sum."""
    fake_world(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def annotated(tp: Any) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4))
        for param in model.parameters():
            spmd.assert_type(param, {mesh.get_group("dp"): spmd.R, mesh.get_group("tp"): tp})
        return model

    with pytest.raises(UnsupportedError, match=r"parameter 0\.weight is annotated as replicated \(spmd_types\.R\) on"):
        sharding(annotated(spmd.R), mesh=mesh["dp"])
    sharding(annotated(spmd.I), mesh=mesh["dp"])
