"""Counterparts of test_fully_shard_training.py: whole training steps in common styles."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed.nets import Block, largest_dim
from tests.distributed.twins import OURS, assert_same, grads_of, sharded_alike
from tests.ranks import Ranks
from tests.upstream.language import Language, language_loss
from tests.upstream.lockstep import needs_newer_fsdp2, own_rows, squares, train_alike

Shard = Callable[..., Any]

# --- registered parameters ----------------------------------------------------------------------------------


class _TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.scale = nn.Linear(8, 6), nn.Linear(6, 7), nn.Parameter(torch.rand(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()) * self.scale


def _registered(rank: int, world_size: int, reshard: bool, units: bool) -> None:
    def parallelize(shard: Shard, model: Any) -> None:
        if units:
            shard(model.first, reshard_after_forward=reshard)
            shard(model.second, reshard_after_forward=reshard)
        shard(model, reshard_after_forward=reshard)

    def registered(model: nn.Module) -> dict[str, tuple[bool, Tensor]]:
        params = model.named_parameters()
        return {
            n: (True, p.full_tensor()) if isinstance(p, DTensor) else (False, p.detach().clone()) for n, p in params
        }

    plain = dict(_TwoLayers().named_parameters())
    pair = sharded_alike(parallelize, _TwoLayers())
    for with_backward in (False, True):
        seen = []
        for model in pair:
            loss = squares(model(own_rows(0)))
            seen.append(registered(model))
            if with_backward:
                loss.backward()
                assert all(sharded for sharded, _ in registered(model).values())
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            assert all(sharded for sharded, _ in registered(model).values())
            assert all(torch.equal(full, plain[name]) for name, (_, full) in registered(model).items())
        for name, (sharded, full) in seen[1].items():
            assert seen[0][name][0] == sharded == (reshard is not False), name
            assert torch.equal(seen[0][name][1], full)


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.quick_cases("False-False")
def test_which_parameters_are_registered_after_a_forward(ranks: Ranks, reshard: bool, units: bool) -> None:
    """`TestFullyShardRegisteredParams.test_param_registration_after_forward`."""
    ranks(2).run(_registered, reshard, units)


# --- one unit, and none -------------------------------------------------------------------------------------


class _NoParameters(nn.Module):
    def forward(self, x: Tensor, ys: tuple[Tensor, ...]) -> Tensor:
        return x + ys[0] * ys[1]


def _without_parameters(rank: int, world_size: int) -> None:
    pair = sharded_alike(lambda shard, model: shard(model), _NoParameters())
    inputs = own_rows(0), (own_rows(1), own_rows(2))
    outputs = [model(*inputs) for model in pair]
    assert torch.equal(*outputs)
    assert torch.equal(outputs[0], inputs[0] + inputs[1][0] * inputs[1][1])


def test_a_root_without_parameters(ranks: Ranks) -> None:
    """`TestFullyShardForwardInputs.test_root_move_forward_input_to_device`; here on the inputs' device."""
    ranks(2).run(_without_parameters)


SHAPES = [(16, 15, 8), (7, 15, 3), (16, 17, 8)]


def _one_unit(rank: int, world_size: int) -> None:
    for first, second, third in SHAPES:
        model = nn.Sequential(nn.Linear(first, second), nn.ReLU(), nn.Linear(second, third))
        pair = sharded_alike(lambda shard, model: shard(model), model)
        for each in pair:
            each._set_unshard_async_op(True)  # FSDP2 then gathers on another stream, without waiting
        train_alike(pair, lambda model, step, size=first: squares(model(own_rows(step, 4, size))))
    options = {"shard_placement_fn": largest_dim}
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8))
    train_alike(
        sharded_alike(lambda shard, model: shard(model, **options), model),
        lambda model, step: squares(model(own_rows(step, 4, 32))),
    )


def test_one_unit_of_any_shape(ranks: Ranks) -> None:
    """`TestFullyShard1DTrainingCore.test_train_parity_single_group_shard_dim0`,
    `TestFullyShard1DTrainingCore.test_train_parity_single_group_shard_largest_dim` and
    `TestFullyShard1DTrainingCore.test_train_parity_multi_group_unshard_async_op`."""
    ranks(4).run(_one_unit)


# --- groups, ties, checkpoints ------------------------------------------------------------------------------


