"""Context parallelism in the model's code matches FSDP2 on the same model, and one rank with whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from tests.distributed.context_parallel import ATTENTIONS, Decoder, mesh_of, own, sequences, whole
from tests.distributed.twins import POLICIES, assert_same, fsdp2, grads_of, params_of, world_mesh
from tests.ranks import Ranks


def _train(model: nn.Module, mesh: DeviceMesh, steps: int = 3) -> list[Any]:
    """Train and return losses and the gradients of the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*(own(sequence, mesh["cp"]) for sequence in sequences(step, mesh)))
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
    return losses


def _data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Return the data axes as FSDP2 code builds them: the context axis is a part of the sharding axis."""
    if mesh.ndim == 1:
        return mesh
    flat = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    return flat if mesh.ndim == 2 else mesh["dp_replicate", "dp_shard_cp"]


def _compare_with_fsdp2(
    rank: int, world_size: int, shape: tuple[int, ...], name: str, policy: str, flat: bool
) -> list[str]:
    mesh = mesh_of(*shape)
    ours, theirs = (Decoder(ATTENTIONS[name], mesh["cp"]) for _ in range(2))
    options = {"mp_policy": POLICIES[policy]}
    fsdp2(theirs, _data_axes(mesh), **options)
    graphshard.compile(ours, _data_axes(mesh) if flat else mesh, backend="eager", **options)
    losses, theirs_of = _train(ours, mesh), _train(theirs, mesh)
    assert all(map(torch.equal, losses, theirs_of))
    assert_same(grads_of(ours), grads_of(theirs), "gradients")
    assert_same(params_of(ours), params_of(theirs), "parameters")
    for actual, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert actual.placements == expected.placements
        assert actual.device_mesh == expected.device_mesh
    return [line for line in graphshard.programs(ours)[0].communication if " over " in line]


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.quick_cases("fp32-gathered")
def test_matches_fsdp2(ranks: Ranks, name: str, policy: str) -> None:
    """Two data ranks with two context ranks each."""
    for lines in ranks(4).run(_compare_with_fsdp2, (2, 2), name, policy, False):
        kind = {"gathered": "all_gather_coalesced", "by heads": "all_to_all", "ring": "start_all_to_all"}[
            name
        ]  # next to a matmul
        assert f"forward: {kind} over dp_shard_cp/2" in lines


@pytest.mark.parametrize("shape", [(1, 2), (2,), (2, 1, 2)], ids=str)
@pytest.mark.slow
def test_meshes(ranks: Ranks, shape: tuple[int, ...]) -> None:
    """Context ranks only, on a separate mesh, and with replicas."""
    size = 4 if len(shape) == 3 else 2
    ranks(size).run(_compare_with_fsdp2, shape, "ring", "fp32", False)


@pytest.mark.slow
def test_a_flattened_axis(ranks: Ranks) -> None:
    """The group in the model's code is found among the neighbor groups of the axis."""
    ranks(4).run(_compare_with_fsdp2, (2, 2), "ring", "fp32", True)


def _compare_with_one_rank(rank: int, world_size: int, name: str) -> None:
    mesh = mesh_of(1, 2)
    model = graphshard.compile(Decoder(ATTENTIONS[name], mesh["cp"]), mesh)
    plain = Decoder(whole, None)
    model(*(own(sequence, mesh["cp"]) for sequence in sequences(0, mesh))).backward()
    plain(*sequences(0, mesh)).backward()
    for (key, actual), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.slow
def test_gradients_match_whole_sequences(ranks: Ranks, name: str) -> None:
    """Also with Inductor: the mean over two ranks with half a sequence each equals one rank."""
    ranks(2).run(_compare_with_one_rank, name)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return collectives.wait_tensor(collectives.all_reduce(x, "sum", mesh))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.wait_tensor(collectives.all_reduce(grad, "sum", ctx.mesh)), None


class _Centered(nn.Module):
    """Subtracts the mean over the rows of all ranks, like a normalization over the whole batch."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mesh, self.first, self.second = mesh, nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x - _Summed.apply(x.mean(0), self.mesh) / self.mesh.size()
        return self.second(torch.relu(x)).square().mean()


def _over_the_data_axis(rank: int, world_size: int) -> list[str]:
    mesh = world_mesh()
    ours, theirs = _Centered(mesh), _Centered(mesh)
    fsdp2(theirs, mesh)
    graphshard.compile(ours, mesh, backend="eager")
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))
    for model in (ours, theirs):
        model(x).backward()
    assert_same(grads_of(ours), grads_of(theirs), "gradients")
    return [line for line in graphshard.programs(ours)[0].communication if " over " in line]


def test_collectives_over_the_sharding_axis(ranks: Ranks) -> None:
    """The model's collectives, next to the collectives of its parameters."""
    for lines in ranks(2).run(_over_the_data_axis):
        assert lines == ["forward: all_reduce over shard", "backward: start_all_reduce over shard"]
