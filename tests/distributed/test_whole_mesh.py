"""Parameters that are DTensors on the whole mesh, replicated over its data axes, match FSDP2's full SPMD mesh."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import graphshard
from graphshard.errors import ArgumentError, CaptureError, InputError, UnsupportedError
from tests.distributed.tensor_parallel import placed
from tests.distributed.twins import BF16, FP32, assert_same, grads_of, params_of
from tests.ranks import FakeWorld, Ranks

if not hasattr(fsdp, "DataParallelMeshDims"):
    pytest.skip("torch 2.11 has no DataParallelMeshDims", allow_module_level=True)
Dims = fsdp.DataParallelMeshDims

R = Replicate()


class Mlp(nn.Module):
    """Sizes that four ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 14), nn.Linear(14, 6)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return x + self.down(torch.relu(self.up(x)))
        # Reduces the partial gradients of x over the tensor axis here.
        given = DTensor.from_local(x.to_local(), x.device_mesh, x.placements, run_check=False)
        return x + self.down(torch.relu(self.up(given))).redistribute(placements=x.placements)


class Mlps(nn.Module):
    """Two blocks and a head; the model or the caller computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), Mlp()])
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, inside: bool = True) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.head(x)
        return x.square().mean() if inside else x


def _on_whole(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard blocks over the last axis "tp", if there is one; replicate everything else."""
    for each, param in list(module.named_parameters(recurse=False)):
        along: list[Any] = [R] * mesh.ndim
        if name.startswith("layers") and (mesh.mesh_dim_names or ())[-1] == "tp":
            cut = {("up", "weight"): 0, ("up", "bias"): 0, ("down", "weight"): 1}.get((name.rpartition(".")[2], each))
            along[-1] = R if cut is None else Shard(cut)
        placed_ = distribute_tensor(param.detach(), mesh, along)
        module.register_parameter(each, nn.Parameter(placed_))


def _distributed(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(1)
    return distribute_module(Mlps(), mesh, _on_whole)


def _sharded(shard: Callable[..., Any], mesh: DeviceMesh, dims: Dims, **options: Any) -> nn.Module:
    model = _distributed(mesh)
    for layer in model.layers:
        shard(layer, mesh=mesh, dp_mesh_dims=dims, **options)
    shard(model, mesh=mesh, dp_mesh_dims=dims, **options)
    return model


OURS = functools.partial(graphshard.fully_shard, backend="eager")


def _batch(step: int, mesh: DeviceMesh, *, cut: bool) -> DTensor:
    """Return a batch, equal on ranks of a tensor axis and different on data ranks: sharded, or declared replicated."""
    names = mesh.mesh_dim_names or ()
    tensors = mesh.size(-1) if names[-1] == "tp" else 1
    torch.manual_seed(100 * step + torch.distributed.get_rank() // tensors)
    along = [Shard(0) if cut and name != "tp" else R for name in names]
    return DTensor.from_local(torch.randn(3, 6), mesh, along, run_check=False)


def _alike(pair: list[nn.Module], mesh: DeviceMesh, steps: int = 3, places: bool = True) -> None:
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False) for model in pair]
    for step in range(steps):
        for cut in (False, True):
            x, losses = _batch(step, mesh, cut=cut), []
            for model in pair:
                loss = model(x) if cut else model(x, inside=False).sum()
                loss.backward()
                losses.append({"loss": loss.to_local().detach()})
            assert_same(*losses, f"step {step}")
            assert_same(*(dict_of_local(grads_of(model)) for model in pair), f"gradients of step {step}")
            assert not places or placed(pair[0]) == placed(pair[1])
        for optim in optims:
            optim.step()
            optim.zero_grad()
        assert_same(*(dict_of_local(params_of(model)) for model in pair), f"parameters after step {step}")


def dict_of_local(values: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.to_local().detach() for name, value in values.items()}


# Shapes, names, and roles of the data axes.
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]] = {
    "one axis": ((4,), ("fsdp",), {"shard": "fsdp"}),
    "replicas": ((2, 2), ("rep", "shard"), {"shard": "shard", "replicate": "rep"}),
    "two that shard": ((2, 2), ("a", "b"), {"shard": ("a", "b")}),
    "tensor axis": ((2, 2), ("fsdp", "tp"), {"shard": "fsdp"}),
    "replicas only": ((4,), ("rep",), {"replicate": "rep"}),
    "two that replicate": ((2, 2), ("a", "b"), {"replicate": ("a", "b")}),
    "replicas and a tensor axis": ((2, 2), ("rep", "tp"), {"replicate": "rep"}),
    "all": ((1, 2, 2), ("rep", "fsdp", "tp"), {"shard": "fsdp", "replicate": "rep"}),
    "8 ranks": ((2, 2, 2), ("rep", "fsdp", "tp"), {"shard": "fsdp", "replicate": "rep"}),
}
_SLOW = ("replicas only", "all", "8 ranks")


