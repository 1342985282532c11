"""A mixture-of-experts model with expert parallelism, and functions that shard it with graphshard or FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from graphshard.torch_compat.dtensor import ShardPlacementResult

needs_placements = pytest.mark.skipif(ShardPlacementResult is None, reason="torch 2.11 has no ShardPlacementResult")

NAMES = ("replicate", "dp", "ep")
EXPERTS, TOP, WIDTH, HIDDEN = 4, 2, 8, 16


def mesh_of(*shape: int) -> DeviceMesh:
    """Build a mesh of data axes and an innermost expert axis."""
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-len(shape) :])


def dense_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of all parameters outside of experts."""
    flat = mesh["dp", "ep"]._flatten("dp_ep")
    return mesh["replicate", "dp_ep"] if mesh.ndim == 3 else flat


def expert_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the experts' parameters."""
    return mesh["replicate", "dp"] if mesh.ndim == 3 else mesh["dp"]


def one_by_one(rows: Tensor, sizes: list[int], up: Tensor, down: Tensor) -> Tensor:
    """Compute each expert with separate matmuls."""
    parts = rows.split(sizes)
    return torch.cat([F.gelu(part @ up[expert]) @ down[expert] for expert, part in enumerate(parts)])


def grouped(rows: Tensor, sizes: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute all experts with one grouped matmul, in bfloat16."""
    ends = sizes.cumsum(0).to(torch.int32)
    hidden = F.silu(F.grouped_mm(rows.bfloat16(), up.bfloat16(), offs=ends))
    return F.grouped_mm(hidden, down.bfloat16(), offs=ends).to(rows.dtype)


class Experts(nn.Module):
    """Local experts: takes tokens sorted by expert and the count for each expert; some experts are on other ranks."""

    def __init__(self, axis: DeviceMesh | None, product: Callable[..., Tensor]) -> None:
        super().__init__()
        self.axis, self.product = axis, product
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.2)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        if self.axis is None:
            return self._products(rows, counts, up, down)
        group, size = self.axis.get_group(), self.axis.size()
        own = EXPERTS // size
        arriving = collectives.wait_tensor(collectives.all_to_all_single(counts, None, None, group)).view(size, own)
        sent, taken = counts.view(size, own).sum(1).tolist(), arriving.sum(1).tolist()
        got = collectives.all_to_all_single_autograd(rows, taken, sent, group)
        of = (
            torch.arange(own, device=rows.device)
            .repeat(size)
            .repeat_interleave(arriving.flatten(), output_size=sum(taken))
        )
        order = of.argsort(stable=True)
        made = self._products(got[order], arriving.sum(0), up, down)
        return collectives.all_to_all_single_autograd(made[order.argsort()], sent, taken, group)

    def _products(self, rows: Tensor, counts: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return self.product(rows, counts.tolist() if self.product is one_by_one else counts, up, down)


class Layer(nn.Module):
    def __init__(self, axis: DeviceMesh | None, product: Callable[..., Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts(axis, product)
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(TOP)
        order = chosen.flatten().argsort(stable=True)
        counts = F.one_hot(chosen, EXPERTS).sum((0, 1))
        made = self.experts(rows[order // TOP], counts)[order.argsort()].unflatten(0, (-1, TOP))
        return x + (self.shared(rows) + (made * weights.unsqueeze(-1)).sum(1)).view_as(x)


class Moe(nn.Module):
    """Layers of a dense part and experts, of which each token uses two.

    Args:
        axis: the expert axis; None keeps all experts on every rank.
    """

    def __init__(self, axis: DeviceMesh | None, product: Callable[..., Tensor] = one_by_one, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(axis, product) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 5)
        for layer in self.layers if axis is not None else ():
            for name, weight in list(layer.experts.named_parameters()):
                dealt = distribute_tensor(weight.detach(), axis, [Shard(0)], src_data_rank=None)
                setattr(layer.experts, name, nn.Parameter(dealt))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def batch(step: int, rank: int) -> Tensor:
    """Return inputs: [2, 6, width]."""
    return torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def placements(model: nn.Module, mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """Return FSDP2's function that names a mesh for each parameter."""

    def info(axes: DeviceMesh) -> FSDPMeshInfo:
        if axes.ndim == 2:
            return HSDPMeshInfo(axes, replicate_mesh_dim=0, shard_mesh_dim=1)
        return FSDPMeshInfo(axes, shard_mesh_dim=0)

    own = {p for layer in model.layers for p in layer.experts.parameters()}
    of_experts, of_others = info(expert_axes(mesh)), info(dense_axes(mesh))
    return lambda p: ShardPlacementResult(Shard(0), of_experts if p in own else of_others)


def by_placements(shard: Callable[..., Any], model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shard each layer as one unit, whose parameters are on two meshes."""
    function, axes = placements(model, mesh), dense_axes(mesh)
    for layer in model.layers:
        shard(layer, mesh=axes, shard_placement_fn=function, **options)
    return shard(model, mesh=axes, shard_placement_fn=function, **options)


def by_units(shard: Callable[..., Any], model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shard experts as separate units on their mesh."""
    axes = dense_axes(mesh)
    for layer in model.layers:
        shard(layer.experts, mesh=expert_axes(mesh), **options)
        shard(layer, mesh=axes, **options)
    return shard(model, mesh=axes, **options)


def fsdp2(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shard with FSDP2, which rejects two meshes of the same ranks in one unit."""
    way = by_units if ShardPlacementResult is None or mesh["ep"].size() == 1 else by_placements
    return way(fully_shard, model, mesh, **options)
