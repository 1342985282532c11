"""Counterparts of test_fully_shard_training.py: microbatches, replicas and methods other than forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, register_fsdp_forward_method, share_comm_ctx

import graphshard
from graphshard.errors import UnsupportedError
from tests.distributed.nets import Block
from tests.distributed.twins import CountLaunches, assert_same, grads_of, params_of, sharded_alike, world_mesh
from tests.ranks import Ranks
from tests.upstream.lockstep import Pair, own_rows, squares, train_alike

Shard = Callable[..., Any]
# Settings on a model and its blocks before a microbatch; the flag marks the last one.
Setting = Callable[[Any, bool], None]
OFFLOADED = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


def _model(*, checkpointed: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *(Block(8, 12, bias=True) for _ in range(3)))
    for block in model[1:] if checkpointed else ():
        composable_checkpoint(block)
    return model


def _sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Pair:
    def parallelize(shard: Shard, model: Any) -> None:
        for block in model[1:]:
            shard(block, mesh=mesh, **options)
        shard(model, mesh=mesh, **options)

    return sharded_alike(parallelize, model)


def _train(pair: Pair, setting: Setting, *, counted: bool = True) -> None:
    """Train two steps of three microbatches; gradients are zeroed after the first, and set to None after the second."""
    optims = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in pair]
    for step in range(2):
        counts = []
        for model in pair:
            with CountLaunches() as count:
                for microbatch in range(3):
                    setting(model, microbatch == 2)
                    squares(model(own_rows(10 * step + microbatch))).backward()
            counts.append({kind: count.of(kind) for kind in ("gather", "scatter", "all_reduce")})
        assert_same(*map(grads_of, pair), f"gradients of step {step}")
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=step == 1)
        assert_same(*map(params_of, pair), f"parameters after step {step}")
        if step and counted:  # the first step compiles
            assert all(actual <= expected for actual, expected in zip(*(count.values() for count in counts))), counts


def _all(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def _all_and_kept(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)


def _root(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last, recurse=False)


def _some(model: Any, last: bool) -> None:
    for block in model[1:3]:
        block.set_requires_gradient_sync(last)


def _over_shards(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last)


def _every_one(model: Any, last: bool) -> None:
    """Reduce after each microbatch."""


MICROBATCHES: dict[str, tuple[Setting, dict[str, Any]]] = {
    "all, kept": (_all_and_kept, {"reshard_after_forward": False}),
    "all, offloaded": (_all, OFFLOADED),
    "root": (_root, {}),
    "some, offloaded": (_some, OFFLOADED),
}


def _accumulated(rank: int, world_size: int, case: str) -> None:
    setting, options = MICROBATCHES[case]
    # Parameters kept over microbatches are gathered one by one.
    _train(_sharded(_model(), world_mesh(), **options), setting, counted=setting is not _all_and_kept)


@pytest.mark.parametrize("case", MICROBATCHES)
@pytest.mark.slow
def test_microbatches(ranks: Ranks, case: str) -> None:
    """`TestFullyShardGradientAccumulation.test_gradient_accumulation`; also counts collectives."""
    ranks(2).run(_accumulated, case)


REPLICATED: dict[str, tuple[Setting, dict[str, Any], bool]] = {
    "all": (_all, {"reshard_after_forward": False}, True),
    "over shards, offloaded": (_over_shards, OFFLOADED, False),
    "every one, offloaded": (_every_one, OFFLOADED, True),
}


def _replicas(rank: int, world_size: int, case: str) -> None:
    setting, options, checkpointed = REPLICATED[case]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _train(_sharded(_model(checkpointed=checkpointed), mesh, **options), setting)


@pytest.mark.parametrize("case", REPLICATED)
@pytest.mark.slow
def test_microbatches_on_replicas(ranks: Ranks, case: str) -> None:
    """`TestFullyShardHSDPTraining.test_train_parity_hsdp` and
    `TestFullyShardGradientAccumulation.test_gradient_accumulation`."""
    ranks(4).run(_replicas, case)


def _one_by_one(rank: int, world_size: int) -> None:
    for gathers_ahead in (False, True):
        for reshards in (False, True):
            pair = _sharded(_model(), world_mesh(), reshard_after_forward=False)
            for model in pair:
                for module in model.modules() if gathers_ahead else ():
                    if isinstance(module, FSDPModule):
                        module.unshard(async_op=True)
                for microbatch in range(3):
                    model.set_requires_gradient_sync(microbatch == 2)
                    model.set_is_last_backward(microbatch == 2)
                    if not reshards:
                        model.set_reshard_after_backward(microbatch == 2)
                    squares(model(own_rows(microbatch))).backward()
                torch.optim.AdamW(model.parameters(), lr=1e-2).step()
            assert_same(*map(params_of, pair), f"{gathers_ahead=}, {reshards=}")


@pytest.mark.slow
def test_one_forward_one_backward(ranks: Ranks) -> None:
    """`TestFullyShardGradientAccumulation.test_1f1b_microbatching`."""
    ranks(2).run(_one_by_one)


# --- methods other than forward -----------------------------------------------------------------------------


class _Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, kernel_size=4, stride=4)

    def features(self, images: Tensor) -> Tensor:
        return self.patches(images).flatten(2).transpose(1, 2).clone()  # not a view: FSDP2 warns about views

    def forward(self, images: Tensor) -> Tensor:
        return self.features(images).sum(1)


class _Projected(nn.Module):
    """A model whose forward calls another method of a unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vision, self.projector = _Vision(), nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.projector(self.vision.features(images))


def _by_module(shard: Shard, model: Any) -> None:
    for module in (model.vision, model.projector, model):
        shard(module)


def _other_methods(rank: int, world_size: int) -> None:
    """A method needs no registration in graphshard if forward calls it, only if it is called from outside."""
    ours, theirs = sharded_alike(_by_module, _Projected())
    register_fsdp_forward_method(theirs.vision, "features")
    train_alike((ours, theirs), lambda model, step: squares(model(own_rows(step, 2, 3, 8, 8))), steps=2)
    graphshard.register_forward_method(ours, "vision.features")
    train_alike((ours, theirs), lambda model, step: squares(model.vision.features(own_rows(step, 2, 3, 8, 8))), steps=2)


def test_methods_other_than_forward(ranks: Ranks) -> None:
    """`TestFullyShardCustomForwardMethod.test_register_fsdp_forward_method`."""
    ranks(2).run(_other_methods)


def _several_roots(rank: int, world_size: int) -> None:
    """Shard each block as a separate model. FSDP2 shares streams between them; graphshard has none to share."""
    pair = sharded_alike(lambda shard, model: [shard(block) for block in model[1:]], _model())
    train_alike(pair, steps=2)
    with pytest.raises(UnsupportedError, match="of FSDP2's state is asked for"):
        share_comm_ctx(list(pair[0][1:]))


@pytest.mark.slow
def test_several_roots_in_a_plain_module(ranks: Ranks) -> None:
    """`TestFullyShardShareCommContext.test_share_comm_context`."""
    ranks(2).run(_several_roots)
