"""`compile_step`: a whole training step in one call matches separate steps of FSDP2 and of the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import graphshard
from graphshard import Pipeline
from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.passes import MakePlan
from graphshard.runtime.step_overlap import Updates
from tests.distributed.test_checkpoint import Net
from tests.distributed.twins import (
    BF16,
    FP32,
    assert_same,
    example_llama,
    fsdp2,
    grads_of,
    local,
    params_of,
    sharded_alike,
    twins,
    world_mesh,
)
from tests.helpers import COALESCED
from tests.ranks import Ranks

Optimizers = dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]]
SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
OPTIMIZERS: Optimizers = {
    "sgd": (SGD, {"weight_decay": 0.1}),
    "sgd momentum": (SGD, {"momentum": 0.9, "dampening": 0.1}),
    "sgd nesterov foreach": (SGD, {"momentum": 0.9, "nesterov": True, "foreach": True, "maximize": True}),
    "adam amsgrad": (ADAM, {"amsgrad": True, "weight_decay": 0.1}),
    "adam maximize foreach": (ADAM, {"maximize": True, "foreach": True}),
    "adamw": (ADAMW, {}),
    "adamw fused": (ADAMW, {"fused": True}),
    "adamw, lr is a tensor": (ADAMW, {"lr": torch.tensor(0.02)}),
}
OTHERS: Optimizers = {
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "asgd": (torch.optim.ASGD, {"t0": 1}),
    "nadam": (torch.optim.NAdam, {"decoupled_weight_decay": True}),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
}


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _input(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups: matrices decay; other parameters do not and have a higher learning rate."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.1},
    ]


def _separate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    calls: list[tuple[Any, ...]],
    loss: Callable[..., Tensor] = _loss,
    clip_norm: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run the step that `compile_step` compiles, written out in eager code."""
    losses, norm = [], None
    for index, args in enumerate(calls):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(index == len(calls) - 1)
        losses.append(loss(model, *args))
        losses[-1].backward()
    if clip_norm is not None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    optimizer.step()
    optimizer.zero_grad()
    stacked = torch.stack([one.detach() for one in losses]) if len(losses) > 1 else losses[0].detach()
    return stacked, norm


def _states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {f"{n}.{key}": v for n, p in model.named_parameters() for key, v in optimizer.state[p].items()}


def _assert_same_state(models: Any, optimizers: Any, when: str) -> None:
    """Check that parameters and optimizer states have equal bits, names, classes and placements."""
    assert_same(*map(params_of, models), when)
    ours, theirs = (_states_of(*both) for both in zip(models, optimizers))
    assert_same(ours, theirs, f"state, {when}")
    assert [(type(a), getattr(a, "placements", None)) for a in ours.values()] == [
        (type(b), getattr(b, "placements", None)) for b in theirs.values()
    ], when
    assert all(grad is None for model in models for grad in grads_of(model).values()), when


def _train_both(rank: int, step: graphshard.CompiledStep, pair: Any, optims: Any) -> None:
    """Run two steps with updates in backward, and separate steps of the other model; compare bits."""
    for number in range(2):
        x = _input(rank, number)
        step(x)
        assert step.updated_in_backward
        _separate(pair[1], optims[1], [(x,)])
        _assert_same_state(pair, optims, f"step {number}")


def _optimizers(rank: int, world_size: int, which: Optimizers, clip_norm: float | None) -> None:
    pair = twins(Net(), world_mesh())
    for name, (cls, options) in which.items():
        optims = [cls(_groups(model), **copy.deepcopy({"lr": 0.02} | options)) for model in pair]
        schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optim, 5) for optim in optims]
        step = graphshard.compile_step(pair[0], optims[0], _loss, clip_norm=clip_norm)
        for number in range(3):
            x = _input(rank, number)
            loss, (expected, norm) = step(x), _separate(pair[1], optims[1], [(x,)], clip_norm=clip_norm)
            assert torch.equal(loss, expected)
            assert not loss.requires_grad
            assert step.updated_in_backward is (clip_norm is None)
            if clip_norm is not None:
                assert norm is not None
                assert torch.equal(step.grad_norm, norm)
                assert norm > clip_norm
            for schedule in schedules:
                schedule.step()
            _assert_same_state(pair, optims, f"{name}, step {number}")
        saved = [copy.deepcopy(optim.state_dict()) for optim in optims]
        assert saved[0]["param_groups"] == saved[1]["param_groups"]


