"""Experts, with other parameters as DTensors on the whole mesh: FSDP2's full SPMD mesh, and a mesh per parameter."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import graphshard
from tests.distributed.expert_parallel import (
    EXPERTS,
    TOP,
    FSDPMeshInfo,
    HSDPMeshInfo,
    Layer,
    Moe,
    ShardPlacementResult,
    batch,
    mesh_of,
)
from tests.distributed.tensor_parallel import placed
from tests.distributed.twins import BF16, FP32, OURS, assert_same, grads_of, local, params_of
from tests.ranks import Ranks

if not hasattr(fsdp, "DataParallelMeshDims"):
    pytest.skip("torch 2.11 has no DataParallelMeshDims", allow_module_level=True)
Dims = fsdp.DataParallelMeshDims

R = Replicate()


class WholeLayer(Layer):
    """Computes with DTensors, except for the experts."""

    def forward(self, x: DTensor) -> DTensor:
        rows = self.norm(x).flatten(0, 1)
        shared = self.shared(rows).redistribute(placements=rows.placements)
        scores, shared, own = (made.to_local() for made in (self.gate(rows), shared, rows))
        weights, chosen = scores.softmax(-1).topk(TOP)
        order = chosen.flatten().argsort(stable=True)
        counts = F.one_hot(chosen, EXPERTS).sum((0, 1))
        made = self.experts(own[order // TOP], counts)[order.argsort()].unflatten(0, (-1, TOP))
        back = x.to_local() + (shared + (made * weights.unsqueeze(-1)).sum(1)).view_as(x.to_local())
        return DTensor.from_local(back, x.device_mesh, x.placements, run_check=False)


def _moe(mesh: DeviceMesh, *, whole: bool) -> nn.Module:
    """Place experts on the expert axis only, or on the whole mesh like everything else.

    A last axis "tp" shards the dense part.
    """
    model = Moe(mesh["ep"], layers=2)
    for layer in model.layers:
        layer.__class__ = WholeLayer
    for path, module in model.named_modules():
        for name, param in list(module.named_parameters(recurse=False)):
            made: Tensor | None = None
            if not isinstance(param, DTensor):
                cuts = ["tp"] if path.endswith("shared") else []
                cut = [Shard(0) if axis in cuts else R for axis in mesh.mesh_dim_names or ()]
                made = distribute_tensor(param.detach(), mesh, cut)
            elif whole:
                along = [Shard(0) if axis == "ep" else R for axis in mesh.mesh_dim_names or ()]
                made = DTensor.from_local(param.to_local().detach(), mesh, along, run_check=False)
            if made is not None:
                module.register_parameter(name, nn.Parameter(made))
    return model


def _dims(mesh: DeviceMesh, *shard: str) -> Dims:
    return Dims(shard=shard, replicate="replicate" if "replicate" in (mesh.mesh_dim_names or ()) else None)


def _sharded(shard: Callable[..., Any], mesh: DeviceMesh, *, whole: bool, **options: Any) -> nn.Module:
    model = _moe(mesh, whole=whole)
    given = {"dp_mesh_dims": _dims(mesh, "dp"), "spmd_mesh": mesh} if whole else {}
    axes = mesh["replicate", "dp"] if "replicate" in (mesh.mesh_dim_names or ()) else mesh["dp"]
    info: Any = FSDPMeshInfo(axes, shard_mesh_dim=0, **given) if axes.ndim == 1 else None
    info = info or HSDPMeshInfo(axes, replicate_mesh_dim=0, shard_mesh_dim=1, **given)
    own = {p for layer in model.layers for p in layer.experts.parameters()}
    options |= {
        "mesh": mesh,
        "dp_mesh_dims": _dims(mesh, "dp", "ep"),
        "shard_placement_fn": lambda p: ShardPlacementResult(Shard(0), info) if p in own else None,
    }
    for layer in model.layers:
        shard(layer, **options)
    return shard(model, **options)


def _input(mesh: DeviceMesh, step: int) -> DTensor:
    """Return a part of the batch for each data rank, equal on ranks of a tensor axis."""
    names = mesh.mesh_dim_names or ()
    tensors = mesh["tp"].size() if "tp" in names else 1
    along = [R if axis == "tp" else Shard(0) for axis in names]
    return DTensor.from_local(batch(step, dist.get_rank() // tensors), mesh, along, run_check=False)


def _alike(pair: list[nn.Module], mesh: DeviceMesh, steps: int = 3) -> None:
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False) for model in pair]
    for step in range(steps):
        losses = []
        before = {name: local(param).detach().clone() for name, param in params_of(pair[0]).items()}
        for model in pair:
            loss = model(_input(mesh, step))
            loss.backward()
            losses.append({"loss": loss.to_local().detach()})
        assert_same(*losses, f"step {step}")
        assert_same(*map(grads_of, pair), f"gradients of step {step}")
        assert placed(pair[0]) == placed(pair[1])
        for optim in optims:
            optim.step()
            optim.zero_grad()
        assert_same(*map(params_of, pair), f"parameters after step {step}")
        assert any(not torch.equal(local(p), before[name]) for name, p in params_of(pair[0]).items())
    assert_same(*(model.state_dict() for model in pair), "at the end")


MESHES: dict[str, Callable[[], DeviceMesh]] = {
    "two axes": lambda: mesh_of(2, 2),
    "replicas": lambda: mesh_of(2, 1, 2),
    "tensor axis": lambda: init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "ep", "tp")),
}


def _train(rank: int, world_size: int, name: str, whole: bool, policy: MixedPrecisionPolicy) -> None:
    mesh = MESHES[name]()
    _alike([_sharded(shard, mesh, whole=whole, mp_policy=policy) for shard in (OURS, fully_shard)], mesh)


@pytest.mark.parametrize("whole", [False, True], ids=["dealt out", "whole"])
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.slow
def test_matches_fsdp2(ranks: Ranks, name: str, whole: bool) -> None:
    """Losses, gradients, placements, steps and state; experts on their axis only, and on the whole mesh."""
    ranks(4).run(_train, name, whole, FP32)


@pytest.mark.slow
def test_in_bfloat16(ranks: Ranks) -> None:
    ranks(4).run(_train, "two axes", True, BF16)


def _dropped(rank: int, world_size: int) -> bool:
    mesh = MESHES["two axes"]()
    model = _sharded(OURS, mesh, whole=True, mp_policy=FP32)
    model(_input(mesh, 0)).backward()
    kept = weakref.ref(model)
    del model
    gc.collect()
    return kept() is not None


def test_a_dropped_model_is_freed(ranks: Ranks) -> None:
    """Although experts are DTensors that are their own shards."""
    assert ranks(4).run(_dropped) == [False] * 4


def _ways(rank: int, world_size: int) -> None:
    mesh = MESHES["two axes"]()
    # Axis names define the same, and which parameters are experts.
    for whole in (False, True):
        by_name = graphshard.compile(_moe(mesh, whole=whole), mesh, backend="eager")
        _alike([by_name, _sharded(fully_shard, mesh, whole=whole)], mesh, steps=1)
    pair = [_sharded(shard, mesh, whole=True) for shard in (OURS, fully_shard)]
    for last in (False, True):
        for model in pair:
            model.set_requires_gradient_sync(last)
            model(_input(mesh, int(last))).backward()
    assert_same(*map(grads_of, pair), "gradients of two microbatches")
    for model in pair:
        model.zero_grad()
        model.layers[0].unshard()
    assert placed(pair[0]) == placed(pair[1])
    assert_same(*(params_of(model.layers[0]) for model in pair), "shown gathered")
    _alike(pair, mesh, steps=1)
    whole = {name: value.full_tensor() for name, value in pair[0].state_dict().items()}
    again = _sharded(OURS, mesh, whole=False)
    again.load_state_dict(whole)
    assert_same(again.state_dict(), pair[0].state_dict(), "of full tensors")


@pytest.mark.slow
def test_ways_to_train_and_state(ranks: Ranks) -> None:
    ranks(4).run(_ways)
