"""Optimizers, clipping, scaling and averaging on sharded parameters, compared with FSDP2 and the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.torch_version import TorchVersion

import graphshard
from tests.distributed.test_checkpoint import Net
from tests.distributed.twins import assert_same, fsdp2, grads_of, params_of, twins, world_mesh
from tests.ranks import RankError, Ranks


def _input(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def _backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _full_params(model: nn.Module) -> dict[str, Tensor]:
    return {name: _full(param.detach()) for name, param in model.named_parameters()}


def _states_of(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    return {f"{n}.{key}": v for n, p in model.named_parameters() for key, v in optim.state[p].items()}


# --- steps --------------------------------------------------------------------------------------------------


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups: matrices decay; other parameters do not and have a higher learning rate."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0, "lr": 0.1},
    ]


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
WAYS: dict[str, dict[str, Any]] = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    **{f"sgd {way}": (SGD, WAYS[way]) for way in ("single", "foreach")},
    **{f"sgd momentum {way}": (SGD, {"momentum": 0.9, "dampening": 0.1} | WAYS[way]) for way in ("single", "foreach")},
    **{f"sgd nesterov {way}": (SGD, {"momentum": 0.9, "nesterov": True} | WAYS[way]) for way in ("single", "foreach")},
    **{f"adam {way}": (ADAM, {"amsgrad": True} | options) for way, options in WAYS.items()},
    **{f"adamw {way}": (ADAMW, options) for way, options in WAYS.items()},
    "adamw, lr is a tensor": (ADAMW, {"lr": torch.tensor(0.02)}),
}


def _steps(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    pair = twins(Net(), world_mesh())
    for name, (optimizer, options) in OPTIMIZERS.items():
        # A schedule changes the tensor in place, so each optimizer has a separate one.
        optims = [optimizer(_groups(model), **copy.deepcopy({"lr": 0.02} | options)) for model in pair]
        schedules = [
            torch.optim.lr_scheduler.SequentialLR(
                optim,
                [
                    torch.optim.lr_scheduler.LinearLR(optim, 0.1, total_iters=2),
                    torch.optim.lr_scheduler.CosineAnnealingLR(optim, 5),
                ],
                [2],
            )
            for optim in optims
        ]
        for step in range(4):
            for model, optim, schedule in zip(pair, optims, schedules):
                optim.zero_grad(set_to_none=step != 1)
                _backward(model, _input(rank, step))
                optim.step()
                schedule.step()
            assert_same(*map(params_of, pair), f"{name}, step {step}")
        assert_same(*(_states_of(*both) for both in zip(pair, optims)), f"state of {name}")
        for set_to_none in (False, True):
            optims[0].zero_grad(set_to_none)
            grads = grads_of(pair[0]).values()
            assert all(grad is None if set_to_none else not grad.to_local().any() for grad in grads)
        assert [group["lr"] for group in optims[0].param_groups] == [group["lr"] for group in optims[1].param_groups]


@pytest.mark.slow
def test_optimizers_equal_fsdp2(ranks: Ranks) -> None:
    """With parameter groups and a schedule, on uneven and empty shards; parameters and state bit for bit."""
    ranks(3).run(_steps)


def _fused_sgd(rank: int, world_size: int, impl: str) -> None:
    model = Net()
    fsdp2(model, world_mesh()) if impl == "fsdp2" else graphshard.compile(model, world_mesh(), backend="eager")
    optim = SGD(model.parameters(), lr=0.1, fused=True)
    _backward(model, _input(rank))
    optim.step()


@pytest.mark.parametrize("impl", ["graphshard", "fsdp2"])
@pytest.mark.quick_cases("fsdp2")
def test_fused_sgd_rejects_dtensors(ranks: Ranks, impl: str) -> None:
    """torch 2.13 rejects DTensors of any origin. When this test fails, add fused SGD to OPTIMIZERS."""
    with pytest.raises(RankError, match=r"_fused_sgd_"):
        ranks(2).run(_fused_sgd, impl)


# --- optimizers that need whole matrices --------------------------------------------------------------------


def _orthogonalized(matrix: Tensor) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrix: X <- 1.5 X - 0.5 X X^T X."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        x = 1.5 * x - 0.5 * x @ x.mT @ x
    return x


class _Whole(torch.optim.Optimizer):
    """Momentum and an orthogonalized update, which depends on the whole matrix. As in the README.

    The momentum is sharded like the parameter. Every rank gathers one matrix at a time.
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                momentum.lerp_(param.grad, 1 - group["momentum"])
                update = _orthogonalized(_full(momentum))
                param.add_(_like(param, update), alpha=-group["lr"])


