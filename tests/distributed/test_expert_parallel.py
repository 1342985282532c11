"""Experts on a separate mesh match FSDP2 on the same model bit for bit, and one rank with all experts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphshard
from tests.distributed.expert_parallel import (
    FSDPMeshInfo,
    Moe,
    ShardPlacementResult,
    batch,
    by_placements,
    by_units,
    dense_axes,
    fsdp2,
    grouped,
    mesh_of,
    needs_placements,
    one_by_one,
    placements,
)
from tests.distributed.tensor_parallel import placed
from tests.distributed.twins import OURS, POLICIES, assert_same, grads_of, local, params_of
from tests.ranks import Ranks

PRODUCTS = {"one by one": one_by_one, "grouped": grouped}


def _train_alike(ours: nn.Module, theirs: nn.Module, steps: int = 3) -> None:
    """Train both: losses, gradients, placements, parameters and state dicts are equal, and every step has an effect."""
    rank = dist.get_rank()
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False) for model in (ours, theirs)]
    for step in range(steps):
        seen = []
        before = {name: local(param).detach().clone() for name, param in params_of(ours).items()}
        for model, optim in zip((ours, theirs), optims):
            loss = model(batch(step, rank))
            loss.backward()
            grads = {name: local(grad).clone() for name, grad in grads_of(model).items()}
            seen.append(({"loss": loss.detach()}, grads, placed(model)))
            optim.step()
            optim.zero_grad()
        (loss, grads, lies), (their_loss, their_grads, they_lie) = seen
        assert_same(loss, their_loss, f"step {step}")
        assert_same(grads, their_grads, f"gradients of step {step}")
        assert lies == they_lie
        assert_same(params_of(ours), params_of(theirs), f"parameters after step {step}")
        assert any(not torch.equal(local(p), before[name]) for name, p in params_of(ours).items())
    assert_same(ours.state_dict(), theirs.state_dict(), "at the end")


def _pair(mesh: DeviceMesh, product: str = "one by one", **options: Any) -> tuple[nn.Module, nn.Module]:
    ours, theirs = (Moe(mesh["ep"], PRODUCTS[product], layers=2) for _ in range(2))
    return graphshard.compile(ours, mesh, backend="eager", **options), fsdp2(theirs, mesh, **options)


def _compare_with_fsdp2(rank: int, world_size: int, shape: tuple[int, ...], product: str, policy: str) -> list[str]:
    mesh = mesh_of(*shape)
    pair = _pair(mesh, product, mp_policy=POLICIES[policy])
    _train_alike(*pair)
    assert len(graphshard.programs(pair[0])) == 1
    return graphshard.programs(pair[0])[0].communication


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.slow
def test_matches_fsdp2(ranks: Ranks, product: str, policy: str) -> None:
    """2 x 2 ranks: experts are sharded over two ranks, other parameters over four.

    The dense part is computed while tokens return from the experts.
    """
    for lines in ranks(4).run(_compare_with_fsdp2, (2, 2), product, policy):
        assert {"forward: all_to_all over ep", "forward: start_all_to_all over ep"} <= set(lines)


@pytest.mark.parametrize(
    "shape",
    [(1, 2), (2, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1)],
    ids=str,
)
@pytest.mark.slow
def test_meshes(ranks: Ranks, shape: tuple[int, ...]) -> None:
    """Axes of one rank, and replicas, over which gradients of experts are reduced, too."""
    ranks(4 if len(shape) == 3 else 2).run(_compare_with_fsdp2, shape, "one by one", "fp32")


WAYS = {
    "placements": lambda shard, model, mesh: by_placements(shard, model, mesh),
    "units": lambda shard, model, mesh: by_units(shard, model, mesh),
}


def _as_fsdp2_code(rank: int, world_size: int, way: str) -> None:
    mesh = mesh_of(2, 2)
    ours, theirs = (WAYS[way](shard, Moe(mesh["ep"]), mesh) for shard in (OURS, fully_shard))
    _train_alike(ours, theirs)


@pytest.mark.parametrize("way", [pytest.param("placements", marks=needs_placements), "units"])
@pytest.mark.quick_cases("units")
def test_code_written_for_fsdp2(ranks: Ranks, way: str) -> None:
    """Parameters of one unit on two meshes, and units on separate meshes."""
    ranks(4).run(_as_fsdp2_code, way)


def _with_function(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    ours = Moe(mesh["ep"])
    graphshard.compile(ours, dense_axes(mesh), backend="eager", shard_placement_fn=placements(ours, mesh))
    _train_alike(ours, fsdp2(Moe(mesh["ep"]), mesh), steps=2)


@needs_placements
@pytest.mark.slow
def test_a_mesh_for_each_parameter(ranks: Ranks) -> None:
    """`compile` accepts FSDP2's `shard_placement_fn`."""
    ranks(4).run(_with_function)


OPTIONS: dict[str, dict[str, Any]] = {
    "kept": {"reshard_after_forward": False},
    "again": {"reshard_after_forward": True},
}


def _with_options(rank: int, world_size: int, name: str) -> None:
    _train_alike(*_pair(mesh_of(2, 2), **OPTIONS[name]), steps=2)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.slow
def test_options(ranks: Ranks, name: str) -> None:
    ranks(4).run(_with_options, name)


