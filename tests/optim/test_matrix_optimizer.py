"""`MatrixOptimizer`: bits of the unsharded optimizer, on one owner per matrix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer

import graphshard
from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.optim import MatrixOptimizer
from graphshard.optim._owners import boxes_of
from graphshard.optim.matrix_optimizer import newton_schulz_flops
from tests.distributed.tensor_parallel import mesh_of, mlps, rows
from tests.distributed.test_checkpoint import Net
from tests.distributed.twins import assert_same, params_of, world_mesh
from tests.optim.matrix_optimizers import OPTIMIZERS, MoonlightMuon
from tests.ranks import Ranks


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class _Unsharded:
    """Copies of all parameters, updated by the same optimizer with the whole gradients."""

    def __init__(self, model: nn.Module, make: Callable[[Any], Optimizer]) -> None:
        self.params = {name: nn.Parameter(_full(p.detach()).clone()) for name, p in model.named_parameters()}
        self.optimizer = make(self.params.values())

    def step(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            self.params[name].grad = None if param.grad is None else _full(param.grad).clone()
        self.optimizer.step()

    def check(self, model: nn.Module, optimizer: Optimizer, when: str) -> None:
        assert_same({n: _full(p.detach()) for n, p in model.named_parameters()}, self.params, when)
        ours, plain = optimizer.state_dict(), self.optimizer.state_dict()
        assert ours["param_groups"] == plain["param_groups"], when
        assert ours["state"].keys() == plain["state"].keys(), when
        for number, state in plain["state"].items():
            assert_same(
                {n: _full(v) for n, v in sorted(ours["state"][number].items())}, dict(sorted(state.items())), when
            )


def _input(rank: int, step: int) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def _train(rank: int, world_size: int, name: str, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = graphshard.compile(Net(), mesh, backend="eager")
    unsharded = _Unsharded(model, OPTIMIZERS[name])
    optimizer = MatrixOptimizer(OPTIMIZERS[name](model.parameters()))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, unsharded.optimizer)]
    for step in range(3):
        model(_input(rank, step)).square().mean().backward()
        unsharded.step(model)
        optimizer.step()
        optimizer.zero_grad()
        unsharded.check(model, optimizer, f"step {step}")
        for schedule in schedules:
            schedule.step()


@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.quick_cases("muon-(2,)", "shampoo-(3,)", "moonlight-(2, 2)", "adam-(2,)")
def test_unsharded_bits(ranks: Ranks, name: str, shape: tuple[int, ...]) -> None:
    """Parameters and state, with uneven and empty shards, replicas, and a schedule."""
    ranks(torch.Size(shape).numel()).run(_train, name, shape)


def _tensor_parallel(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    model = mlps(mesh["tp"])
    graphshard.compile(model, mesh["dp"], backend="eager")
    unsharded = _Unsharded(model, OPTIMIZERS["moonlight"])
    optimizer = MatrixOptimizer(OPTIMIZERS["moonlight"](model.parameters()))
    for step in range(2):
        torch.manual_seed(step)
        model(*rows()).backward()
        unsharded.step(model)
        optimizer.step()
        optimizer.zero_grad()
        unsharded.check(model, optimizer, f"step {step}")


def test_tensor_axes(ranks: Ranks) -> None:
    """Matrices that are cut along a tensor axis and a data axis, on both dims or twice on one."""
    ranks(4).run(_tensor_parallel)


class _Experts(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 6, 4) / 3)
        self.down = nn.Parameter(torch.randn(experts, 4, 6) / 3)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.down @ torch.tanh(self.up @ x)).sum(0).T).square().mean()


def _batches(rank: int, world_size: int, experts: int) -> list[int]:
    torch.manual_seed(0)
    model = graphshard.compile(_Experts(experts), world_mesh(), backend="eager")
    unsharded = _Unsharded(model, OPTIMIZERS["moonlight"])
    optimizer = MatrixOptimizer(OPTIMIZERS["moonlight"](model.parameters()), batches=[model.up, model.down])
    for step in range(2):
        model(torch.randn(4, 5)).backward()
        unsharded.step(model)
        optimizer.step()
        optimizer.zero_grad()
        unsharded.check(model, optimizer, f"step {step}")
        optimizer.load_state_dict(optimizer.state_dict())
    return [piece.owned.owner for piece in optimizer._pieces[model.up]]


@pytest.mark.parametrize("experts", [6, 5, 1])
def test_batches_of_matrices(ranks: Ranks, experts: int) -> None:
    """Experts have different owners, the ranks that have them whole if shards are by expert."""
    owners = ranks(3).run(_batches, experts)[0]
    if experts > 1:
        assert sorted(owners) == [0, 1, 2]


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _whole_step(rank: int, world_size: int, options: dict[str, Any]) -> bool:
    """Compare `compile_step` with the separate step."""
    models = [Net() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        graphshard.compile(model, world_mesh(), backend="eager")
    optimizers = [MatrixOptimizer(MoonlightMuon(model.parameters())) for model in models]
    step = graphshard.compile_step(models[0], optimizers[0], _loss, **options)
    for number in range(3):
        batches = [_input(rank, 5 * number + each) for each in range(options.get("accumulate", 1))]
        losses = step(*batches)
        for each, x in enumerate(batches):
            models[1].set_requires_gradient_sync(each == len(batches) - 1)
            loss = _loss(models[1], x)
            loss.backward()
        assert torch.equal(losses.reshape(-1)[-1], loss)
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(models[1].parameters(), options["clip_norm"])
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert_same(*map(params_of, models), f"step {number}")
    return step.updated_in_backward


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "gather_ahead": True}, {"clip_norm": 0.01}], ids=str)
def test_compile_step(ranks: Ranks, options: dict[str, Any]) -> None:
    """Gradients are sent to their owners in backward, unless all are clipped first."""
    assert ranks(2).run(_whole_step, options) == [not options.get("clip_norm")] * 2


def _save(rank: int, world_size: int, path: Path, name: str, steps: int, resume: bool) -> dict[str, Any]:
    """Train on the same rows on all ranks, so that gradients have the same bits on 1, 2 and 4 ranks."""
    torch.manual_seed(0)
    model = graphshard.compile(Net(8), world_mesh(), backend="eager")
    optimizer = MatrixOptimizer(OPTIMIZERS[name](model.parameters()))
    if resume:
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step + 2 * resume))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if not resume:
        dcp.save(
            {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path
        )
    return {n: _full(p.detach()) for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["muon", "shampoo"])
@pytest.mark.quick_cases("shampoo")
def test_checkpoints(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Saved on two ranks by DCP, and resumed on four: bits of training on without a stop."""
    whole = ranks(2).run(_save, tmp_path / "other", name, 4, False)[0]
    ranks(2).run(_save, tmp_path / "saved", name, 2, False)
    resumed = ranks(4).run(_save, tmp_path / "saved", name, 2, True)[0]
    assert_same(resumed, whole, "resumed")


