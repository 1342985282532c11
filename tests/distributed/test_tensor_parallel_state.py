"""State of tensor-parallel models: checkpoints resumed on meshes of other shapes, state dicts, copies."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphshard
from tests.distributed.tensor_parallel import Mlps, mesh_of, mlps, pair_of, rows, train_alike
from tests.distributed.twins import assert_same
from tests.ranks import Ranks


def _whole(values: dict[str, Any]) -> dict[str, Tensor]:
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in values.items()}


def _moments(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Tensor]:
    return _whole({name: optim.state[param]["exp_avg"] for name, param in model.named_parameters()})


def _steps(model: nn.Module, optim: torch.optim.Optimizer, mesh: DeviceMesh, steps: range) -> None:
    for step in steps:
        torch.manual_seed(10 * step + mesh.get_local_rank("dp"))
        model(*rows()).backward()
        optim.step()
        optim.zero_grad()


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _compiled(shape: tuple[int, int]) -> nn.Module:
    mesh = mesh_of(*shape)
    return graphshard.compile(mlps(mesh["tp"]), mesh, backend="eager")


def _resume(rank: int, world_size: int, folder: Path) -> None:
    mesh = mesh_of(2, 2)
    saved, theirs = pair_of(mlps, mesh)
    optim = _adam(saved)
    _steps(saved, optim, mesh, range(2))
    graphshard.checkpoint.save_checkpoint(folder / "2", saved, optim)
    params, moments = _whole(saved.state_dict()), _moments(saved, optim)
    plain = graphshard.compile(Mlps(), init_device_mesh("cpu", (4,)), backend="eager")
    models = {"2 x 2": _compiled((2, 2)), "1 x 4": _compiled((1, 4)), "4 x 1": _compiled((4, 1)), "FSDP2": theirs}
    for name, model in {**models, "data parallel": plain}.items():
        theirs_optim = _adam(model)
        graphshard.checkpoint.load_checkpoint(folder / "2", model, theirs_optim)
        assert_same(_whole(model.state_dict()), params, name)
        assert_same(_moments(model, theirs_optim), moments, name)
        if name in ("2 x 2", "FSDP2"):
            _steps(model, theirs_optim, mesh, range(2, 4))
    _steps(saved, optim, mesh, range(2, 4))
    for name in ("2 x 2", "FSDP2"):
        assert_same(models[name].state_dict(), saved.state_dict(), f"{name}, two steps later")


@pytest.mark.slow
def test_resume_on_meshes_of_other_shapes(ranks: Ranks, tmp_path: Path) -> None:
    """On the same mesh training continues bit for bit; on others, with and without a tensor axis, values are equal."""
    ranks(4).run(_resume, tmp_path)


class _Uneven(nn.Module):
    """Seven columns, and five rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down, self.head = nn.Linear(3, 7), nn.Linear(7, 3), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(torch.relu(self.up(x)))).square().mean()


def _cut_unevenly(tp: DeviceMesh) -> nn.Module:
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    return parallelize_module(_Uneven(), tp, plan)


def _resume_uneven(rank: int, world_size: int, folder: Path) -> list[tuple[int, ...]]:
    meshes = {shape: mesh_of(*shape) for shape in ((2, 2), (1, 4), (4, 1))}
    models = {
        shape: graphshard.compile(_cut_unevenly(mesh["tp"]), mesh, backend="eager") for shape, mesh in meshes.items()
    }
    saved = models[2, 2]
    optim = _adam(saved)
    saved(torch.randn(2, 3, generator=torch.Generator().manual_seed(meshes[2, 2].get_local_rank("dp")))).backward()
    optim.step()
    graphshard.checkpoint.save_checkpoint(folder / "1", saved, optim)
    pieces = [tuple(param.to_local().shape) for param in saved.parameters()]
    plain = graphshard.compile(_Uneven(), init_device_mesh("cpu", (4,)), backend="eager")
    optims = []
    for model in (plain, models[1, 4], models[4, 1]):
        optims.append(_adam(model))
        graphshard.checkpoint.load_checkpoint(folder / "1", model, optims[-1])
    expected, moments = _whole(plain.state_dict()), _moments(plain, optims[0])
    saved_of = {name: param.to_local().clone() for name, param in saved.named_parameters()}
    for step, (model, other) in enumerate(zip((models[1, 4], models[4, 1]), optims[1:]), 2):
        assert_same(_whole(model.state_dict()), expected, "parameters")
        assert_same(_moments(model, other), moments, "moments")
        graphshard.checkpoint.save_checkpoint(folder / str(step), model, other)
        with torch.no_grad():
            for param in saved.parameters():
                param.zero_()
        graphshard.checkpoint.load_checkpoint(folder / str(step), saved, optim)
        assert_same({name: p.to_local() for name, p in saved.named_parameters()}, saved_of, "back again")
    assert all(moment.any() for moment in moments.values())
    return pieces


def test_resume_with_uneven_shards(ranks: Ranks, tmp_path: Path) -> None:
    """On both axes, and on meshes of other shapes."""
    pieces = ranks(4).run(_resume_uneven, tmp_path)
    assert [each[0] for each in pieces] == [(2, 3), (2, 3), (2, 3), (1, 3)]


def _load(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    ours, theirs = pair_of(mlps, mesh)
    torch.manual_seed(5)
    whole = {name: torch.randn(p.shape) for name, p in ours.named_parameters()}
    ours.load_state_dict(whole)
    assert_same(_whole(ours.state_dict()), whole, "of whole tensors")
    theirs.load_state_dict(ours.state_dict())
    assert_same(theirs.state_dict(), ours.state_dict(), "of shards")
    ours.load_state_dict({name: p.clone() for name, p in theirs.state_dict().items()}, assign=True)
    twin = copy.deepcopy(ours)
    train_alike((ours, theirs), mesh, rows, steps=2)
    ours.load_state_dict(twin.state_dict())
    theirs.load_state_dict(twin.state_dict())
    train_alike((twin, theirs), mesh, rows, steps=1)


@pytest.mark.slow
def test_state_dicts_and_copies(ranks: Ranks) -> None:
    """Full tensors and shards load, also by assignment; a copy trains like the original."""
    ranks(4).run(_load)