def _mesh(name: str) -> tuple[DeviceMesh, Dims]:
    shape, names, dims = MESHES[name]
    return init_device_mesh("cpu", shape, mesh_dim_names=names), Dims(**dims)


def _train(rank: int, world_size: int, name: str, policy: MixedPrecisionPolicy) -> list[str]:
    mesh, dims = _mesh(name)
    pair = [_sharded(shard, mesh, dims, mp_policy=policy) for shard in (OURS, fully_shard)]
    for ours, theirs in zip(*(model.parameters() for model in pair), strict=True):
        assert ours.device_mesh == theirs.device_mesh
        assert ours.placements == theirs.placements
    _alike(pair, mesh)
    return graphshard.programs(pair[0])[-1].communication


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in _SLOW else ()) for n in MESHES])
@pytest.mark.quick_cases("one axis")
def test_matches_fsdp2(ranks: Ranks, name: str) -> None:
    """Losses, gradients, placements and steps; loss in the model or outside; batches sharded or replicated."""
    for lines in ranks(8 if name == "8 ranks" else 4).run(_train, name, FP32):
        of_model = {line.rpartition(" over ")[2] for line in lines if line.startswith("backward") and " over " in line}
        assert of_model == ({"tp"} if MESHES[name][1][-1] == "tp" else set()), "gradients are reduced once"


@pytest.mark.slow
def test_in_bfloat16(ranks: Ranks) -> None:
    ranks(4).run(_train, "tensor axis", BF16)


def _ways(rank: int, world_size: int, folder: Path) -> None:
    mesh, dims = _mesh("tensor axis")
    ours, theirs = pair = [_sharded(shard, mesh, dims) for shard in (OURS, fully_shard)]
    # FSDP2 rejects this: gathering again among neighbors.
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    again = graphshard.compile(_distributed(line), line, backend="eager", reshard_after_forward=2)
    _alike([again, _sharded(fully_shard, line, dims)], line, steps=1)
    # compile accepts the whole mesh, and axis names may define the roles.
    for options in ({"dp_mesh_dims": dims}, {}):
        model = graphshard.compile(_distributed(mesh), mesh, backend="eager", **options)
        _alike([model, _sharded(fully_shard, mesh, dims)], mesh, steps=1)
    # Microbatches.
    for last in (False, True):
        for model in pair:
            model.set_requires_gradient_sync(last)
            model(_batch(int(last), mesh, cut=True)).backward()
    assert_same(*map(dict_of_local, map(grads_of, pair)), "gradients of two microbatches")
    # Modules show full parameters during forward.
    for model in pair:
        model.zero_grad()
        model.layers[0].unshard()
    assert placed(ours) == placed(theirs)
    for param, other in zip(ours.layers[0].parameters(), theirs.layers[0].parameters(), strict=True):
        assert param.device_mesh == mesh
        assert torch.equal(param.to_local(), other.to_local())
    _alike(pair, mesh, steps=1)
    # State: full tensors, checkpoints, and another mesh.
    whole = {name: value.full_tensor() for name, value in ours.state_dict().items()}
    again = _sharded(OURS, mesh, dims)
    again.load_state_dict(whole)
    assert_same(dict_of_local(again.state_dict()), dict_of_local(ours.state_dict()), "of full tensors")
    optim = torch.optim.AdamW(ours.parameters(), foreach=False)
    graphshard.checkpoint.save_checkpoint(folder / "1", ours, optim)
    plain = graphshard.compile(Mlps(), init_device_mesh("cpu", (4,)), backend="eager")
    for model in (_sharded(fully_shard, mesh, dims), plain):
        graphshard.checkpoint.load_checkpoint(folder / "1", model, torch.optim.AdamW(model.parameters(), foreach=False))
        assert_same({name: value.full_tensor() for name, value in model.state_dict().items()}, whole, "resumed")


@pytest.mark.slow
def test_ways_to_train_and_state(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4).run(_ways, tmp_path)


def _meta(rank: int, world_size: int) -> None:
    mesh, dims = _mesh("replicas")
    with torch.device("meta"):
        pair = [_sharded(shard, mesh, dims) for shard in (OURS, fully_shard)]
    for model in pair:
        model.to_empty(device="cpu")
        torch.manual_seed(3 + mesh.get_local_rank("shard"))
        for param in model.parameters():
            param.to_local().detach().normal_()
    _alike(pair, mesh, steps=2)


@pytest.mark.slow
def test_meta_init(ranks: Ranks) -> None:
    ranks(4).run(_meta)


def _placed_differently(rank: int, world_size: int) -> str:
    mesh, dims = _mesh("one axis")
    model = _sharded(OURS, mesh, dims)
    with pytest.raises(UnsupportedError) as error:
        model(_batch(0, mesh, cut=True), inside=False).sum().backward()  # a replicated gradient of a sharded output
    return str(error.value)