def _grouped(shard: Shard, model: Any, **options: Any) -> None:
    shard(model.layers[0], **options)
    shard([model.layers[1], model.layers[2]], **options)
    shard(model.embed, **options)
    model.embed.set_unshard_in_backward(False)  # its backward does not read the weight
    shard([model.norm, model.head], **options)
    shard(model, **options)


def _tied_ends(shard: Shard, model: Any, **options: Any) -> None:
    shard([model.embed, model.norm, model.head], **options)
    for layer in model.layers:
        shard(layer, **options)
    shard(model, **options)


CHECKPOINTED = {
    "composable, kept": ("composable", False, {"reshard_after_forward": False}),
    "wrapper": ("wrapper", False, {}),
    "composable, tied": ("composable", True, {}),
    "wrapper, tied and kept": ("wrapper", True, {"reshard_after_forward": False}),
    "tied": ("", True, {"reshard_after_forward": True}),
}


def _in_groups(rank: int, world_size: int, case: str) -> None:
    how, tied, options = CHECKPOINTED[case]
    parallelize = functools.partial(_tied_ends if tied else _grouped, **options)
    pair = sharded_alike(parallelize, Language(tied=tied, checkpointed=how))
    before = pair[0].embed.weight.full_tensor().clone()
    train_alike(pair, language_loss)
    assert (pair[0].embed.weight.full_tensor() != before).any(1).all() or not tied


@pytest.mark.parametrize("case", CHECKPOINTED)
@pytest.mark.slow
def test_groups_of_checkpointed_layers(ranks: Ranks, case: str) -> None:
    """`TestFullyShard1DTrainingCompose.test_train_parity_with_activation_checkpointing`,
    `TestFullyShardSharedParams.test_train_parity_with_shared_params` and
    `TestFullyShardSharedParams.test_train_shared_params_uneven_shard`: all rows of tied weights are updated.
    """
    ranks(2).run(_in_groups, case)


class _Nested(nn.Module):
    """Layers of two units each, checkpointed as a whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(Block(8, 12), Block(8, 16)) for _ in range(2))
        for layer in self.layers:
            composable_checkpoint(layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _nested(shard: Shard, model: Any, *, reshard: bool) -> None:
    for layer in model.layers:
        for module in (*layer, layer):
            shard(module, reshard_after_forward=reshard)
    shard(model, reshard_after_forward=reshard)


def _two_forwards(rank: int, world_size: int) -> None:
    for reshard in (True, False):
        pair = sharded_alike(functools.partial(_nested, reshard=reshard), _Nested())
        losses = []
        for model in pair:
            loss = (model(own_rows(0)).sum() - model(own_rows(1)).sum()).square()
            loss.backward()
            losses.append({"loss": loss.detach()})
        assert_same(*losses, f"{reshard=}")
        for name, grad in grads_of(pair[0]).items():  # FSDP2 accumulates before it reduces
            torch.testing.assert_close(grad.to_local(), pair[1].get_parameter(name).grad.to_local())


def test_two_forwards_through_units_in_checkpointed_units(ranks: Ranks) -> None:
    """`TestFullyShard1DTrainingCompose.test_double_forward_with_nested_fsdp_and_checkpoint`."""
    ranks(2).run(_two_forwards)


def _one_after_the_other(rank: int, world_size: int) -> None:
    """Shard each block right after it is built; memory of freed blocks must not be mistaken for shared parameters."""

    def grow(shard: Shard) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential()
        for _ in range(6):
            block = Block(8, 12)
            model.append(block)
            shard(block)
            del block
            gc.collect()
        return shard(model)

    train_alike((grow(OURS), grow(fully_shard)), steps=2)


@pytest.mark.slow
def test_blocks_are_sharded_as_they_are_made(ranks: Ranks) -> None:
    """`TestFullyShardSharedParams.test_layer_by_layer_shard_no_false_positive`."""
    ranks(2).run(_one_after_the_other)


class _CastInBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).float())


def _cast_in_groups(rank: int, world_size: int) -> None:
    def parallelize(shard: Shard, model: Any) -> None:
        shard([model.first, model.second], mp_policy=policy)
        shard(model, mp_policy=policy)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    pair = sharded_alike(parallelize, _CastInBetween())
    assert all(model(own_rows(0)).dtype == torch.bfloat16 for model in pair)
    train_alike(pair, steps=2)


@needs_newer_fsdp2
def test_every_module_of_a_group_casts_its_inputs(ranks: Ranks) -> None:
    """`TestFullyShard1DTrainingCompose.test_grouped_module_cast_forward_inputs`."""
    ranks(2).run(_cast_in_groups)