@pytest.mark.parametrize("clip_norm", [None, 1e-4])
@pytest.mark.slow
def test_optimizers_equal_fsdp2(ranks: Ranks, clip_norm: float | None) -> None:
    """With parameter groups and a schedule, on uneven and empty shards; parameters and state bit for bit."""
    ranks(3).run(_optimizers, OPTIMIZERS, clip_norm)


@pytest.mark.slow
def test_other_optimizers_equal_fsdp2(ranks: Ranks) -> None:
    """All supported optimizers."""
    ranks(3).run(_optimizers, OTHERS, None)


# --- models -------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Tied, frozen, unused and scalar parameters, one used in two units, and one with transposed memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(5))
        self.turned = nn.Parameter(torch.randn(6, 7).t())
        self.blocks[1].weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = x + torch.relu(block(x))
        x = (x @ self.turned.t()).tanh() @ self.turned
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def _llama_steps(rank: int, world_size: int, policy: MixedPrecisionPolicy, mesh: tuple[int, ...], n: int) -> None:
    torch.manual_seed(0)
    model, batch = example_llama()
    devices = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
    pair = twins(model, devices, mp_policy=policy)
    optims = [ADAMW(model.parameters(), lr=0.02) for model in pair]
    clip_norm = 1.0 if n > 2 else None
    step = graphshard.compile_step(pair[0], optims[0], accumulate=n, clip_norm=clip_norm)
    torch.manual_seed(1 + rank)
    for number in range(3):
        calls = [batch() for _ in range(n)]
        loss = step(*calls) if n > 1 else step(**calls[0])
        assert step.updated_in_backward is (clip_norm is None)
        expected, norm = _separate_by_name(pair[1], optims[1], calls, clip_norm)
        assert torch.equal(loss, expected)
        assert step.grad_norm is norm is None or torch.equal(step.grad_norm, norm)
        _assert_same_state(pair, optims, f"step {number}")


def _separate_by_name(model: nn.Module, optim: Any, calls: list[dict[str, Tensor]], clip_norm: float | None) -> Any:
    return _separate(model, optim, [(call,) for call in calls], lambda model, call: model(**call), clip_norm)


@pytest.mark.parametrize("policy", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("mesh", "n"), [((2,), 1), ((2,), 3), ((2, 2), 2)], ids=str)
@pytest.mark.slow
def test_llama(ranks: Ranks, policy: MixedPrecisionPolicy, mesh: tuple[int, ...], n: int) -> None:
    """One microbatch, two, and three with clipping; in mixed precision; on two axes."""
    ranks(4 if len(mesh) == 2 else 2).run(_llama_steps, policy, mesh, n)


def _joined_steps(rank: int, world_size: int, mesh: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, batch = example_llama(layers=4)
    devices = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
    theirs = fsdp2(copy.deepcopy(model), devices, mp_policy=BF16)
    passes = Pipeline().replace("plan", MakePlan(COALESCED))
    options: Any = {"backend": "eager", "hardware": "h100", "mp_policy": BF16, "passes": passes}
    pair = graphshard.compile(model, devices, **options), theirs
    optims = [ADAMW(model.parameters(), lr=0.02) for model in pair]
    step = graphshard.compile_step(pair[0], optims[0])
    torch.manual_seed(1 + rank)
    for number in range(3):
        call = batch()
        with mock.patch.object(Updates, "_update", autospec=True, side_effect=Updates._update) as update:
            loss = step(**call)
        assert update.call_count == (3 if len(mesh) == 1 else 2)  # of five buckets
        assert torch.equal(loss, _separate_by_name(pair[1], optims[1], [call], None)[0])
        _assert_same_state(pair, optims, f"step {number}")


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=["sharded", "HSDP"])
@pytest.mark.quick_cases("sharded")
def test_one_wait_for_a_bucket_and_joined_updates(ranks: Ranks, mesh: tuple[int, ...]) -> None:
    """Coalesced buckets have one wait, and costs of a GPU join the updates of small buckets; bits stay FSDP2's."""
    ranks(2 * len(mesh)).run(_joined_steps, mesh)


def _odd_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens)


