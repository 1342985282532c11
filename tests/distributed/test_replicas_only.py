"""Replication without sharding: FSDP2's `DataParallelMeshDims(replicate=...)`, and torch's `replicate`."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import graphshard
from graphshard.aot import load
from graphshard.errors import ArgumentError
from graphshard.ir.mesh import Axis, Mesh
from tests.distributed.tensor_parallel import Mlps as Plain
from tests.distributed.tensor_parallel import mlps, placed
from tests.distributed.test_whole_mesh import Mlps, _alike, _batch, _distributed, _sharded, dict_of_local
from tests.distributed.twins import (
    BF16,
    FP32,
    CountLaunches,
    assert_same,
    example_llama,
    grads_of,
    params_of,
    train_side_by_side,
)
from tests.helpers import Blocks
from tests.ranks import FakeWorld, Ranks

if not hasattr(fsdp, "DataParallelMeshDims"):
    pytest.skip("torch 2.11 has no DataParallelMeshDims", allow_module_level=True)
DIMS = fsdp.DataParallelMeshDims(replicate="dp")

OURS = functools.partial(graphshard.fully_shard, backend="eager")
POLICIES = {
    "fp32": FP32,
    "bf16": BF16,
    "reduced in bf16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    "reduced in fp16": MixedPrecisionPolicy(reduce_dtype=torch.float16),
}


def _line(num_ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))


def _square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _pair(mesh: DeviceMesh, **options: Any) -> list[Any]:
    return [_sharded(shard, mesh, DIMS, **options) for shard in (OURS, fully_shard)]


# --- compared with FSDP2 ---------------------------------------------------------------------------------------------


def _train(rank: int, world_size: int, policy: MixedPrecisionPolicy) -> None:
    mesh = _line(world_size)
    pair = _pair(mesh, mp_policy=policy)
    for ours, theirs in zip(*(model.parameters() for model in pair), strict=True):
        assert ours.device_mesh == theirs.device_mesh == mesh
        assert ours.placements == theirs.placements == (Replicate(),)
    _alike(pair, mesh)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.quick_cases("fp32-4")
def test_matches_fsdp2(ranks: Ranks, name: str, num_ranks: int) -> None:
    """Losses, gradients, placements and steps; in fp16 FSDP2 divides before and after the sum."""
    ranks(num_ranks).run(_train, POLICIES[name])


def _settings(rank: int, world_size: int) -> None:
    mesh = _square()
    pair = _pair(mesh)
    for switch in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        for last in (False, True):
            for model in pair:
                getattr(model, switch)(last)
                model(_batch(int(last), mesh, cut=True)).backward()
            assert_same(*map(dict_of_local, map(_some, pair)), f"{switch}({last})")
        for model in pair:
            model.zero_grad()
    for factor in (3.0, 2.0):
        for model in pair:
            for module in (*model.layers, model):
                module.set_gradient_divide_factor(factor)
            model(_batch(0, mesh, cut=True)).backward()
        assert_same(*map(dict_of_local, map(grads_of, pair)), f"divided by {factor}")
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.01).full_tensor() for model in pair]
        assert torch.equal(*norms)
        assert_same(*map(dict_of_local, map(grads_of, pair)), "clipped")
        for model in pair:
            model.zero_grad()


def _some(model: nn.Module) -> dict[str, Tensor]:
    """Return the existing gradients: none between microbatches."""
    return {name: grad for name, grad in grads_of(model).items() if grad is not None}


@pytest.mark.slow
def test_microbatches_and_settings(ranks: Ranks) -> None:
    ranks(4).run(_settings)


def _state(rank: int, world_size: int, folder: Path) -> None:
    mesh = _square()
    ours, theirs = pair = _pair(mesh)
    for model in pair:
        model.layers[0].unshard()
    assert placed(ours) == placed(theirs)
    _alike(pair, mesh, steps=1)
    assert_same(dict_of_local(ours.state_dict()), dict_of_local(theirs.state_dict()), "state")
    for target, source in ((theirs, ours), (ours, theirs)):
        with torch.no_grad():
            for param in target.parameters():
                param.add_(1)
        target.load_state_dict(source.state_dict())
        assert_same(dict_of_local(target.state_dict()), dict_of_local(source.state_dict()), "loaded")
    whole = {name: value.full_tensor() for name, value in ours.state_dict().items()}
    optim = torch.optim.AdamW(ours.parameters(), foreach=False)
    graphshard.checkpoint.save_checkpoint(folder / "1", ours, optim)
    sharded = graphshard.compile(Mlps(), init_device_mesh("cpu", (4,)), backend="eager")
    for model in (*_pair(mesh), sharded):
        graphshard.checkpoint.load_checkpoint(folder / "1", model, torch.optim.AdamW(model.parameters(), foreach=False))
        assert_same({name: value.full_tensor() for name, value in model.state_dict().items()}, whole, "resumed")
    again = _pair(mesh)[0]
    again.load_state_dict(whole)
    assert_same(dict_of_local(again.state_dict()), dict_of_local(ours.state_dict()), "of full tensors")
    # `compile`, and also `fully_shard`.
    _alike(
        [graphshard.compile(_distributed(mesh), mesh, dp_mesh_dims=DIMS, backend="eager"), _pair(mesh)[1]],
        mesh,
        steps=1,
    )


@pytest.mark.slow
def test_state(ranks: Ranks, tmp_path: Path) -> None:
    """State dicts load into FSDP2 and back, and a checkpoint loads into sharded models."""
    ranks(4).run(_state, tmp_path)


def _meta(rank: int, world_size: int) -> None:
    mesh = _line(world_size)
    with torch.device("meta"):
        pair = _pair(mesh)
    for model in pair:
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        for param in model.parameters():
            param.to_local().detach().normal_()
    _alike(pair, mesh, steps=2)


def test_meta_init(ranks: Ranks) -> None:
    ranks(2).run(_meta)


# --- compared with torch's replicate, which has plain parameters instead of DTensors ----------------------------------


def _replicated(model: nn.Module, units: list[nn.Module], mesh: DeviceMesh, **options: Any) -> nn.Module:
    for unit in (*units, model):
        replicate(unit, mesh=mesh, **options)
    return model


def _plain(rank: int, world_size: int, policy: MixedPrecisionPolicy) -> None:
    mesh = _line(world_size)
    model, batch = example_llama()
    theirs = copy.deepcopy(model)
    _replicated(theirs, list(theirs.layers), mesh, mp_policy=policy)
    ours = graphshard.compile(model, mesh, dp_mesh_dims=DIMS, backend="eager", mp_policy=policy)
    train_side_by_side((ours, theirs), batch, steps=4)
    assert placed(ours) == placed(theirs)


@pytest.mark.parametrize("policy", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.slow
def test_plain_parameters(ranks: Ranks, policy: MixedPrecisionPolicy) -> None:
    """A Llama, its placements and clipped steps."""
    ranks(2).run(_plain, policy)


def _with_a_tensor_axis(rank: int, world_size: int) -> None:
    mesh = _square()
    theirs = mlps(mesh["tp"])
    _replicated(theirs, list(theirs.layers), mesh["dp"])
    ours = graphshard.compile(mlps(mesh["tp"]), mesh, dp_mesh_dims=DIMS, backend="eager")
    pair, optims = [ours, theirs], []
    for model in pair:
        optims.append(torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False))
    for step in range(3):
        losses = []
        for model in pair:
            torch.manual_seed(100 * step + mesh.get_local_rank("dp"))
            loss = model(torch.randn(3, 8))
            loss.backward()
            losses.append({"loss": loss.detach()})
        assert_same(*losses, f"step {step}")
        assert_same(*map(dict_of_local, map(grads_of, pair)), f"gradients of step {step}")
        assert placed(ours) == placed(theirs)
        for optim in optims:
            optim.step()
            optim.zero_grad()
        assert_same(*map(dict_of_local, map(params_of, pair)), f"after step {step}")
    weight = ours.layers[0].up.weight
    assert (weight.device_mesh, weight.placements) == (mesh, (Replicate(), Shard(0)))
    assert ours.head.weight.device_mesh == mesh["dp"]


@pytest.mark.slow
def test_with_a_tensor_axis(ranks: Ranks) -> None:
    """DTensors on the tensor axis only, from `parallelize_module`."""
    ranks(4).run(_with_a_tensor_axis)


def _counts(rank: int, world_size: int) -> list[int]:
    mesh = _line(world_size)
    model = graphshard.compile(Blocks(3, 8), mesh, dp_mesh_dims=DIMS, backend="eager")
    model(torch.randn(2, 8)).backward()
    groups = len(dist.distributed_c10d._world.pg_map)
    graphshard.compile(Blocks(3, 8), mesh, dp_mesh_dims=DIMS, backend="eager")(torch.randn(2, 8)).backward()
    assert len(dist.distributed_c10d._world.pg_map) == groups, "process groups are made once for a mesh"
    with CountLaunches() as mode:
        model(torch.randn(2, 8)).backward()
    return [mode.of(kind) for kind in ("gather", "scatter", "all_reduce")]


@pytest.mark.slow
def test_collective_counts(ranks: Ranks) -> None:
    """One all-reduce for each unit, and nothing else."""
    assert ranks(2).run(_counts) == [[0, 0, 3]] * 2


class Pair(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).square().mean()


def _kept(rank: int, world_size: int) -> None:
    mesh, pair = _line(world_size), []
    for shard in (OURS, fully_shard):
        model = _distributed(mesh)
        shard(model.layers[0], mesh=mesh, dp_mesh_dims=DIMS)
        held = list(model.layers[0].parameters())
        shard(model, mesh=mesh, dp_mesh_dims=DIMS)
        assert all(a is b for a, b in zip(held, model.layers[0].parameters(), strict=True))
        pair.append(model)
    _alike(pair, mesh, steps=1)
    tied = Pair()
    OURS(tied.a, mesh=mesh, dp_mesh_dims=DIMS)
    OURS(tied, mesh=mesh, dp_mesh_dims=DIMS)
    assert tied.a.weight is tied.b.weight
    tied(torch.randn(2, 6)).backward()
    assert tied.b.weight.grad is not None


@pytest.mark.slow
def test_nested_replication_keeps_parameters(ranks: Ranks) -> None:
    """An outer call must not mistake parameters replicated by an inner call for unprocessed ones."""
    ranks(2).run(_kept)


# --- programs, predictions and files ----------------------------------------------------------------------------------


def test_the_mesh_of_a_program(fake_world: FakeWorld) -> None:
    fake_world(4)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = graphshard.compile(Blocks(2, 8), mesh, dp_mesh_dims=DIMS, backend="eager")
    model(torch.randn(2, 8)).backward()
    program = graphshard.programs(model)[0]
    assert program.mesh == Mesh((Axis("dp", 4, "replicate"), Axis("dp/1", 1, "shard")))
    assert program.mesh.only_replicates
    assert not Mesh.of_shape((4, 1)).only_replicates
    assert [line.split()[:2] for line in program.communication] == [["backward:", "all_reduce"]] * 2


def test_several_axes_of_plain_parameters(fake_world: FakeWorld) -> None:
    """They become one axis; DTensors on them stay on each, as with FSDP2 (test_whole_mesh.py)."""
    fake_world(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    dims = fsdp.DataParallelMeshDims(replicate=("a", "b"))
    model = graphshard.compile(nn.Linear(4, 3), mesh, dp_mesh_dims=dims, backend="eager")
    assert isinstance(model.weight, DTensor)
    assert (model.weight.device_mesh.mesh_dim_names, model.weight.placements) == (("a_b",), (Replicate(),))


def test_rejects_reshard_after_forward(fake_world: FakeWorld) -> None:
    fake_world(4)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    with pytest.raises(ArgumentError, match=r"^reshard_after_forward=2 must divide .*, 1\. Give one of 1;"):
        graphshard.compile(nn.Linear(4, 3), mesh, dp_mesh_dims=DIMS, reshard_after_forward=2)


@pytest.mark.parametrize("parallelize", [None, lambda model, mesh: mlps(mesh["tp"])], ids=["plain", "tensor axis"])
@pytest.mark.quick_cases("tensor axis")
def test_explain(parallelize: Callable[..., nn.Module] | None) -> None:
    """The shape is written as in programs; the prediction equals replicas with a sharding axis of size 1."""
    tensor = {} if parallelize is None else {"tp": 2}
    seconds = [
        graphshard.explain(
            Plain(), {**shape, **tensor}, example_inputs=(torch.randn(3, 8),), hardware="h100", parallelize=parallelize
        ).step_time_s
        for shape in ({"dp": 4, "dp/1": 1}, {"replicate": 4, "shard": 1})
    ]
    assert seconds[0] == seconds[1] > 0


def _from_a_file(rank: int, world_size: int, path: Path, tensor: bool) -> list[str]:
    mesh = _square() if tensor else _line(world_size)
    models = [
        graphshard.compile(_seeded(mesh if tensor else None), mesh, dp_mesh_dims=DIMS, backend="eager", **given)
        for given in ({}, {"artifact": path})
    ]
    for model in models:
        torch.manual_seed(mesh.get_local_rank("dp"))
        model(torch.randn(3, 8)).backward()
    assert_same(*map(grads_of, models), "gradients")
    return [program.reason for program in graphshard.programs(models[1])]


def _seeded(mesh: DeviceMesh | None) -> nn.Module:
    torch.manual_seed(1)
    return Plain() if mesh is None else mlps(mesh["tp"])


@pytest.mark.parametrize("tensor", [False, True], ids=["plain", "tensor axis"])
@pytest.mark.slow
def test_a_file(ranks: Ranks, tmp_path: Path, tensor: bool) -> None:
    """Exported for the shape that the warning about a mismatched file suggests."""
    path, shape = tmp_path / "a.gshard", {"dp": 2, "dp/1": 1}
    given = {"parallelize": lambda model, mesh: mlps(mesh["tp"])} if tensor else {}
    shape = {**shape, "tp": 2} if tensor else shape
    graphshard.export(Plain(), shape, path, example_inputs=(torch.randn(3, 8),), backend="eager", **given)
    assert ranks(4 if tensor else 2).run(_from_a_file, path, tensor)[0] == ["exported"]


def _from_another_file(rank: int, world_size: int, path: Path) -> str:
    with mock.patch.object(load.log, "warning") as warning:
        graphshard.compile(Plain(), _line(world_size), dp_mesh_dims=DIMS, backend="eager", artifact=path)
    message, error = warning.call_args.args
    return str(message % error)


def test_a_file_for_ranks_that_shard(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "a.gshard"
    graphshard.export(Plain(), {"dp": 2}, path, example_inputs=(torch.randn(3, 8),), backend="eager")
    for message in ranks(2).run(_from_another_file, path):
        assert re.match(
            r"compiling instead of loading: .* mesh was \{'dp': 2\} when it was exported and is "
            r"\{'dp': 2, 'dp/1': 1\} here\. Export again with this mesh in the list: "
            r"export\(model, \[\.\.\., \{'dp': 2, 'dp/1': 1\}\], \.\.\.\)\.$",
            message,
        )
