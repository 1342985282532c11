"""Parameters on one or several tensor axes, with sharding, match FSDP2 bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import graphshard
from graphshard.errors import ArgumentError
from graphshard.ir.mesh import Axis, AxisPlacement, DTensorLayout, Mesh
from tests.distributed.tensor_parallel import placed, rows
from tests.distributed.twins import assert_same, fsdp2, grads_of, params_of
from tests.ranks import FakeWorld, Ranks

NAMES = ("dp", "tp", "tensor")
R = Replicate()


class Product(nn.Module):
    """A linear map whose weight is sharded over some axes; all their ranks have the same rows and outputs."""

    def __init__(self, inner: int, outer: int, mesh: DeviceMesh, placements: Sequence[Any]) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(torch.randn(outer, inner), mesh, placements))
        self.bias = nn.Parameter(distribute_tensor(torch.randn(outer), mesh, [R] * mesh.ndim))

    def forward(self, x: Tensor) -> Tensor:
        whole = [R] * self.mesh.ndim
        given = DTensor.from_local(x, self.mesh, whole, run_check=False)
        return F.linear(given, self.weight, self.bias).redistribute(placements=whole).to_local()


class Net(nn.Module):
    """Two linear maps on separate axes, and one on none."""

    def __init__(self, *on: tuple[DeviceMesh, Sequence[Any]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Product(8, 16, *on[0]), Product(16, 8, *on[1])])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x).square().mean()


WAYS: dict[str, Callable[[DeviceMesh], Net]] = {
    "an axis each": lambda mesh: Net((mesh["tp"], [Shard(0)]), (mesh["tensor"], [Shard(1)])),
    "both": lambda mesh: Net((mesh["tp", "tensor"], [Shard(0), Shard(1)]), (mesh["tp", "tensor"], [Shard(1), R])),
    "twice": lambda mesh: Net((mesh["tp", "tensor"], [Shard(0), Shard(0)]), (mesh["tp", "tensor"], [Shard(1)] * 2)),
    "both and one": lambda mesh: Net((mesh["tp", "tensor"], [R, Shard(0)]), (mesh["tp"], [Shard(1)])),
}


def _mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES)


def _trained(model: nn.Module, mesh: DeviceMesh) -> list[Any]:
    """Train three steps; return losses, gradients, placements and parameters. Tensor ranks have the same rows."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False), []
    for step in range(3):
        torch.manual_seed(10 * step + mesh["dp"].get_local_rank())
        loss = model(*rows())
        loss.backward()
        grads = {name: grad.to_local().clone() for name, grad in grads_of(model).items()}
        lies = placed(model)
        optimizer.step()
        optimizer.zero_grad()
        params = {name: param.to_local().detach().clone() for name, param in params_of(model).items()}
        found.append((loss.detach(), grads, lies, params))
    return found


def _compare_with_fsdp2(
    rank: int, world_size: int, shape: tuple[int, ...], way: str, options: dict[str, Any]
) -> list[str]:
    mesh = _mesh(*shape)
    axes = mesh["dp"] if options.pop("data axes alone", False) else mesh
    ours = graphshard.compile(WAYS[way](mesh), axes, backend="eager", **options)
    pairs = zip(_trained(ours, mesh), _trained(fsdp2(WAYS[way](mesh), mesh["dp"]), mesh), strict=True)
    for step, ((loss, grads, lies, params), (their_loss, their_grads, their_lies, their_params)) in enumerate(pairs):
        assert torch.equal(loss, their_loss)
        assert_same(grads, their_grads, f"gradients of step {step}")
        assert lies == their_lies
        assert_same(params, their_params, f"parameters after step {step}")
    whole = {name: value.full_tensor() for name, value in ours.state_dict().items()}
    again = graphshard.compile(WAYS[way](mesh), axes, backend="eager")
    again.load_state_dict(whole)
    assert_same(again.state_dict(), ours.state_dict(), "state dict of full tensors")
    for layer in ours.layers if shape[0] > 1 else ():
        layer.unshard()
        for param in layer.parameters():
            assert param.device_mesh.mesh_dim_names == layer.mesh.mesh_dim_names
    return graphshard.programs(ours)[0].communication


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.quick_cases("both and one")
def test_matches_fsdp2(ranks: Ranks, way: str) -> None:
    """Losses, gradients, placements and steps."""
    communication = ranks(4).run(_compare_with_fsdp2, (1, 2, 2), way, {})[0]
    assert any("over tp" in line for line in communication)
    assert any("over tensor" in line for line in communication) or way == "both"


def test_with_two_shards(ranks: Ranks) -> None:
    """Of a dim that is also sharded over data ranks."""
    ranks(4).run(_compare_with_fsdp2, (2, 2, 1), "both", {})
    ranks(4).run(_compare_with_fsdp2, (2, 1, 2), "an axis each", {"data axes alone": True})


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_eight_ranks(ranks: Ranks, way: str) -> None:
    ranks(8).run(_compare_with_fsdp2, (2, 2, 2), way, {})


def test_placements_of_a_parameter() -> None:
    """As FSDP2 places it: data ranks shard the parts of both axes."""
    mesh = Mesh.of_shape((2, 4)).with_tensor("tp", 2).with_tensor("sp", 8)
    assert mesh.grid[2:] == mesh.tensors == (Axis("tp", 2, "tensor"), Axis("sp", 8, "tensor"))
    assert [mesh.distance(axis) for axis in mesh.grid] == [64, 16, 8, 1]
    split = DTensorLayout((64, 3), (AxisPlacement("tp", 0), AxisPlacement("sp", 0)))
    assert str(mesh.placements(0, split)[1]) == "_S(0, 16)"
    assert mesh.placements(1, split) == (R, Shard(1), Shard(0), Shard(0))
    assert split.is_even({"tp": 2, "sp": 8})
    assert not split.is_even({"tp": 2, "sp": 3})


def test_rejects_an_unused_axis(fake_world: FakeWorld) -> None:
    """An axis of the mesh over which nothing is distributed may be a mistake."""
    fake_world(4)
    mesh = _mesh(1, 2, 2)
    model = Net((mesh["tp"], [Shard(0)]), (mesh["tp"], [Shard(1)]))
    with pytest.raises(ArgumentError, match=r"^mesh has a tensor axis, 'tensor', and no parameter of Net"):
        graphshard.compile(model, mesh)


def _partial_of_fsdp2(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = fsdp2(Net((mesh["tp"], [Partial()]), (mesh["tp"], [Shard(1)])), mesh["dp"])
    with pytest.raises(RuntimeError) as error:
        model(*rows()).backward()
    return str(error.value)


@pytest.mark.slow
def test_rejects_partial_parameters(ranks: Ranks) -> None:
    """FSDP2's backward raises an error; `compile` raises one that names the parameter."""
    assert all("to Partial is for internal use only" in message for message in ranks(4).run(_partial_of_fsdp2))