def test_rejects_differently_placed_output_gradients(ranks: Ranks) -> None:
    """FSDP2 sums replicated gradients like partial ones; a program supports one of the two."""
    for message in ranks(4).run(_placed_differently):
        assert re.match(
            r"the gradient of a result is placed as \(Replicate\(\),\) on \('fsdp',\), and along 'fsdp' the", message
        )


def _world(fake_world: FakeWorld, *names: str) -> DeviceMesh:
    fake_world(4)
    return init_device_mesh("cpu", (2, 2)[: len(names)] if len(names) == 2 else (4,), mesh_dim_names=names)


def test_an_input_that_requires_a_gradient(fake_world: FakeWorld) -> None:
    mesh = _world(fake_world, "fsdp")
    model = graphshard.compile(_distributed(mesh), mesh, backend="eager")
    given = DTensor.from_local(torch.randn(3, 6), mesh, [R], run_check=False).requires_grad_()
    with pytest.raises(InputError, match=r"^an input is a DTensor of shape \[3, 6\] that requires a gradient\. Pass"):
        model(given)


class Scaled(nn.Module):
    """A parameter that each data rank uses for different features."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).square().sum()


def test_rejects_a_gradient_sharded_over_a_data_axis(fake_world: FakeWorld) -> None:
    """A reduction over that axis would add different features: the error names the parameter and the remedy."""
    mesh = _world(fake_world, "fsdp")
    model = graphshard.compile(distribute_module(Scaled(), mesh, _on_whole), mesh, backend="eager")
    by_feature = DTensor.from_local(torch.randn(3, 2), mesh, [Shard(1)], run_check=False)
    with pytest.raises(CaptureError) as error:
        model(by_feature)
    assert str(error.value) == (
        "graphshard cannot capture forward: it makes a gradient of scale that is placed as (Shard(dim=0),) along data "
        "axes, over which it is to be reduced. Use the parameter with activations that are cut there by their batch, "
        "or whole."
    )
    model(DTensor.from_local(torch.randn(3, 8), mesh, [Shard(0)], run_check=False)).backward()


def test_rejects_data_axes_that_are_not_outermost(fake_world: FakeWorld) -> None:
    mesh = _world(fake_world, "tp", "dp")
    with pytest.raises(UnsupportedError, match=r"^parameter .* is a DTensor on the data axes, .*not the outerm"):
        graphshard.compile(_distributed(mesh), mesh)


def test_rejects_placements_on_a_data_axis(fake_world: FakeWorld) -> None:
    """A parameter sharded there is already someone's shard."""
    mesh = _world(fake_world, "fsdp")
    model = _distributed(mesh)
    model.head.weight = nn.Parameter(distribute_tensor(torch.randn(5, 6), mesh, [Shard(0)]))
    with pytest.raises(ArgumentError, match=r"^parameter head\.weight is a DTensor already"):
        graphshard.fully_shard(model, mesh=mesh, dp_mesh_dims=Dims(shard="fsdp"))


def test_rejects_another_mesh(fake_world: FakeWorld) -> None:
    mesh = _world(fake_world, "fsdp", "tp")
    other = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("fsdp", "tp"))
    with pytest.raises(ArgumentError, match=r"^parameter .* is distributed over .*, and is to be over .*Distrib"):
        graphshard.fully_shard(_distributed(other), mesh=mesh, dp_mesh_dims=Dims(shard="fsdp"))
    model = _distributed(mesh)
    model.head.weight = nn.Parameter(distribute_tensor(torch.randn(5, 6), mesh._flatten("all"), [R]))
    with pytest.raises(ArgumentError, match=r"^parameter head\.weight is distributed over .*, and parameter layers"):
        graphshard.fully_shard(model, mesh=mesh, dp_mesh_dims=Dims(shard="fsdp"))


def test_rejects_an_expert_axis_without_experts(fake_world: FakeWorld) -> None:
    """A parameter that is equal on all its ranks is not an expert; test_whole_mesh_experts.py covers experts."""
    mesh = _world(fake_world, "dp", "ep")
    with pytest.raises(
        ArgumentError, match=r"^mesh has an expert axis, 'ep', and all parameters .* lie alike along it"
    ):
        graphshard.compile(_distributed(mesh), mesh)


@pytest.mark.slow
def test_explain(fake_world: FakeWorld) -> None:
    """On a mesh that need not exist."""
    found = graphshard.explain(
        Mlps(),
        {"dp": 2, "tp": 2},
        example_inputs=(torch.randn(3, 6),),
        hardware="h100",
        parallelize=_parallelize,
    )
    assert found.mesh == {"dp": 2, "tp": 2}
    assert found.step_time_s >= found.lower_bound_s > 0


def _parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let forward take local tensors and distribute them."""

    def given(_: nn.Module, args: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        return (DTensor.from_local(args[0], mesh, [Shard(0), R], run_check=False),)

    distribute_module(model, mesh, _on_whole)
    model.layers[0].register_forward_pre_hook(functools.partial(given, mesh=mesh))