def _like(param: Tensor, value: Tensor) -> Tensor:
    """Shard a full value, equal on all ranks, like a parameter, without communication."""
    if not isinstance(param, DTensor):
        return value
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() == 2]


def _whole(rank: int, world_size: int) -> None:
    plain = Net()
    pair = twins(copy.deepcopy(plain), world_mesh())
    nets = [*pair, plain]
    optims = [_Whole(_matrices(net), lr=0.05) for net in nets]
    for step in range(3):
        for net, optim in zip(nets, optims):
            _backward(net, _input(0, step))  # equal rows on all ranks: the mean gradient equals one rank's
            optim.step()
            net.zero_grad()
        assert_same(*map(params_of, pair), f"step {step}")
        for name, param in _full_params(pair[0]).items():
            torch.testing.assert_close(param, plain.get_parameter(name).detach(), msg=f"{name} at step {step}")
    shard = pair[0].blocks[0].weight
    assert optims[0].state[shard]["momentum"].placements == shard.placements
    # With equal parameters and gradients the step has equal bits.
    with torch.no_grad():
        for param, sharded in zip(plain.parameters(), pair[0].parameters()):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel()))
            sharded.grad = _like(sharded, param.grad)
            sharded.copy_(_like(sharded, param))
    for net in (pair[0], plain):
        _Whole(_matrices(net), lr=0.05).step()
    assert_same(_full_params(pair[0]), {name: p.detach() for name, p in plain.named_parameters()}, "one step")


@pytest.mark.slow
def test_an_optimizer_that_needs_whole_matrices(ranks: Ranks) -> None:
    """With parameters gathered one by one, the step equals the unsharded model's."""
    ranks(3).run(_whole)


def _muon(rank: int, world_size: int) -> None:
    plain = Net()
    pair = twins(copy.deepcopy(plain), world_mesh())
    nets = [*pair, plain]
    optims = [torch.optim.Muon(_matrices(net.blocks), lr=0.05) for net in nets]
    for step in range(3):
        for net, optim in zip(nets, optims):
            net.zero_grad()
            _backward(net, _input(0, step))
            optim.step()
        assert_same(*map(params_of, pair), f"step {step}")
        for name, param in _full_params(pair[0]).items():
            expected = plain.get_parameter(name).detach()
            torch.testing.assert_close(param, expected, atol=1e-2, rtol=0, msg=f"{name} at step {step}")
    # Fewer rows than ranks: DTensors of torch 2.11 support it, later releases do not.
    errors = []
    for net in pair:
        try:
            torch.optim.Muon([net.head.weight]).step()
        except RuntimeError as error:
            errors.append("in-place operations that require placement changes" in str(error))
    assert errors == ([] if TorchVersion(torch.__version__) < "2.12" else [True, True])


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
@pytest.mark.slow
def test_muon(ranks: Ranks) -> None:
    """Muon runs on DTensors, whose operators gather, with FSDP2's bits; on one matrix bfloat16 rounds differently."""
    ranks(2).run(_muon)


# --- clipping and scaling -----------------------------------------------------------------------------------


