"""Numbers of experts that an axis does not divide, and experts that are also sharded over a tensor axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import graphshard
from tests.distributed.expert_parallel import WIDTH
from tests.distributed.tensor_parallel import placed
from tests.distributed.twins import assert_same, grads_of, params_of
from tests.ranks import Ranks

HIDDEN = 6


class Experts(nn.Module):
    """Any number of experts; tokens are sorted by expert and counted.

    Args:
        mesh: the expert axis, and a tensor axis if the hidden width is sharded.
    """

    def __init__(self, number: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.axis = mesh, mesh if mesh.ndim == 1 else mesh["ep"]
        self.tp = None if mesh.ndim == 1 else mesh["tp"]
        self.sizes = [len(part) for part in torch.arange(number).chunk(self.axis.size())]
        weights = {"up": torch.randn(number, WIDTH, HIDDEN), "down": torch.randn(number, HIDDEN, WIDTH)}
        for name, weight in weights.items():
            along: Sequence[Any] = [Shard(0), Shard(2 if name == "up" else 1)][: mesh.ndim]
            setattr(self, name, nn.Parameter(distribute_tensor(weight * 0.3, mesh, along, src_data_rank=None)))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        group, ranks = self.axis.get_group(), self.axis.size()
        own = self.sizes[self.axis.get_local_rank()]
        up, down = self.up.to_local(), self.down.to_local()
        arriving = collectives.all_to_all_single(counts, [own] * ranks, self.sizes, group)
        arriving = collectives.wait_tensor(arriving).view(ranks, own)
        sent = torch.stack([part.sum() for part in counts.split(self.sizes)]).tolist()
        taken = arriving.sum(1).tolist()
        got = collectives.all_to_all_single_autograd(x, taken, sent, group)
        of = torch.arange(own).repeat(ranks).repeat_interleave(arriving.flatten(), output_size=sum(taken))
        order = of.argsort(stable=True)
        parts = got[order].split(arriving.sum(0).tolist())
        made = torch.cat([F.gelu(part @ up[e]) @ down[e] for e, part in enumerate(parts)])
        if self.tp is not None:
            made = collectives.wait_tensor(collectives.all_reduce(made, "sum", self.tp.get_group()))
        return collectives.all_to_all_single_autograd(made[order.argsort()], sent, taken, group)


class Mixture(nn.Module):
    def __init__(self, number: int, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.experts = nn.Linear(WIDTH, number), Experts(number, mesh)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        made = self.experts(x[order], F.one_hot(chosen, self.gate.out_features).sum(0))
        return self.head(x + made[order.argsort()] * weights.unsqueeze(-1)).square().mean()


def _same_steps(ours: nn.Module, theirs: nn.Module, place: int) -> None:
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False) for model in (ours, theirs)]
    for step in range(3):
        losses, lies = [], []
        for model in (ours, theirs):
            loss = model(torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(10 * step + place)))
            loss.backward()
            losses.append({"loss": loss.detach()})
            lies.append(placed(model))
        assert_same(*losses, f"step {step}")
        assert_same(grads_of(ours), grads_of(theirs), f"gradients of step {step}")
        assert lies[0] == lies[1]
        for optim in optims:
            optim.step()
            optim.zero_grad()
        assert_same(params_of(ours), params_of(theirs), f"after step {step}")


def _uneven(rank: int, world_size: int, number: int) -> tuple[int, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    theirs = Mixture(number, mesh["ep"])
    fully_shard(theirs.experts, mesh=mesh["dp"])
    fully_shard(theirs, mesh=mesh["dp", "ep"]._flatten("dp_ep"))
    ours = Mixture(number, mesh["ep"])
    graphshard.compile(ours, mesh, backend="eager", units=["experts"])
    _same_steps(ours, theirs, dist.get_rank())
    return tuple(ours.experts.up.to_local().shape)


@pytest.mark.parametrize(("number", "own"), [(3, [1, 1, 1, 0]), (5, [2, 1, 1, 1])])
@pytest.mark.quick_cases("3-own0")
def test_numbers_that_the_axis_does_not_divide(ranks: Ranks, number: int, own: list[int]) -> None:
    """The first ranks have more, as in FSDP2; the last ones may have none."""
    shapes = ranks(4).run(_uneven, number)
    assert [shape[0] for shape in shapes] == own


def _cut(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep", "tp"))
    axes, dense = mesh["ep", "tp"], mesh["dp", "ep"]._flatten("dp_ep")
    theirs = Mixture(4, axes)
    fully_shard(theirs.experts, mesh=mesh["dp"])
    fully_shard(theirs, mesh=dense)
    ours = Mixture(4, axes)
    graphshard.fully_shard(ours.experts, mesh=mesh["dp"])
    graphshard.fully_shard(ours, mesh=dense, backend="eager")
    _same_steps(ours, theirs, dense.get_local_rank())


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2)])
@pytest.mark.slow
def test_experts_on_two_axes(ranks: Ranks, shape: tuple[int, ...]) -> None:
    """Distributed over one, and sharded over the other."""
    ranks(4).run(_cut, shape)
