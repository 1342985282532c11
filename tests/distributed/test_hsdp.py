"""Two mesh axes: parameters are sharded over the second and replicated over the first, as in HSDP and DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import graphshard
from tests.distributed.twins import FP32, POLICIES, CountLaunches, assert_same, example_llama, train_side_by_side, twins
from tests.helpers import Blocks
from tests.ranks import Ranks

FP16 = MixedPrecisionPolicy(reduce_dtype=torch.float16)


def _mesh(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _train(rank: int, world_size: int, shape: tuple[int, int], policy: MixedPrecisionPolicy) -> None:
    model, batch = example_llama()
    train_side_by_side(twins(model, _mesh(shape), mp_policy=policy), batch, steps=4)


@pytest.mark.parametrize("policy", [*POLICIES.values(), FP16], ids=[*POLICIES, "fp16"])
@pytest.mark.slow
def test_hsdp_equals_fsdp2(ranks: Ranks, policy: MixedPrecisionPolicy) -> None:
    """Reduce-scatter over one axis, all-reduce over the other; in fp16 both divisors count all ranks."""
    ranks(4).run(_train, (2, 2), policy)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4)], ids=["replicated", "sharded"])
@pytest.mark.quick_cases("replicated")
def test_an_axis_of_one_rank_equals_fsdp2(ranks: Ranks, shape: tuple[int, int]) -> None:
    """Replication only is data parallelism; sharding only is FSDP on one axis."""
    ranks(4).run(_train, shape, FP32)


def _counts(rank: int, world_size: int, shape: tuple[int, int]) -> list[dict[str, Any]]:
    counted: list[dict[str, Any]] = []
    for model in twins(Blocks(3, 8), _mesh(shape)):
        model(torch.randn(2, 8)).backward()  # compiles here, and initializes FSDP2, before anything is counted
        with CountLaunches() as mode:
            model(torch.randn(2, 8)).backward()
        counted.append({kind: mode.of(kind) for kind in ("gather", "scatter", "all_reduce")})
        param = next(model.parameters())
        assert isinstance(param, DTensor)
        counted[-1]["placements"] = str((param.placements, param.grad.placements, param.device_mesh.shape))
    return counted


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 2), {"gather": 5, "scatter": 3, "all_reduce": 3}),
        ((4, 1), {"gather": 0, "scatter": 0, "all_reduce": 3}),
        ((1, 4), {"gather": 5, "scatter": 3, "all_reduce": 0}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_collective_counts_and_placements(ranks: Ranks, shape: tuple[int, int], expected: dict[str, int]) -> None:
    """One of each per unit, none over an axis of one rank; FSDP2 has at least this number, and equal placements.

    Backward does not need the weight of the first layer, so two of three are gathered again.
    """
    for ours, theirs in ranks(4).run(_counts, shape):
        assert ours.pop("placements") == theirs.pop("placements")
        assert ours == expected
        assert all(theirs[kind] >= count for kind, count in ours.items())


def _with_uneven_dims(rank: int, world_size: int) -> None:
    """Shard uneven sizes along dim 1, which FSDP2 rejects; compare with plain data parallelism."""
    from torch.distributed.tensor import Shard

    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    options = {"shard_placement_fn": lambda p: Shard(p.ndim - 1), "backend": "eager"}
    ours = graphshard.compile(model, _mesh((2, 2)), **options)
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    reference.load_state_dict({name: p.full_tensor() for name, p in ours.named_parameters()})
    torch.manual_seed(rank)
    x = torch.randn(4, 5)
    ours(x).square().sum().backward()
    reference(x).square().sum().backward()
    for name, param in reference.named_parameters():
        dist.all_reduce(param.grad, dist.ReduceOp.AVG)
        found = ours.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found, param.grad, msg=name)


def test_uneven_shards_along_another_dim(ranks: Ranks) -> None:
    ranks(4).run(_with_uneven_dims)


def _checkpointed(rank: int, world_size: int) -> None:
    model, batch = example_llama(layers=1)
    ours, theirs = twins(model, _mesh((2, 2)))
    for compiled in (ours, theirs):
        torch.manual_seed(rank)
        loss = compiled(**batch())
        loss.backward()
    plain = {name: p.full_tensor().clone() for name, p in ours.state_dict().items()}
    for target, source in ((theirs, ours), (ours, theirs)):
        with torch.no_grad():
            for param in target.parameters():
                param.add_(1)
        target.load_state_dict(source.state_dict())
        assert_same(target.state_dict(), source.state_dict(), "after loading")
    full = {name: p.full_tensor() for name, p in ours.state_dict().items()}
    assert_same(full, plain, "full tensors")
    ours.load_state_dict({name: value.zero_() for name, value in full.items()})
    assert not any(p.full_tensor().any() for p in ours.parameters())


@pytest.mark.slow
def test_state_of_a_2d_mesh(ranks: Ranks) -> None:
    """State dicts load between graphshard and FSDP2, and full tensors load."""
    ranks(4).run(_checkpointed)
