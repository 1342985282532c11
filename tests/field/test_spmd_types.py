"""Plain parameters with annotations of spmd_types, as torchtitan's default backend makes them, on data and tensor axes.

FSDP2 reads the annotations from torch 2.14 on. The plain model has whole weights and the batch of all data ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.torch_version import TorchVersion

import graphshard
from graphshard.errors import ArgumentError, DivergenceError, UnsupportedError
from tests.distributed.twins import assert_same, params_of
from tests.ranks import FakeWorld, Ranks

spmd = pytest.importorskip("spmd_types", reason="pip install spmd-types")
IS_READ_BY_FSDP2 = TorchVersion(torch.__version__) >= "2.14"
READ_BY_FSDP2 = pytest.mark.skipif(not IS_READ_BY_FSDP2, reason="FSDP2 reads them from 2.14 on")
WIDTH, HIDDEN = 4, 6
TYPES = {"up": spmd.S(0), "down": spmd.S(1), "scale": spmd.R, "bias": spmd.I}


class Block(nn.Module):
    """An MLP whose hidden features are dealt out to the ranks of `group`; of one rank without it."""

    def __init__(self, group: Any = None, breaks: bool = False) -> None:
        super().__init__()
        self.group, self.breaks = group, breaks
        place, size = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH).chunk(size, 0)[place].clone())
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN).chunk(size, 1)[place].clone())
        self.scale, self.bias = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x + F.silu((x * self.scale) @ self.up.T) @ self.down.T + self.bias
        h = spmd.convert(x, self.group, src=spmd.I, dst=spmd.R) * self.scale
        h = spmd.all_reduce(F.silu(h @ self.up.T) @ self.down.T, self.group, src=spmd.P, dst=spmd.I)
        if self.breaks:
            dist.broadcast(h.detach().clone(), group=self.group, group_src=0)
        return x + h + self.bias


def _plain(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(**options) for _ in range(2)))


def _annotated(mesh: DeviceMesh, breaks: bool = False) -> nn.Sequential:
    model = _plain(group=mesh.get_group("tp"), breaks=breaks)
    for block in model:
        for name, kind in TYPES.items():
            types = {mesh.get_group("dp"): spmd.R, mesh.get_group("tp"): kind}
            spmd.assert_type(getattr(block, name), types)
    return model


def _batch(step: int, place: int) -> Tensor:
    torch.manual_seed(10 * step + place)
    return torch.rand(2, WIDTH)


def _train(model: nn.Module, places: list[int]) -> dict[str, Any]:
    """Train two steps, the first with microbatches, on the batches of data ranks."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.1), {}
    for step in range(2):
        for microbatch in range(2 - step):
            if isinstance(model, torch.distributed.fsdp.FSDPModule):
                model.set_requires_gradient_sync(microbatch == 1 - step)
            loss = model(torch.cat([_batch(step + 5 * microbatch, place) for place in places])).square().mean()
            loss.backward()
        norm: Any = clip_grad_norm_(model.parameters(), 1.0)
        found[f"loss {step}"] = loss.detach()
        found[f"norm {step}"] = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
    return found


def _sharded(shard: Callable[..., object], model: nn.Sequential, mesh: DeviceMesh, dims: Any, **options: Any) -> Any:
    for module in (*model, model):
        shard(module, mesh=mesh, dp_mesh_dims=dims, **options)
    return model