def _clip(rank: int, world_size: int, norm_types: tuple[float, ...]) -> None:
    plain = Net()
    pair = twins(copy.deepcopy(plain), world_mesh())
    if float("inf") in norm_types:
        for net in [*pair, plain]:
            net.head.requires_grad_(False)  # empty on some ranks, see below
    for norm_type in norm_types:
        for foreach in (False, True):
            norms = []
            for net in [*pair, plain]:
                net.zero_grad()
                _backward(net, _input(0))
                norm = nn.utils.clip_grad_norm_(net.parameters(), 0.01, norm_type=norm_type, foreach=foreach)
                norms.append(_full(norm))
            when = f"p = {norm_type}, {foreach=}"
            assert torch.equal(norms[0], norms[1]), when
            assert_same(*map(grads_of, pair), when)
            torch.testing.assert_close(norms[0], norms[2], msg=when)
            clipped = [_full(p.grad).norm(norm_type) for p in pair[0].parameters() if p.grad is not None]
            torch.testing.assert_close(torch.stack(clipped).norm(norm_type), torch.tensor(0.01), rtol=1e-3, atol=0)
    for net in pair:
        nn.utils.clip_grad_value_(net.parameters(), 1e-4)
    assert_same(*map(grads_of, pair), "clipped values")


@pytest.mark.slow
def test_clip_grad_norm(ranks: Ranks) -> None:
    """The norm of the whole model for p = 1 and 2, with empty shards, and for inf."""
    ranks(3).run(_clip, (1.0, 2.0))
    ranks(3).run(_clip, (float("inf"),))


def test_inf_norm_of_an_empty_shard() -> None:
    """torch cannot compute the inf norm of an empty shard, neither for FSDP2.

    When this test fails, remove the special case above.
    """
    with pytest.raises(RuntimeError, match="cannot compute the inf norm on an empty tensor"):
        torch.linalg.vector_norm(torch.empty(0), float("inf"))


def _scaler(rank: int, world_size: int, bad_rank: int | None, where: str) -> list[float]:
    pair = twins(Net(), world_mesh())
    optims = [ADAMW(model.parameters(), lr=0.02) for model in pair]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in pair]
    scales = []
    for step in range(4):
        before = [copy.deepcopy(_states_of(*both)) | {k: v.clone() for k, v in params_of(both[0]).items()}
                  for both in zip(pair, optims)]  # fmt: skip
        bad = step == 2 and rank == bad_rank
        for model, optim, scaler in zip(pair, optims, scalers):
            x = _input(rank, step)
            if bad and where == "input":
                x[0, 0] = float("inf")
            scaler.scale(model(x).square().mean()).backward()
            if bad and where == "gradient":  # of this rank's shard only
                model.blocks[0].weight.grad.to_local().view(-1)[:1] = float("inf")
            if step == 3:
                scaler.unscale_(optim)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
        after = [_states_of(*both) | params_of(both[0]) for both in zip(pair, optims)]
        assert_same(*after, f"step {step}")
        if step == 2 and bad_rank is not None:
            assert_same(after[0], before[0], "nothing changes in a step with an inf")
        else:
            assert not torch.equal(after[0]["head.bias"].full_tensor(), before[0]["head.bias"].full_tensor())
        assert scalers[0].get_scale() == scalers[1].get_scale()
        scales.append(scalers[0].get_scale())
    return scales


@pytest.mark.parametrize("where", ["input", "gradient"])
@pytest.mark.slow
def test_grad_scaler(ranks: Ranks, where: str) -> None:
    """An inf on one rank skips the step on all ranks, and all lower their scale."""
    pool = ranks(2)
    assert pool.run(_scaler, 1, where) == [[1024.0, 2048.0, 1024.0, 1024.0]] * 2


# --- hooks --------------------------------------------------------------------------------------------------


