"""Scalar parameters: every rank has the full value, and gradients are averaged over all ranks.

FSDP2 rejects scalars and suggests vectors of one element, which compute the same. The twin is therefore the same net
with such vectors; everything is bitwise equal except the shape.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate

import graphshard
from tests.distributed.nets import Block, data_parallel, full, rows, train
from tests.distributed.twins import POLICIES, fsdp2, local, params_of, world_mesh
from tests.ranks import Ranks

FP16 = MixedPrecisionPolicy(reduce_dtype=torch.float16)


class Gated(Block):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(8, 12)
        self.gate = nn.Parameter(torch.full(shape, 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x) * self.gate.view(())


class Scaled(nn.Module):
    """Temperatures inside and outside of units, one of them frozen; scalars, or vectors of one element."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Gated(shape) for _ in range(2))
        self.temperature = nn.Parameter(torch.full(shape, 1.7))
        self.offset = nn.Parameter(torch.full(shape, 0.1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x * self.temperature.view(()).exp() + self.offset.view(())


def _pair(mesh: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    ours = Scaled()
    theirs = Scaled((1,))
    for name, param in theirs.named_parameters():
        param.data.copy_(ours.get_parameter(name).view_as(param))
    return graphshard.compile(ours, mesh, backend="eager", **options), fsdp2(theirs, mesh, **options)


def _steps(model: nn.Module, rank: int, optimizer: type[torch.optim.Optimizer], **options: Any) -> dict[str, Tensor]:
    optim = optimizer(model.parameters(), lr=0.05, **options)
    found: dict[str, Tensor] = {}
    for step in range(3):
        loss = model(rows(10 * step + rank)).float().square().mean()
        loss.backward()
        found |= {f"gradient of {name} {step}": grad for name, grad in _gradients(model).items()}
        optim.step()
        optim.zero_grad()
        found[f"loss {step}"] = loss.detach()
    return found | full(params_of(model))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.full_tensor().clone() for n, p in model.named_parameters() if p.grad is not None}


def _equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    differing = [n for n, value in ours.items() if not torch.equal(value.reshape(-1), theirs[n].reshape(-1))]
    assert not differing, differing
    assert len(ours) == len(theirs)


OPTIMIZERS = {
    "fused": (torch.optim.AdamW, {"fused": True}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "loop": (torch.optim.SGD, {"foreach": False, "momentum": 0.9}),
}


def _train(
    rank: int, world_size: int, shape: tuple[int, ...], policy: MixedPrecisionPolicy, options: dict[str, Any]
) -> None:
    names = ("replicate", "shard")[-len(shape) :]
    for optimizer, settings in list(OPTIMIZERS.values())[: 1 if options or len(shape) > 1 else None]:
        pair = _pair(init_device_mesh("cpu", shape, mesh_dim_names=names), mp_policy=policy, **options)
        _equal(*(_steps(model, rank, optimizer, **settings) for model in pair))
    temperature = pair[0].temperature
    assert isinstance(temperature, DTensor)
    assert all(isinstance(placement, Replicate) for placement in temperature.placements)
    assert temperature.shape == temperature.to_local().shape == ()


@pytest.mark.parametrize("policy", [*POLICIES.values(), FP16], ids=[*POLICIES, "fp16"])
@pytest.mark.slow
def test_training_equals_fsdp2_with_vectors_of_one_element(ranks: Ranks, policy: MixedPrecisionPolicy) -> None:
    """Losses, gradients, norms and parameters, with each kind of optimizer."""
    ranks(2).run(_train, (2,), policy, {})


@pytest.mark.parametrize(
    "options", [{"reshard_after_forward": False}, {"offload_policy": CPUOffloadPolicy(False)}], ids=str
)
@pytest.mark.quick_cases("{'offload_policy': CPUOffloadPolicy(pin_memory=False)}")
def test_options_equal_fsdp2(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks(2).run(_train, (2,), POLICIES["fp32"], options)


@pytest.mark.slow
def test_two_axes_equal_fsdp2(ranks: Ranks) -> None:
    """Gradients of scalars are averaged over both."""
    ranks(4).run(_train, (2, 2), POLICIES["bf16"], {})


def _against_plain_torch(rank: int, world_size: int, backend: str) -> None:
    torch.manual_seed(0)
    model = Scaled()
    steps = [[rows(10 * step + r) for r in range(world_size)] for step in range(3)]
    expected = data_parallel(copy.deepcopy(model), steps)
    ours = full(train(graphshard.compile(model, world_mesh(), backend=backend), [inputs[rank] for inputs in steps]))
    trained = {name: value for name, value in expected.items() if value is not None}
    torch.testing.assert_close({name: ours[name] for name in trained}, trained)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.slow
def test_training_matches_plain_torch(ranks: Ranks, backend: str) -> None:
    ranks(2).run(_against_plain_torch, backend)


def _accumulate(rank: int, world_size: int) -> None:
    found = []
    for model in _pair(world_mesh()):
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            model(rows(10 * micro + rank)).square().mean().backward()
        for module in [m for m in model.modules() if isinstance(m, FSDPModule)] or [model]:
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot divide while it sums
            module.set_gradient_divide_factor(3.0)
        model(rows(rank)).square().mean().backward()
        found.append(_gradients(model))
    _equal(*found)


@pytest.mark.slow
def test_microbatches_and_another_divisor_equal_fsdp2(ranks: Ranks) -> None:
    ranks(2).run(_accumulate)


def _clipped(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    names = ("replicate", "shard")[-len(shape) :]
    norms, found = [], []
    for model in _pair(init_device_mesh("cpu", shape, mesh_dim_names=names)):
        model(rows(rank)).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor())
        found.append({name: grad.view(-1) for name, grad in _gradients(model).items()})
    assert norms[0] > 2
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(*found)


@pytest.mark.slow
def test_gradients_are_clipped_by_the_global_norm(ranks: Ranks) -> None:
    """A scalar counts once, not once per rank. Squares are added in a different order than for FSDP2's vectors."""
    ranks(2).run(_clipped, (2,))
    ranks(4).run(_clipped, (2, 2))


def _state(rank: int, world_size: int, path: Path) -> None:
    torch.manual_seed(0)
    model = graphshard.compile(Scaled(), world_mesh(), backend="eager")
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(rows(rank)).square().mean().backward()
    optim.step()
    graphshard.checkpoint.save_checkpoint(path / "1", model, optim)
    trained = full(model.state_dict())
    torch.manual_seed(1 + rank)
    other = graphshard.compile(Scaled(), world_mesh(), backend="eager")
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0.5)
    others = torch.optim.AdamW(other.parameters(), lr=0.1)
    graphshard.checkpoint.load_checkpoint(path / "1", other, others)
    _equal(full(other.state_dict()), trained)
    assert torch.equal(*(local(o.state[m.temperature]["exp_avg"]) for m, o in ((model, optim), (other, others))))
    plain = Scaled()
    plain.load_state_dict(trained)
    plain.temperature.data.fill_(4.0)
    other.load_state_dict(plain.state_dict())  # full tensors, equal on all ranks
    assert other.temperature.to_local().item() == 4.0
    torch.testing.assert_close(other(rows(0)), plain(rows(0)))


@pytest.mark.slow
def test_states_and_checkpoints_hold_scalars(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_state, tmp_path)


def _from_meta(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = Scaled()
    compiled = graphshard.compile(model, world_mesh(), backend="eager")
    compiled.to_empty(device="cpu")
    torch.manual_seed(0)
    with graphshard.checkpoint.unsharded_init():
        for param in compiled.parameters():
            nn.init.normal_(param)
    plain = Scaled()
    torch.manual_seed(0)
    expected = {name: nn.init.normal_(param).detach() for name, param in plain.named_parameters()}
    _equal(full(params_of(compiled)), expected)


def test_scalars_are_initialized_from_the_meta_device(ranks: Ranks) -> None:
    """With the values of the unsharded model, equal on all ranks."""
    ranks(2).run(_from_meta)


def _load(rank: int, world_size: int, path: Path) -> None:
    torch.manual_seed(0)
    model = Scaled()
    mesh = world_mesh()
    ours = graphshard.compile(copy.deepcopy(model), mesh, backend="eager")
    if rank == 0:
        graphshard.export(copy.deepcopy(model), 2, path, example_inputs=[rows(0)], device="cpu", backend="eager")
    dist.barrier()
    loaded = graphshard.load(path, copy.deepcopy(model), mesh)
    _equal(*(_steps(each, rank, torch.optim.AdamW) for each in (loaded, ours)))


@pytest.mark.slow
def test_artifacts_hold_scalars(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_load, tmp_path / "scaled.gshard")


@pytest.mark.slow
def test_training_is_predicted() -> None:
    """The gradients of all scalars are one collective, and formulas know that scalars are not sharded."""
    found = graphshard.explain(Scaled(), 8, example_inputs=[rows(0)])
    with_vectors = graphshard.explain(Scaled((1,)), 8, example_inputs=[rows(0)])
    assert 0 < found.step_time_s < 2 * with_vectors.step_time_s
