"""Plans by cost where collectives run over several axes: FSDP2's bits under any plan and under the least memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphshard
from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.ir.errors import InfeasibleError
from graphshard.passes import MakePlan
from graphshard.schedule.by_cost import PlanByCost
from tests.distributed import expert_parallel
from tests.distributed.tensor_parallel import data_of, llama, mesh_of, mlps, rows, tokens, train_alike
from tests.distributed.twins import (
    AliveBytes,
    assert_same,
    example_llama,
    fsdp2,
    grads_of,
    local,
    train_side_by_side,
)
from tests.ranks import Ranks

SHORTEST = graphshard.Pipeline().replace("plan", MakePlan(PlanByCost(Costs(load_profile("cpu-gloo")))))


def _compiled(
    model: nn.Module, mesh: DeviceMesh, inputs: dict[str, Any], *, limited: bool, **options: Any
) -> nn.Module:
    """With the plan that costs say is shortest, or with the least memory that any plan takes."""
    if not limited:
        return graphshard.compile(model, mesh, backend="eager", passes=SHORTEST, **options)
    limit = _least(model, mesh, inputs, **options)
    return graphshard.compile(model, mesh, backend="eager", memory_limit=limit, **options)


def _least(model: nn.Module, mesh: DeviceMesh, inputs: dict[str, Any], **options: Any) -> int:
    """The least bytes; what takes less is an error on all ranks that says so."""
    with pytest.raises(InfeasibleError, match=r"no schedule fits in a memory_limit of 1,000 bytes\. The le") as error:
        graphshard.compile(model, mesh, backend="eager", memory_limit=1000, **inputs, **options)
    return error.value.smallest


def _check(model: nn.Module) -> None:
    for program in graphshard.programs(model):
        prediction = program.plan.prediction
        assert prediction is not None, "planned by cost"
        assert prediction.lower_bound <= prediction.step_seconds


def _replicated(rank: int, world_size: int, shape: tuple[int, int], limited: bool) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model, batch = example_llama(layers=3)
    theirs = fsdp2(copy.deepcopy(model), mesh)
    inputs = {"example_inputs": (), "example_kwargs": batch()}
    ours = _compiled(model, mesh, inputs, limited=limited)
    train_side_by_side((ours, theirs), batch, steps=3)
    _check(ours)


@pytest.mark.parametrize("limited", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("shape", [(2, 2), pytest.param((4, 1), marks=pytest.mark.slow)], ids=str)
def test_replicas(ranks: Ranks, shape: tuple[int, int], limited: bool) -> None:
    """Reductions of two legs, joined and moved; or all-reduces alone."""
    ranks(4).run(_replicated, shape, limited)


def _with_experts(rank: int, world_size: int, shape: tuple[int, ...], limited: bool) -> int:
    mesh = expert_parallel.mesh_of(*shape)
    ours, theirs = (expert_parallel.Moe(mesh["ep"], layers=2) for _ in range(2))
    expert_parallel.fsdp2(theirs, mesh)
    inputs = {"example_inputs": (expert_parallel.batch(0, rank),)}
    ours = _compiled(ours, mesh, inputs, limited=limited)
    for step in range(2):
        for model in (ours, theirs):
            model(expert_parallel.batch(step, rank)).backward()
        assert_same(grads_of(ours), grads_of(theirs), f"gradients of step {step}")
    _check(ours)
    axes = {bucket.axis for bucket in graphshard.programs(ours)[0].plan.buckets}
    assert {"dp", "dp_ep"} <= axes
    return graphshard.programs(ours)[0].plan.prediction.peak_bytes


@pytest.mark.parametrize("limited", [pytest.param(False, marks=pytest.mark.slow), True])
def test_experts(ranks: Ranks, limited: bool) -> None:
    """Their parameters are gathered over other axes, by the same link."""
    assert len(set(ranks(4).run(_with_experts, (2, 2), limited, share=False))) == 1


@pytest.mark.slow
def test_experts_and_replicas(ranks: Ranks) -> None:
    """Gradients of both have two legs."""
    ranks(8).run(_with_experts, (2, 2, 2), True, share=False)


def _regathered(rank: int, world_size: int, limited: bool) -> None:
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    model, batch = example_llama(layers=3)
    theirs = fsdp2(copy.deepcopy(model), mesh, reshard_after_forward=2)
    inputs = {"example_inputs": (), "example_kwargs": batch()}
    ours = _compiled(model, mesh, inputs, limited=limited, reshard_after_forward=2)
    train_side_by_side((ours, theirs), batch, steps=3)
    _check(ours)


@pytest.mark.parametrize("limited", [pytest.param(False, marks=pytest.mark.slow), True])
def test_neighbours_that_gather_again(ranks: Ranks, limited: bool) -> None:
    ranks(4).run(_regathered, limited)


def _parallelized(rank: int, world_size: int, shape: tuple[int, ...], make: Any, batch: Any, limited: bool) -> None:
    mesh = mesh_of(*shape)
    theirs = fsdp2(make(mesh["tp"]), data_of(mesh))
    ours = _compiled(make(mesh["tp"]), mesh, {"example_inputs": batch()}, limited=limited)
    train_alike((ours, theirs), mesh, batch)
    _check(ours)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("model", ["mlps", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_tensor_axis(ranks: Ranks, model: str, limited: bool) -> None:
    """The model's collectives stay where they are, between those of parameters and gradients."""
    make, batch = {"mlps": (mlps, rows), "llama": (llama, tokens)}[model]
    ranks(4).run(_parallelized, (2, 2), make, batch, limited)