def _odd(rank: int, world_size: int, clip_norm: float | None) -> list[bool]:
    torch.manual_seed(0)
    model = Odd()
    pair = [graphshard.compile(one, world_mesh(), backend="eager") for one in (model, copy.deepcopy(model))]
    taken = []
    for cls, options in ((ADAM, {}), (torch.optim.ASGD, {"t0": 1}), (SGD, {"momentum": 0.9})):
        optims = [cls(model.parameters(), lr=0.02, **options) for model in pair]
        step = graphshard.compile_step(pair[0], optims[0], clip_norm=clip_norm)
        for number in range(3):
            tokens = torch.randint(11, (2, 4), generator=torch.Generator().manual_seed(2 * number + rank))
            loss = step(tokens)
            taken.append(step.updated_in_backward)
            expected, norm = _separate(pair[1], optims[1], [(tokens,)], _odd_loss, clip_norm)
            assert torch.equal(loss, expected)
            assert norm is None or torch.equal(step.grad_norm, norm)
            _assert_same_state(pair, optims, f"{cls.__name__}, step {number}")
            if number == 1:
                for optim in optims:
                    optim.load_state_dict(copy.deepcopy(optim.state_dict()))
    return taken


@pytest.mark.slow
def test_odd_parameters(ranks: Ranks) -> None:
    """Tied, frozen, unused, scalar and transposed parameters; the optimizer state is loaded in between.

    FSDP2 does not support scalars and transposed parameters, so the reference is a separate step of the same model.
    """
    assert ranks(2).run(_odd, None) == [[True] * 9] * 2


def test_odd_parameters_clipped(ranks: Ranks) -> None:
    """Parameters with different placements."""
    assert ranks(2).run(_odd, 0.5) == [[False] * 9] * 2


# --- cases without updates in backward ----------------------------------------------------------------------


def _twice(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) + model(2 * x)).square().mean()


def _with_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """Read a parameter outside of the model's call."""
    return _loss(model, x) + model.blocks[0].weight.square().sum().full_tensor() / 2


def _checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    """Checkpoint the call: backward repeats it, which autograd's graph does not show."""
    return torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=True).square().mean()


def _in_parts(model: nn.Module, x: Tensor) -> Tensor:
    """Call a unit outside of the model's call."""
    return _loss(model, x) + model.blocks[0](x).square().mean()


LOSSES = {"one call": _loss, "twice": _twice, "penalty": _with_penalty, "parts": _in_parts, "reentrant": _checkpointed}


def _losses(rank: int, world_size: int, clip_norm: float | None) -> dict[str, bool]:
    model = Net()
    pair = [graphshard.compile(one, world_mesh(), backend="eager") for one in (model, copy.deepcopy(model))]
    taken = {}
    for name, loss in LOSSES.items():
        optims = [ADAMW(model.parameters(), lr=0.02) for model in pair]
        step = graphshard.compile_step(pair[0], optims[0], loss, clip_norm=clip_norm)
        for number in range(2):
            x = _input(rank, number)
            got, (expected, norm) = step(x), _separate(pair[1], optims[1], [(x,)], loss, clip_norm)
            assert torch.equal(got, expected), name
            assert norm is None or torch.equal(step.grad_norm, norm), name
            _assert_same_state(pair, optims, f"{name}, step {number}")
        taken[name] = step.updated_in_backward
    return taken


@pytest.mark.parametrize("clip_norm", [None, 1e-4])
@pytest.mark.slow
def test_losses(ranks: Ranks, clip_norm: float | None) -> None:
    """With clipping, or gradients from outside of the call, updates follow backward, with equal results."""
    expected = {name: name == "one call" and clip_norm is None for name in LOSSES}
    assert ranks(2).run(_losses, clip_norm) == [expected] * 2