def _balance(rank: int, world_size: int) -> tuple[list[float], int]:
    mesh = world_mesh()
    sizes = [(64, 64), (16, 64), (16, 64), (64, 64), (96, 64), (96, 64), (64, 96)] * 8
    params = [nn.Parameter(distribute_tensor(torch.zeros(*size), mesh, [Shard(0)])) for size in sizes]
    optimizer = MatrixOptimizer(torch.optim.Muon(params))
    (group,) = optimizer._groups.values()
    return group.loads, sum(piece.is_mine for param in params for piece in optimizer._pieces[param])


def test_balance(ranks: Ranks) -> None:
    """All ranks choose the same owners, each matrix has one, and work is even within the largest matrix's."""
    found = ranks(3).run(_balance)
    loads = found[0][0]
    assert all(each == loads for each, _ in found)
    assert sum(mine for _, mine in found) == 56
    assert max(loads) - min(loads) <= newton_schulz_flops(torch.Size((96, 64)))


def _boxes(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for placements in ([Shard(0), Shard(1)], [_StridedShard(0, split_factor=2), Shard(0)], [Replicate(), Shard(1)]):
        whole = torch.arange(35.0).view(5, 7)
        mine = boxes_of(tuple(whole.shape), tuple(mesh.shape), tuple(placements))[rank]
        inner = distribute_tensor(whole, mesh["tp"], placements[1:])
        if isinstance(placements[0], Replicate):
            expected = inner.to_local()
        else:
            expected = distribute_tensor(inner.to_local(), mesh["dp"], [Shard(placements[0].dim)]).to_local()
        cut = whole
        for dim, (start, length) in enumerate(mine):
            cut = cut.narrow(dim, start, length)
        assert torch.equal(cut, expected), placements


def test_parts_of_ranks(ranks: Ranks) -> None:
    """Parts are those of DTensors, also of sizes that do not divide."""
    ranks(4).run(_boxes)


def _refused(make: Callable[[nn.Module], Any], error: type[Exception]) -> str:
    with pytest.raises(error) as info:
        make(nn.Linear(4, 4))
    return str(info.value)


def test_wrong_arguments() -> None:
    """Errors name what was passed, and what to pass."""
    text = _refused(lambda net: MatrixOptimizer(net), ArgumentError)
    assert text.startswith("optimizer must be a torch.optim.Optimizer such as torch.optim.Muon, got a Linear")
    text = _refused(lambda net: MatrixOptimizer(MatrixOptimizer(torch.optim.SGD(net.parameters()))), ArgumentError)
    assert "got a MatrixOptimizer" in text
    text = _refused(lambda net: MatrixOptimizer(torch.optim.LBFGS(net.parameters())), UnsupportedError)
    assert "LBFGS computes the loss several times" in text
    text = _refused(lambda net: MatrixOptimizer(torch.optim.SGD(net.parameters()), cost=3), ArgumentError)
    assert text == "cost must be a function such as lambda shape: shape.numel(), got 3."
    text = _refused(lambda net: MatrixOptimizer(torch.optim.SGD([net.bias]), batches=[net.weight]), ArgumentError)
    assert text == "batches: a tensor of shape [4, 4] is not a parameter of the optimizer."
    text = _refused(lambda net: MatrixOptimizer(torch.optim.SGD([net.bias]), batches=[net.bias]), ArgumentError)
    assert text == "batches: a tensor of shape [4] is no batch of matrices."


def test_hook_on_the_wrapped_optimizer() -> None:
    """It would run for other parameters on each rank."""
    optimizer = torch.optim.SGD(nn.Linear(4, 4).parameters())
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"hook is registered on the step of SGD.*Register it on the Matrix"):
        MatrixOptimizer(optimizer).step()


def test_plain_parameters() -> None:
    """Without shards it is the optimizer itself."""
    nets = [nn.Linear(4, 4) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [
        MatrixOptimizer(OPTIMIZERS["moonlight"](nets[0].parameters())),
        OPTIMIZERS["moonlight"](nets[1].parameters()),
    ]
    for _ in range(2):
        for net, optimizer in zip(nets, optimizers):
            net(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(*map(params_of, nets), "plain")
    assert optimizers[0]._wrapped.updates == 2