def _trains(rank: int, world_size: int, breaks: bool, replicate: bool) -> None:
    from torch.distributed.fsdp import DataParallelMeshDims

    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    dims = DataParallelMeshDims(**{"replicate" if replicate else "shard": "dp"})
    if IS_READ_BY_FSDP2:  # first: it takes an equal mesh of a DTensor for another one
        theirs, taken = (_sharded(fully_shard, _annotated(mesh, breaks), mesh, dims) for _ in range(2))
    compiled = graphshard.compile(_annotated(mesh, breaks), mesh, dp_mesh_dims=dims, units=["*"], backend="eager")
    ours = [compiled]
    if world_size > 2:
        ours.append(_sharded(graphshard.fully_shard, _annotated(mesh), mesh, dims, backend="eager"))
    if IS_READ_BY_FSDP2:
        assert [p.placements for p in theirs.parameters()] == [p.placements for p in compiled.parameters()]
        ours.append(graphshard.compile(taken, backend="eager"))
    plain, place = _plain(), mesh["dp"].get_local_rank()
    _like_plain(compiled, plain)
    runs = [_train(model, [place]) for model in ours]
    for found, model in zip(runs[1:], ours[1:], strict=True):
        assert_same(found, runs[0], "losses and norms")
        assert_same(params_of(model), params_of(compiled), "parameters")
    if IS_READ_BY_FSDP2:
        assert_same(runs[0], _train(theirs, [place]), "losses and norms of FSDP2")
        assert_same(params_of(compiled), params_of(theirs), "parameters of FSDP2")
    expected = _train(plain, list(range(world_size // 2)))
    torch.testing.assert_close(runs[0]["norm 1"], expected["norm 1"])
    _like_plain(compiled, plain)


def _like_plain(model: nn.Module, plain: nn.Module) -> None:
    """Compare the state dict, gathered over all ranks."""
    for name, value in get_model_state_dict(model).items():
        torch.testing.assert_close(value.full_tensor(), plain.get_parameter(name).detach(), msg=name)


@pytest.mark.quick_cases("captured")
@pytest.mark.parametrize("breaks", [False, True], ids=["captured", "Python"])
def test_two_tensor_ranks(ranks: Ranks, breaks: bool) -> None:
    ranks(2).run(_trains, breaks, False)


@pytest.mark.slow
@pytest.mark.parametrize("replicate", [False, True], ids=["sharded", "replicated"])
def test_two_by_two_ranks(ranks: Ranks, replicate: bool) -> None:
    ranks(4).run(_trains, False, replicate)


def _shown(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model, pieces = _annotated(mesh), _annotated(mesh)
    with torch.device("meta"):
        empty = _annotated(mesh)
    for each in (model, empty):
        graphshard.compile(each, mesh, reshard_after_forward=False, backend="eager")
    model.unshard()
    assert not isinstance(model[0].up, DTensor)
    assert torch.equal(model[0].up, pieces[0].up)
    model.reshard()
    empty.load_state_dict(model.state_dict(), assign=True)
    x = _batch(0, 0)
    loss = model(x).square().mean() + model[0].scale.sum() + model[0].up.square().sum()
    (pieces(x).square().mean() + pieces[0].scale.sum() + pieces[0].up.square().sum()).backward()
    loss.backward()
    assert torch.equal(empty(x), pieces(x))
    for name, param in pieces.named_parameters():
        grad = param.grad.clone()
        if name.endswith("scale"):
            dist.all_reduce(grad)
        torch.testing.assert_close(model.get_parameter(name).grad.to_local(), grad, msg=name)


def test_pieces_are_shown(ranks: Ranks) -> None:
    """By `unshard()`, and to losses outside of forward, whose gradients are summed, too."""
    ranks(2).run(_shown)


def _disagree(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    types = {mesh.get_group("dp"): spmd.R, mesh.get_group("tp"): spmd.R if rank else spmd.I}
    spmd.assert_type(model[0].weight, types)
    graphshard.compile(model, mesh, backend="eager")
    with pytest.raises(DivergenceError, match="all_reduce over tp"):
        model(torch.rand(2, 2))


def test_ranks_with_other_annotations(ranks: Ranks) -> None:
    ranks(2).run(_disagree)


def _takes_over(rank: int, world_size: int) -> None:
    from torch.distributed.fsdp import DataParallelMeshDims

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    ours, theirs = _plain(), _plain()
    for model in (ours, theirs):
        for param in model.parameters():
            spmd.assert_type(param, {mesh.get_group("dp"): spmd.R})
        _sharded(fully_shard, model, mesh, DataParallelMeshDims(shard="dp"))
    graphshard.compile(ours, backend="eager")
    assert_same(_train(ours, [rank]), _train(theirs, [rank]), "losses")
    assert_same(params_of(ours), params_of(theirs), "parameters")


@READ_BY_FSDP2
def test_annotations_on_data_axes_are_taken_over(ranks: Ranks) -> None:
    ranks(2).run(_takes_over)


class Experts(nn.Module):
    """Experts dealt out to the ranks of `ep`, all of which see all tokens."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group, place = mesh.get_group("ep"), mesh["ep"].get_local_rank()
        self.weights = nn.Parameter(torch.randn(4, WIDTH, WIDTH).chunk(2)[place].clone())
        spmd.assert_type(self.weights, {mesh.get_group("dp"): spmd.R, self.group: spmd.S(0)})

    def forward(self, x: Tensor) -> Tensor:
        h = spmd.convert(x, self.group, src=spmd.I, dst=spmd.R)
        return spmd.all_reduce((h[None] @ self.weights).sum(0), self.group, src=spmd.P, dst=spmd.I)


def _experts(rank: int, world_size: int) -> None:
    """Shard experts over the data axis, and other parameters over all ranks, as torchtitan does."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    every, runs = mesh["dp", "ep"]._flatten("fsdp"), []
    with pytest.raises(ArgumentError, match=r"annotated as S\(0\) on .* on an 'ep' axis, call graphshard\.fully_shard"):
        graphshard.compile(nn.Sequential(Experts(mesh)), mesh)
    for shard, options in ((graphshard.fully_shard, {"backend": "eager"}), (fully_shard, {})):
        model: Any = nn.Sequential(Experts(mesh), nn.Linear(WIDTH, WIDTH))
        shard(model[0], mesh=mesh["dp"], **options)
        shard(model, mesh=every, **options)
        runs.append(_step(model, rank))
    assert_same(*runs, "gradients")


@pytest.mark.slow
def test_experts_on_their_axis(ranks: Ranks) -> None:
    ranks(4).run(_experts)


def _loads(rank: int, world_size: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    place = mesh["dp"].get_local_rank()
    loaded = graphshard.load(path, _annotated(mesh), mesh)
    compiled = graphshard.compile(_annotated(mesh), mesh, units=["*"], backend="eager")
    assert_same(_step(loaded, place), _step(compiled, place), "a loaded program")


def _step(model: nn.Module, place: int) -> dict[str, Any]:
    loss = model(_batch(0, place))
    loss.square().mean().backward()
    return {"out": loss, **{name: param.grad for name, param in model.named_parameters()}}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.quick_cases("2")
def test_exported_with_annotations(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    """`parallelize=` annotates a model without process groups."""
    mesh, path = {"dp": world_size // 2, "tp": 2}, tmp_path / "annotated.gshard"
    options: Any = {"units": ["*"], "backend": "eager"}
    graphshard.export(
        *(_plain(), mesh, path), example_inputs=(_batch(0, 0),), parallelize=lambda _, on: _annotated(on), **options
    )
    ranks(world_size).run(_loads, path)


@pytest.mark.parametrize("sharding", [graphshard.compile, graphshard.fully_shard])
def test_contradictory_annotations(fake_world: FakeWorld, sharding: Any) -> None:
    """Errors name the parameter and the axis, and leave the model as it was."""
    fake_world(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp, every = mesh.get_group("dp"), mesh.get_group("tp"), dist.group.WORLD

    def fails(kind: type[Exception], match: str, on: DeviceMesh, types: Any, spec: Any = None) -> None:
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
        spmd.assert_type(model[0].weight, types, spec)
        with pytest.raises(kind, match=f"parameter 0\\.weight is {match}"):
            sharding(model, mesh=on)
        assert not isinstance(model[0].weight, DTensor)

    fails(UnsupportedError, r"annotated as replicated \(spmd_types\.R\) on", mesh["dp"], {dp: spmd.R, tp: spmd.R})
    fails(UnsupportedError, r"annotated as replicated \(spmd_types\.R\) on", mesh, {every: spmd.R})
    fails(ArgumentError, r"annotated as I on .*, a data axis", mesh, {dp: spmd.I, tp: spmd.R})
    fails(ArgumentError, r"annotated as S\(0\) on .*, a data axis", mesh, {dp: spmd.S(0), tp: spmd.R})
    fails(ArgumentError, r"annotated as V on the tensor axis 'tp'", mesh, {dp: spmd.R, tp: spmd.V})
    fails(ArgumentError, r"annotated as P on the tensor axis 'tp'", mesh, {tp: spmd.P})
    fails(ArgumentError, r"annotated as None on the tensor axis 'tp'", mesh, {dp: spmd.R})


def test_axes_that_cut_one_dim(fake_world: FakeWorld) -> None:
    """They are named in the order of the mesh, as DTensor cuts."""
    fake_world(8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp", "tensor"))
    tp, tensor = mesh.get_group("tp"), mesh.get_group("tensor")

    def made(*order: Any) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 2, bias=False))
        spmd.assert_type(model[0].weight, {tp: spmd.V, tensor: spmd.V}, spmd.PartitionSpec(order, None))
        return graphshard.compile(model, mesh)

    assert made(tp, tensor)[0].weight.shape == (8, 4)
    with pytest.raises(UnsupportedError, match="cut along one dim over the axes tensor, tp"):
        made(tensor, tp)


def test_types_are_not_checked_in_programs(fake_world: FakeWorld) -> None:
    from spmd_types.checker import typecheck

    fake_world(2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model, x = graphshard.compile(_annotated(mesh), mesh, backend="eager"), torch.rand(2, WIDTH)
    match = "types of this call, and programs of Sequential have no annotations"
    for paused in (contextlib.nullcontext(), spmd.no_typecheck()):
        checked = typecheck(local=False)
        with checked, spmd.set_current_mesh(mesh), paused, pytest.raises(UnsupportedError, match=match):
            model(x)
    assert model(x).shape == x.shape


def test_invariant_beyond_the_mesh(fake_world: FakeWorld) -> None:
    """What a mesh of data axes does not say is local: no gradient is to be summed."""
    fake_world(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 4)
    for param in model.parameters():
        spmd.assert_type(param, {mesh.get_group("dp"): spmd.R, mesh.get_group("tp"): spmd.I})
    graphshard.compile(model, mesh["dp"])
    assert model.weight.device_mesh == mesh["dp"]