def _in_backward(rank: int, world_size: int) -> None:
    """Give each parameter an optimizer that steps when its gradient is ready."""
    plain = Net()
    pair = twins(copy.deepcopy(plain), world_mesh())
    usual, _ = twins(copy.deepcopy(plain), world_mesh())
    usual_optim = ADAMW(usual.parameters(), lr=0.02)
    calls: list[dict[str, int]] = []
    for model in pair:
        count: dict[str, int] = {}
        for name, param in model.named_parameters():
            optim = ADAMW([param], lr=0.02)

            def step_now(param: Tensor, name: str = name, optim: Any = optim, count: dict[str, int] = count) -> None:
                assert isinstance(param.grad, DTensor)
                count[name] = count.get(name, 0) + 1
                optim.step()
                optim.zero_grad()

            param.register_post_accumulate_grad_hook(step_now)
        calls.append(count)
    for step in range(3):
        for model in (*pair, usual):
            _backward(model, _input(rank, step))
        usual_optim.step()
        usual_optim.zero_grad()
        assert_same(*map(params_of, pair), f"step {step}")
        assert_same(params_of(pair[0]), params_of(usual), f"step {step}, against an optimizer after backward")
        assert all(param.grad is None for model in pair for param in model.parameters())
    expected = {name: 3 for name, _ in plain.named_parameters()}
    assert calls == [expected, expected]


@pytest.mark.slow
def test_optimizer_in_backward(ranks: Ranks) -> None:
    """Hooks run once per parameter, with its reduced gradient, and may clear it."""
    ranks(3).run(_in_backward)


# --- averages -----------------------------------------------------------------------------------------------


def _averages(rank: int, world_size: int) -> None:
    pair = twins(Net(), world_mesh())
    optims = [ADAMW(model.parameters(), lr=0.02) for model in pair]
    copies = [[param.detach().clone() for param in model.parameters()] for model in pair]
    for step in range(3):
        for model, optim, ema in zip(pair, optims, copies):
            _backward(model, _input(rank, step))
            optim.step()
            optim.zero_grad()
            torch._foreach_lerp_(ema, [param.detach() for param in model.parameters()], 0.25)
    names = list(params_of(pair[0]))
    assert_same(*(dict(zip(names, ema)) for ema in copies), "averages")
    assert all(a.placements == p.placements for a, p in zip(copies[0], pair[0].parameters()))
    # Evaluate with the average, then return to training.
    results = []
    for model, ema in zip(pair, copies):
        own = [param.detach().clone() for param in model.parameters()]
        with torch.no_grad():
            for param, average in zip(model.parameters(), ema):
                param.copy_(average)
            results.append(model.eval()(_input(rank)))
            if isinstance(model, FSDPModule):
                model.reshard()  # FSDP2 keeps the root's parameters gathered after forward
            for param, value in zip(model.parameters(), own):
                param.copy_(value)
        model.train()
    assert torch.equal(*results)
    assert_same(*map(params_of, pair), "back to training")


@pytest.mark.slow
def test_averages_of_parameters(ranks: Ranks) -> None:
    """An exponential average of the shards, without gathers and with no more memory than the shards."""
    ranks(3).run(_averages)


def _averaged_model(rank: int, world_size: int) -> None:
    model, twin = twins(Net(), world_mesh())
    optim = ADAMW(model.parameters(), lr=0.02)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    expected: list[Tensor] = []
    for step in range(3):
        _backward(model, _input(rank, step))
        optim.step()
        optim.zero_grad()
        average.update_parameters(model)
        params = [param.detach().clone() for param in model.parameters()]
        expected = expected or params  # the first update copies
        torch._foreach_lerp_(expected, params, 0.25)
    names = list(params_of(model))
    assert_same(params_of(average.module), dict(zip(names, expected)), "averages")
    assert all(param.placements == (Shard(0),) for param in average.parameters())
    whole = Net()
    whole.load_state_dict({name: _full(value) for name, value in average.module.state_dict().items()})
    with torch.no_grad():
        assert torch.equal(average.eval()(_input(rank)), whole.eval()(_input(rank)))
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        AveragedModel(twin)


@pytest.mark.slow
def test_averaged_model(ranks: Ranks) -> None:
    """torch.optim.swa_utils.AveragedModel deep-copies the model, which FSDP2 rejects."""
    ranks(2).run(_averaged_model)
