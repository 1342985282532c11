"""Counterparts of test_fully_shard_autograd.py: outputs and modules that the loss does not use, gradient hooks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import helpers
from tests.distributed.twins import Batch, assert_same, example_llama, fsdp2, params_of, twins, world_mesh
from tests.ranks import Ranks
from tests.upstream.lockstep import Pair, own_rows, train_alike

RESHARD = [(True, 2), (False, 2), (2, 4)]


class _Twofold(nn.Module):
    """Two parallel layers, of which the second is optional."""

    def __init__(self, *, second: bool) -> None:
        super().__init__()
        self.lin1 = nn.Linear(8, 8)
        self.lin2 = nn.Linear(8, 8)
        self.second = second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        first = self.lin1(x).relu()
        return (first, self.lin2(x).relu()) if self.second else first


def _unused_output(rank: int, world_size: int, reshard: bool | int) -> None:
    pair = twins(_Twofold(second=True), world_mesh(), units=["lin1"], reshard_after_forward=reshard)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        first, second = model(own_rows(step))
        return (first * second).sum() if step < 2 else first.sum()

    train_alike(pair, loss_of, steps=5)


@pytest.mark.parametrize(("reshard", "world_size"), RESHARD)
@pytest.mark.quick_cases("True-2")
def test_an_output_that_the_loss_does_not_use(ranks: Ranks, reshard: bool | int, world_size: int) -> None:
    """`TestFullyShardAutograd.test_unused_forward_output`: from the third step, gradients None, zeros or values."""
    ranks(world_size).run(_unused_output, reshard)


def _unused_module(rank: int, world_size: int, reshard: bool | int) -> None:
    pair = twins(_Twofold(second=False), world_mesh(), units=["lin1", "lin2"], reshard_after_forward=reshard)
    train_alike(pair, lambda model, step: model(own_rows(step)).sum())
    assert all(param.grad is None for model in pair for param in model.lin2.parameters())


@pytest.mark.parametrize(("reshard", "world_size"), RESHARD)
@pytest.mark.quick_cases("False-2")
def test_a_module_that_forward_does_not_use(ranks: Ranks, reshard: bool | int, world_size: int) -> None:
    """`TestFullyShardAutograd.test_unused_forward_module`: Adam does not update a unit without gradients."""
    ranks(world_size).run(_unused_module, reshard)


def _tied() -> tuple[nn.Module, Batch]:
    return helpers.Tied(), lambda: {"tokens": torch.randint(0, 6, (4,))}


def _scheduled(params: list[Tensor]) -> tuple[torch.optim.Optimizer, Any]:
    optim = torch.optim.AdamW(params, lr=1e-2, foreach=False)
    return optim, torch.optim.lr_scheduler.StepLR(optim, step_size=2)


def _step_in_hooks(model: nn.Module) -> None:
    """Give each parameter its own optimizer and scheduler, which step when its gradient is ready."""
    for param in model.parameters():
        optim, schedule = _scheduled([param])

        def step(_: Tensor, optim: Any = optim, schedule: Any = schedule) -> None:
            optim.step()
            optim.zero_grad()
            schedule.step()

        param.register_post_accumulate_grad_hook(step)


def _in_hooks(rank: int, world_size: int) -> None:
    for model, batch in (example_llama(layers=2), _tied()):
        after = fsdp2(copy.deepcopy(model), world_mesh())
        optim, schedule = _scheduled(list(after.parameters()))
        hooked: Pair = twins(model, world_mesh())
        for each in hooked:
            _step_in_hooks(each)
        for step in range(5):
            losses = []
            for each in (*hooked, after):
                torch.manual_seed(10 * step + rank)
                loss = each(**batch())
                loss.backward()
                losses.append({"loss": loss.detach()})
            optim.step()
            optim.zero_grad()
            schedule.step()
            for index in (1, 2):
                assert_same(losses[0], losses[index], f"step {step}")
                assert_same(params_of(hooked[0]), params_of((*hooked, after)[index]), f"step {step}")


@pytest.mark.slow
def test_optimizers_and_schedules_in_hooks(ranks: Ranks) -> None:
    """`TestFullyShardPostAccGradHookMultiProcess.test_post_acc_grad_hook_optim_parity`, also with tied weights."""
    ranks(2).run(_in_hooks)