def _microbatches(rank: int, world_size: int) -> None:
    pair = _pair(mesh_of(2, 2))
    for last in (False, False, True):
        for model in pair:
            model.set_requires_gradient_sync(last)
            model(batch(last, rank)).backward()
    assert_same(grads_of(pair[0]), grads_of(pair[1]), "gradients")
    assert all(grad is not None for grad in grads_of(pair[0]).values())


@pytest.mark.slow
def test_microbatches(ranks: Ranks) -> None:
    """Unreduced gradients accumulate as in FSDP2."""
    ranks(4).run(_microbatches)


def _divided(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    pair = [by_units(shard, Moe(mesh["ep"]), mesh) for shard in (OURS, fully_shard)]
    for model in pair:
        for layer in model.layers:
            layer.experts.set_gradient_divide_factor(4)
            layer.experts.set_force_sum_reduction_for_comms(True)  # gloo cannot scale before the sum
        model(batch(0, rank)).backward()
    assert_same(grads_of(pair[0]), grads_of(pair[1]), "gradients")


def test_a_divisor_for_experts(ranks: Ranks) -> None:
    """Set the divisor as FSDP2 code does to get a mean over all tokens."""
    ranks(4).run(_divided)


def _with_tensor_parallelism(rank: int, world_size: int) -> list[str]:
    """Run upstream's `TestFullyShardNDTraining.test_shard_placement_fn_tp_ep` on four ranks."""
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sparse = init_device_mesh("cpu", (1, 4), mesh_dim_names=("efsdp", "ep"))
    of_experts, of_others = (FSDPMeshInfo(axes, shard_mesh_dim=0) for axes in (sparse["efsdp"], dense["dp"]))
    pair = []
    for shard in (OURS, fully_shard):
        model = Moe(sparse["ep"])
        own = {p for layer in model.layers for p in layer.experts.parameters()}
        for layer in model.layers:
            plan = {
                "gate": ColwiseParallel(output_layouts=Replicate()),
                "shared": RowwiseParallel(input_layouts=Replicate()),
            }
            parallelize_module(layer, dense["tp"], plan)

        def placement(param: nn.Parameter, own: set[nn.Parameter] = own) -> ShardPlacementResult:
            return ShardPlacementResult(Shard(0), of_experts if param in own else of_others)

        for layer in model.layers:
            shard(layer, mesh=dense["dp"], shard_placement_fn=placement)
        pair.append(shard(model, mesh=dense["dp"], shard_placement_fn=placement))
    _train_alike(*pair)
    return graphshard.programs(pair[0])[0].communication


@needs_placements
@pytest.mark.slow
def test_with_tensor_parallelism(ranks: Ranks) -> None:
    """Some parameters are sharded over a tensor axis, and experts are distributed to all ranks."""
    for lines in ranks(4).run(_with_tensor_parallelism):
        assert {"forward: all_to_all over ep", "forward: all_gather over tp"} <= set(lines)


def _checkpointed(rank: int, world_size: int, folder: Path) -> None:
    mesh, fresh = mesh_of(2, 2), mesh_of(1, 4)
    model, other = (graphshard.compile(Moe(m["ep"]), m, backend="eager") for m in (mesh, fresh))
    optimizer, again = (torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (model, other))
    model(batch(0, rank)).backward()
    optimizer.step()
    folder = folder / "step1"
    graphshard.checkpoint.save_checkpoint(folder, model, optimizer)
    graphshard.checkpoint.load_checkpoint(folder, other, again)
    for (name, actual), expected in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert name == expected[0]
        assert torch.equal(actual.full_tensor(), expected[1].full_tensor()), name
    state, loaded = optimizer.state_dict()["state"], again.state_dict()["state"]
    for key, values in state.items():
        assert torch.equal(values["exp_avg"].full_tensor(), loaded[key]["exp_avg"].full_tensor())


@pytest.mark.slow
def test_resumes_a_checkpoint_with_a_different_distribution_of_experts(ranks: Ranks, tmp_path: Path) -> None:
    """Two experts on each of two ranks, and one on each of four."""
    ranks(4).run(_checkpointed, tmp_path)


def _whole_steps(rank: int, world_size: int) -> None:
    ours, theirs = (graphshard.compile(Moe(mesh["ep"]), mesh, backend="eager") for mesh in (mesh_of(2, 2),) * 2)
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False) for model in (ours, theirs)]
    step = graphshard.compile_step(ours, optims[0])
    for number in range(3):
        loss = step(batch(number, rank))
        other = theirs(batch(number, rank))
        other.backward()
        optims[1].step()
        optims[1].zero_grad()
        assert torch.equal(loss, other.detach())
    assert_same(params_of(ours), params_of(theirs), "parameters")


@pytest.mark.slow
def test_steps_as_one_program(ranks: Ranks) -> None:
    ranks(4).run(_whole_steps)


def _compare_with_one_rank(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    with warnings.catch_warnings():  # ranks run other tests later
        warnings.simplefilter("error", UserWarning)  # raised if Inductor cannot compile a region
        model = graphshard.compile(Moe(mesh["ep"]), mesh, units=["layers.*", "layers.*.experts"])
        for layer in model.layers:
            layer.experts.set_gradient_divide_factor(4)
        model(batch(0, rank)).backward()
    plain = Moe(None)
    torch.stack([plain(batch(0, other)) for other in range(4)]).mean().backward()
    for (name, actual), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
def test_gradients_match_one_rank_with_all_experts(ranks: Ranks) -> None:
    """Also with Inductor: the mean over the tokens of all ranks."""
    ranks(4).run(_compare_with_one_rank)
