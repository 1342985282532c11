"""Counterparts of test_fully_shard_frozen.py: parameters that are frozen, always or for some steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint

from tests.distributed.twins import assert_same, grads_of, params_of, sharded_alike, world_mesh
from tests.ranks import Ranks
from tests.upstream.lockstep import launches, own_rows, squares, stack, train_alike

Shard = Callable[..., Any]


def _each(shard: Shard, model: Any, *, root: bool = True, **options: Any) -> None:
    for module in model:
        if any(True for _ in module.parameters()):
            shard(module, **options)
    if root:
        shard(model, **options)


def _freeze_weights(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_("bias" in name)


MIXED: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "kept": ({"reshard_after_forward": False}, False, False),
    "kept, frozen later": ({"reshard_after_forward": False}, False, True),
    "checkpointed": ({"reshard_after_forward": True}, True, False),
    "checkpointed, frozen later": ({"reshard_after_forward": True}, True, True),
}


def _biases(rank: int, world_size: int, case: str) -> None:
    options, checkpointed, later = MIXED[case]
    model = stack(hidden=16)
    for block in model if checkpointed else ():
        composable_checkpoint(block)
    if not later:
        _freeze_weights(model)
    pair = sharded_alike(functools.partial(_each, **options), model)
    if later:
        for each in pair:
            _freeze_weights(each)
    train_alike(pair)
    sizes = sum(param.numel() for name, param in model[0].named_parameters() if "bias" in name)
    loss = squares(pair[0](own_rows(0)))
    with launches(pair[0][0]) as launched:
        loss.backward()
    reductions = [launch for launch in launched if "reduce" in launch]
    assert reductions == [f"reduce {sizes}"] * len(model)
    assert all((param.grad is not None) == ("bias" in name) for name, param in params_of(pair[0]).items())


@pytest.mark.parametrize("case", MIXED)
@pytest.mark.quick_cases("kept, frozen later")
def test_only_trained_biases_are_reduced(ranks: Ranks, case: str) -> None:
    """`TestFullyShardFrozen.test_train_mixed_requires_grad_per_group`: each unit reduces only its biases."""
    ranks(2).run(_biases, case)


def _in_turn(rank: int, world_size: int) -> None:
    """Linears without a root: every second is frozen, then a step runs without gradients, then all are trained."""
    for reshard in (True, False):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU())[index % 2] for index in range(8)))
        options = {"root": False, "mesh": world_mesh(), "reshard_after_forward": reshard}
        pair = sharded_alike(functools.partial(_each, **options), model)
        optims = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in pair]
        for step in range(4):
            losses = []
            for each, optim in zip(pair, optims):
                for index, linear in enumerate(each[::2]):
                    linear.requires_grad_(step == 3 or index % 2 == 1)
                with torch.set_grad_enabled(step != 1):
                    loss = squares(each(own_rows(step)))
                if step != 1:
                    loss.backward()
                    optim.step()
                losses.append({"loss": loss.detach()})
            assert_same(*losses, f"step {step}, {reshard=}")
            assert_same(*map(grads_of, pair), f"gradients of step {step}, {reshard=}")
            for optim in optims:
                optim.zero_grad(set_to_none=step % 2 == 0)
        assert_same(*map(params_of, pair), f"{reshard=}")


@pytest.mark.slow
def test_every_second_layer_frozen_for_some_steps(ranks: Ranks) -> None:
    """`TestFullyShardFrozen.test_train_mixed_requires_grad_across_groups`."""
    ranks(2).run(_in_turn)


class _Repeated(nn.Module):
    """A model that calls a frozen and a trained layer several times, also without gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.frozen, self.trained = (nn.Linear(5, 5) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.frozen(F.relu(self.trained(x)))
            with torch.no_grad():
                x += F.relu(self.trained(x))
        return x


def _again(rank: int, world_size: int, reshard: bool | int) -> None:
    def parallelize(shard: Shard, model: Any) -> None:
        for module in (model.first, model.frozen, model.trained, model):
            shard(module, reshard_after_forward=reshard)

    train_alike(sharded_alike(parallelize, _Repeated()), lambda model, step: squares(model(own_rows(step, 8, 5))))


@pytest.mark.parametrize(("reshard", "world_size"), [(True, 2), (False, 2), (2, 4)])
@pytest.mark.slow
def test_layers_that_are_called_again_without_gradients(ranks: Ranks, reshard: bool | int, world_size: int) -> None:
    """`TestFullyShardFrozen.test_multi_forward_mixed_requires_grad`."""
    ranks(world_size).run(_again, reshard)