def _surroundings(rank: int, world_size: int) -> list[bool]:
    model = Net()
    pair = [graphshard.compile(one, world_mesh(), backend="eager") for one in (model, copy.deepcopy(model))]
    own = [[p for n, p in model.named_parameters() if "head" not in n] for model in pair]
    optims = [ADAMW(params, lr=0.02) for params in own]
    step = graphshard.compile_step(pair[0], optims[0], _loss)
    taken = []

    def both(x: Tensor, when: str) -> None:
        assert torch.equal(step(x), _separate(pair[1], optims[1], [(x,)])[0])
        taken.append(step.updated_in_backward)
        assert_same(*map(params_of, pair), when)
        assert_same(*map(grads_of, pair), when)

    both(_input(rank), "gradients of parameters that the optimizer has not stay")
    assert {n for n, grad in grads_of(pair[0]).items() if grad is not None} == {"head.weight", "head.bias"}
    for model in pair:
        model.zero_grad()
    for model in pair:
        _loss(model, _input(rank, 1)).backward()
    both(_input(rank, 2), "added to gradients that were there")
    for model in pair:
        model.zero_grad()
    seen: list[list[float]] = [[], []]
    hooks = [
        model.blocks[0].weight.register_post_accumulate_grad_hook(lambda p, s=s: s.append(p.grad.to_local().sum()))
        for model, s in zip(pair, seen)
    ]
    both(_input(rank, 3), "a hook sees the gradient")
    assert seen[0] == seen[1] != []
    for model, hook in zip(pair, hooks):
        hook.remove()
        model.zero_grad()
    both(_input(rank, 4), "without it")
    with_hook = optims[0].register_step_post_hook(_hook)
    with pytest.raises(UnsupportedError, match="hook is registered on the step of AdamW"):
        step(_input(rank))
    with_hook.remove()
    optims[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(ArgumentError, match=r"parameter 0 of group 1, of shape \[3\], is not the model's"):
        step(_input(rank))
    return taken


def _hook(*_: Any) -> None:
    """Do nothing, as a hook of an optimizer's step."""


def test_other_parameters_gradients_and_hooks(ranks: Ranks) -> None:
    """Other parameters, existing gradients, parameter hooks; hooks and groups that are added later."""
    assert ranks(2).run(_surroundings) == [[True, False, False, True]] * 2


def _scaler(rank: int, world_size: int, clip_norm: float | None) -> list[float]:
    pair = twins(Net(), world_mesh())
    optims = [ADAMW(model.parameters(), lr=0.02) for model in pair]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in pair]
    step = graphshard.compile_step(pair[0], optims[0], _loss, clip_norm=clip_norm, scaler=scalers[0])
    scales = []
    for number in range(4):
        x = _input(rank, number)
        if number == 2 and rank == 1:
            x[0, 0] = float("inf")
        step(x)
        scalers[1].scale(_loss(pair[1], x)).backward()
        if clip_norm is not None:
            scalers[1].unscale_(optims[1])
            nn.utils.clip_grad_norm_(pair[1].parameters(), clip_norm)
        scalers[1].step(optims[1])
        scalers[1].update()
        optims[1].zero_grad()
        _assert_same_state(pair, optims, f"step {number}")
        scales.append(scalers[0].get_scale())
    return scales


@pytest.mark.parametrize("clip_norm", [None, 1e-4])
@pytest.mark.quick_cases("0.0001")
def test_scaler(ranks: Ranks, clip_norm: float | None) -> None:
    """An inf on one rank skips the step on all ranks, and all lower their scale."""
    assert ranks(2).run(_scaler, clip_norm) == [[1024.0, 2048.0, 1024.0, 1024.0]] * 2


def _inductor(rank: int, world_size: int, given: dict[str, bool], separate: dict[str, bool]) -> None:
    model = Net()
    pair = [graphshard.compile(one, world_mesh(), backend="inductor") for one in (model, copy.deepcopy(model))]
    optims = [ADAMW(model.parameters(), lr=0.02, **own) for model, own in zip(pair, (given, separate))]
    step = graphshard.compile_step(pair[0], optims[0], _loss, accumulate=2)
    for number in range(2):
        calls = [(_input(rank, 2 * number + index),) for index in range(2)]
        for index, (x,) in enumerate(calls):
            pair[1].set_requires_gradient_sync(index == 1)
            _loss(pair[1], x).backward()
        optims[1].step()
        optims[1].zero_grad()
        assert step(*calls).shape == (2,)
        assert step.updated_in_backward
        _assert_same_state(pair, optims, f"step {number}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "separate"), [({}, {"fused": True}), ({"foreach": False}, {"foreach": False})], ids=str
)
def test_inductor(ranks: Ranks, given: dict[str, bool], separate: dict[str, bool]) -> None:
    """Equals a separate step of the same program with the same optimizer kernel."""
    ranks(2).run(_inductor, given, separate)


def _replicated(rank: int, world_size: int) -> None:
    """Nothing is gathered, so regions read the shards; also with offloading."""
    for options in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        pair = twins(Net(), mesh, **options)
        optims = [SGD(model.parameters(), lr=0.02, momentum=0.9) for model in pair]
        step = graphshard.compile_step(pair[0], optims[0], _loss)
        _train_both(rank, step, pair, optims)


@pytest.mark.slow
def test_replicated(ranks: Ranks) -> None:
    """Data parallelism without sharding."""
    ranks(2).run(_replicated)