class Wide(nn.Module):
    """Blocks of two products, whose parameters are most of what is in memory."""

    def __init__(self, depth: int = 3, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


def _wide(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = Wide()
    if "tp" in (mesh.mesh_dim_names or ()):
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return model


def _peaks(
    rank: int, world_size: int, shape: tuple[int, ...], names: tuple[str, ...], again: int | None
) -> list[float]:
    """What a step takes at the most, as a share of what the plan predicts, under the least limit and under another."""
    mesh, x = init_device_mesh("cpu", shape, mesh_dim_names=names), torch.randn(2, 128, requires_grad=True)
    # Nothing is packed: the buffer that pieces of several tensors are sent from is not reckoned with.
    options = {"reshard_after_forward": True if again is None else again, "units": ["layers.*.*"]}
    model = _wide(mesh)
    least = _least(model, mesh, {"example_inputs": (x,)}, **options)
    found = []
    for limit in (least, 2 * least):
        model = graphshard.compile(_wide(mesh), mesh, backend="eager", memory_limit=limit, **options)
        model(x).backward()
        model.zero_grad()
        shards = [local(param).detach() for param in model.parameters()]
        state = 3 * sum(shard.nbytes for shard in shards)  # with two of the optimizer, which are not there
        (program,) = graphshard.programs(model)
        predicted = program.plan.prediction.peak_bytes
        assert predicted <= limit
        x.grad = None
        with AliveBytes([x, *shards], predicted - state) as mode:
            model(x).backward()
        found.append((mode.most + state) / predicted)
    return found


@pytest.mark.parametrize(
    ("shape", "names", "again"),
    [
        pytest.param((4,), ("dp",), None, marks=pytest.mark.slow),  # the others have it within
        ((2, 2), ("replicate", "shard"), None),
        ((4,), ("dp",), 2),
        ((2, 2), ("dp", "tp"), None),
    ],
    ids=["one axis", "replicas", "neighbours", "tensor axis"],
)
def test_measured_memory_is_what_the_plan_predicts(ranks: Ranks, shape: Any, names: Any, again: int | None) -> None:
    """Never more; a plan reckons with the most that each stretch of compute takes."""
    for shares in ranks(4).run(_peaks, shape, names, again):
        assert all(0.7 < share <= 1.0 for share in shares)