class _Same(nn.Module):
    """Two parameters with the same gradient, and one with a different one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(7)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.a + self.b) * self.c


def _same_gradients(rank: int, world_size: int) -> list[bool]:
    taken = []
    for clip_norm in (None, 1e-4):
        model = _Same()
        pair = [graphshard.compile(one, world_mesh(), backend="eager") for one in (model, copy.deepcopy(model))]
        optims = [SGD(model.parameters(), lr=0.02, momentum=0.9) for model in pair]
        step = graphshard.compile_step(pair[0], optims[0], _loss, clip_norm=clip_norm)
        for number in range(2):
            x = _input(rank, number)
            assert torch.equal(step(x), _separate(pair[1], optims[1], [(x,)], clip_norm=clip_norm)[0])
            _assert_same_state(pair, optims, f"step {number}")
        taken.append(step.updated_in_backward)
    return taken


def test_one_tensor_as_gradient_of_two_parameters(ranks: Ranks) -> None:
    """On one rank nothing is reduced, and the result of one operator is the gradient of both parameters."""
    assert ranks(1).run(_same_gradients) == [[True, False]]


def _in_units(rank: int, world_size: int) -> None:
    def parallelize(shard: Callable[..., Any], model: nn.Module) -> None:
        for block in model.blocks:
            shard(block, mesh=world_mesh(), reshard_after_forward=True)
        shard(model, mesh=world_mesh(), reshard_after_forward=True)

    pair = sharded_alike(parallelize, Net())
    optims = [ADAMW(model.parameters(), lr=0.02) for model in pair]
    step = graphshard.compile_step(pair[0], optims[0], _loss)
    for number in range(3):
        x = _input(rank, number)
        step(x)
        assert step.updated_in_backward
        _separate(pair[1], optims[1], [(x,)])
        _assert_same_state(pair, optims, f"step {number}")


@pytest.mark.slow
def test_fully_shard(ranks: Ranks) -> None:
    """A model sharded part by part, with everything gathered again in backward."""
    ranks(2).run(_in_units)


def _loaded(rank: int, world_size: int, path: Path) -> None:
    pair = twins(Net(), world_mesh())
    model = Net()
    shards = pair[1].state_dict()
    model.load_state_dict({n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in shards.items()})
    pair = graphshard.load(path, model, world_mesh()), pair[1]
    optims = [ADAMW(model.parameters(), lr=0.02) for model in pair]
    step = graphshard.compile_step(pair[0], optims[0], _loss)
    _train_both(rank, step, pair, optims)


@pytest.mark.slow
def test_loaded(ranks: Ranks, tmp_path: Path) -> None:
    """Programs loaded from a file."""
    path = graphshard.export(Net(), (2,), tmp_path / "net.gshard", example_inputs=(_input(0),), backend="eager")
    ranks(2).run(_loaded, path)


def _muon(rank: int, world_size: int, clip_norm: float | None) -> None:
    """Biases are not matrices and keep their gradients; torch's step fails on DTensors of one row (2.13)."""
    pair = twins(Net(), world_mesh())
    optims = [
        torch.optim.Muon([p for p in model.parameters() if p.dim() == 2 and len(p) > 1], lr=0.02) for model in pair
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(optim, lambda epoch: 1 / (1 + epoch)) for optim in optims]
    step = graphshard.compile_step(pair[0], optims[0], _loss, clip_norm=clip_norm)
    for number in range(3):
        before = local(next(pair[0].parameters())).clone()
        x = _input(rank, number)
        loss, (expected, norm) = step(x), _separate(pair[1], optims[1], [(x,)], clip_norm=clip_norm)
        assert torch.equal(loss, expected)
        assert norm is None or torch.equal(step.grad_norm, norm)
        assert not step.updated_in_backward
        assert_same(*map(params_of, pair), f"step {number}")
        assert_same(*map(grads_of, pair), f"gradients of step {number}")
        assert_same(*(_states_of(*both) for both in zip(pair, optims)), f"state, step {number}")
        assert not torch.equal(local(next(pair[0].parameters())), before)
        for schedule in schedules:
            schedule.step()


@pytest.mark.parametrize("clip_norm", [None, 1e-4])
@pytest.mark.quick_cases("None")
def test_muon(ranks: Ranks, clip_norm: float | None) -> None:
    """torch's Muon multiplies whole matrices, as DTensors; its updates run after backward."""
    ranks(2).run(_muon, clip_norm)
