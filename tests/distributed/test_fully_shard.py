"""`graphshard.fully_shard` as a replacement for FSDP2's: models parallelized by the same code train alike."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.errors import ArgumentError, UnsupportedError
from tests.distributed.nets import Net, Tied, largest_dim, rows
from tests.distributed.twins import BF16, OURS, assert_same, grads_of, params_of, sharded_alike, world_mesh
from tests.ranks import Ranks

Shard = Callable[..., Any]
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)


def _blocks_and_root(shard: Shard, model: Any) -> None:
    for block in model.blocks:
        shard(block)
    shard(model)


def _blocks_only(shard: Shard, model: Any) -> None:
    for block in model.blocks:
        shard(block, mesh=world_mesh())


def _root_only(shard: Shard, model: Any) -> None:
    shard(model)


def _nested(shard: Shard, model: Any) -> None:
    shard(model.blocks[0].down)
    shard(model.blocks[0])
    shard(model.blocks[1].up, reshard_after_forward=False)
    shard(model)


def _groups(shard: Shard, model: Any) -> None:
    assert shard([model.stem, model.head])[1] is model.head
    shard([model.blocks[1], model.blocks[0], model.blocks[0].up], mp_policy=HALF)
    shard(model)


def _policies(shard: Shard, model: Any) -> None:
    shard(model.stem, mp_policy=HALF)
    shard(model.blocks[0], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64), reshard_after_forward=False)
    shard(model.blocks[1], shard_placement_fn=largest_dim)
    shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16, output_dtype=torch.float64))


def _ignored(shard: Shard, model: Any) -> None:
    shard(model.blocks[0], ignored_params={model.blocks[0].up.bias})
    shard(model, ignored_params={model.head.bias})


def _ignored_alike(shard: Shard, model: Any) -> None:
    """Pass one set to all calls, with parameters of other modules."""
    ignored = {model.blocks[0].up.bias, model.blocks[1].down.weight, model.head.bias}
    for module in (*model.blocks, model):
        shard(module, ignored_params=ignored)


def _offloaded(shard: Shard, model: Any) -> None:
    for module in (*model.blocks, model):
        shard(module, offload_policy=CPUOffloadPolicy(pin_memory=False))


def _settings_before(shard: Shard, model: Any) -> None:
    """Apply settings to a unit before the root is sharded."""
    first, second = model.blocks
    shard(first)
    shard(second)
    first.set_requires_gradient_sync(False)
    second.set_force_sum_reduction_for_comms(True)
    second.set_gradient_divide_factor(3.0)
    second.set_reshard_after_forward(False)
    shard(model)


def _gathered_again_in_pairs(shard: Shard, model: Any) -> None:
    for block in model.blocks:
        shard(block, reshard_after_forward=2)
    shard(model)


def _in_replicas(shard: Shard, model: Any) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for module in (*model.blocks, model):
        shard(module, mesh=mesh)


def _on_two_meshes(shard: Shard, model: Any) -> None:
    """Shard one block over all ranks, and replicate the rest."""
    whole = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "one"))
    shard(model.blocks[1], mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",)))
    for module in (model.blocks[0], model):
        shard(module, mesh=whole)


PARALLELIZE = [
    *(_blocks_and_root, _blocks_only, _root_only, _nested, _groups, _policies, _ignored, _ignored_alike, _offloaded),
    *(_settings_before, _in_replicas, _on_two_meshes),
]


def _trains(rank: int, world_size: int, parallelize: Callable[[Shard, Any], None]) -> None:
    torch.manual_seed(0)
    ours, theirs = sharded_alike(parallelize, Net())
    for actual, expected in zip(ours.modules(), theirs.modules(), strict=True):
        assert isinstance(actual, FSDPModule) == isinstance(expected, FSDPModule), type(expected).__name__
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, theirs)]
    for step in range(3):
        losses = []
        for model, optimizer in zip((ours, theirs), optimizers):
            optimizer.zero_grad()
            loss = model(rows(rank + 10 * step)).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses), (step, losses)
        assert_same(grads_of(ours), grads_of(theirs), f"gradients of step {step}")
        for optimizer in optimizers:
            optimizer.step()
        if step == 1:
            for model in (ours, theirs):
                for module in model.modules():
                    if isinstance(module, FSDPModule):
                        module.set_requires_gradient_sync(True, recurse=False)
    assert_same(params_of(ours), params_of(theirs), "parameters")


@pytest.mark.parametrize("parallelize", PARALLELIZE, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.quick_cases("on_two_meshes")
def test_models_parallelized_by_the_same_code_train_alike(
    ranks: Ranks, parallelize: Callable[[Shard, Any], None]
) -> None:
    ranks(2).run(_trains, parallelize)


@pytest.mark.slow
def test_gathers_again_among_neighbors(ranks: Ranks) -> None:
    ranks(4).run(_trains, _gathered_again_in_pairs)


def _one_model(rank: int, world_size: int) -> None:
    """The parameters of units keep their identity, and the outermost module has all programs."""
    model = Net()
    for block in model.blocks:
        OURS(block)
    before = list(model.blocks.parameters())
    assert all(isinstance(param, DTensor) for param in before)
    OURS(model)
    assert [id(param) for param in model.blocks.parameters()] == [id(param) for param in before]
    model(rows(rank)).sum().backward()
    (program,) = graphshard.programs(model)
    reshard = {row.unit: row.reshard for row in program.params}
    assert reshard == {"": False, "blocks.0": True, "blocks.1": True}
    model.blocks[0](torch.ones(5, 8))
    assert len(graphshard.programs(model)) == 2
    twin = copy.deepcopy(model)
    assert_same(params_of(twin), params_of(model), "parameters of a copy")
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    model.load_state_dict({name: value + 1 for name, value in full.items()})
    assert torch.equal(model.blocks[0].up.weight.full_tensor(), full["blocks.0.up.weight"] + 1)


def test_separately_sharded_modules_become_units(ranks: Ranks) -> None:
    ranks(2).run(_one_model)


def _kept_between(rank: int, world_size: int) -> None:
    """A block that runs, accumulates and is unsharded before the root is sharded keeps its state."""
    model, plain = Net(), None
    torch.manual_seed(1)
    for param in model.parameters():
        nn.init.normal_(param)
    plain = copy.deepcopy(model)
    block = OURS(model.blocks[0])
    block.set_requires_gradient_sync(False)
    block(torch.ones(2, 8) * (rank + 1)).sum().backward()
    block.unshard()
    assert block.up.weight.grad is None
    OURS(model)
    model.set_requires_gradient_sync(True)
    model(rows(rank)).sum().backward()
    for other in range(world_size):
        (plain.blocks[0](torch.ones(2, 8) * (other + 1)).sum() / world_size).backward()
        (plain(rows(other)).sum() / world_size).backward()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad, msg=name)


def test_gradients_accumulated_before_the_root_is_sharded(ranks: Ranks) -> None:
    ranks(2).run(_kept_between)


def _tied(rank: int, world_size: int) -> None:
    """FSDP2 then trains two parameters; plain torch trains one."""
    torch.manual_seed(0)
    model = Tied()
    plain = copy.deepcopy(model)
    OURS(model.embed)
    for block in model.blocks:
        OURS(block)
    OURS(model)
    assert model.head.weight is model.embed.weight
    assert model.blocks[2].up.weight is model.blocks[0].up.weight
    batches = [torch.randint(7, (3, 4), generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    model(batches[rank]).sum().backward()
    for batch in batches:
        (plain(batch).sum() / world_size).backward()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad, msg=name)


def test_parameters_that_are_tied_across_units_stay_so(ranks: Ranks) -> None:
    ranks(2).run(_tied)


def _on_meta(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = Net()
    _blocks_and_root(OURS, model)
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.constant_(param, 0.01)
    model(rows(rank)).sum().backward()
    assert model.stem.weight.grad is not None


@pytest.mark.slow
def test_a_model_on_the_meta_device(ranks: Ranks) -> None:
    ranks(2).run(_on_meta)


def _twice(model: Any) -> None:
    OURS(model.stem)
    OURS(model.stem)


def _inside(model: Any) -> None:
    OURS(model)
    OURS(model.blocks[0])


def _half_a_group(model: Any) -> None:
    OURS([model.stem, model.blocks[0].up])
    OURS(model.blocks[0])


def _two_meshes(model: Any) -> None:
    OURS(model.stem)
    OURS(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


def _two_devices(model: Any) -> None:
    OURS(model.stem, offload_policy=CPUOffloadPolicy())
    OURS(model)


def _two_numbers(model: Any) -> None:
    OURS(model.blocks[0], activation="full")
    OURS(model, activation=0.5)


def _no_units(model: Any) -> None:
    OURS(model, activation="full")(rows(0))


ERRORS: dict[str, Callable[[Any], Any]] = {
    r"^module: Linear cannot be compiled: it is already compiled\. Compile the root module, once": _twice,
    r"^module: Block is a part of a compiled model": _inside,
    r"^module: up of Block was sharded together with modules that are not in it": _half_a_group,
    r"^mesh has an axis 'shard', and the mesh of expert parameters has another axis of this name": _two_meshes,
    r"^activation: blocks\.0 of Net was sharded with 'full', the whole is to be with 0\.5\. Give it in the outer": (
        _two_numbers
    ),
    r"^activation='full' is about the units of Net, and none were found.*or call graphshard\.fully_shard on": _no_units,
    r"^module is an empty list": lambda model: OURS([]),
    r"^module: ModuleList has no forward, so there is nothing to compile": lambda model: OURS(model.blocks),
    r"^mp_policy: fully_shard takes one policy": lambda model: OURS(model, mp_policy={"": BF16}),
    r"^dp_mesh_dims must be a torch\.distributed\.fsdp\.DataParallelMeshDims .*, got 1\.": lambda model: OURS(
        model, dp_mesh_dims=1
    ),
    r"^fully_shard\(\) got an unexpected keyword argument 'units'": lambda model: OURS(model, units=["blocks.*"]),
    r"Did you mean 'reshard_after_forward'": lambda model: OURS(model, reshard=True),
}


def _wrong(rank: int, world_size: int) -> None:
    for message, call in ERRORS.items():
        with pytest.raises((ArgumentError, UnsupportedError)) as caught:
            call(Net())
        assert re.search(message, str(caught.value)), str(caught.value)
    model = Net()
    first = OURS(model.blocks[0], reshard_after_forward=False)
    with pytest.raises(ArgumentError, match="mesh must be"):
        OURS(model, mesh="cpu")
    first(torch.ones(2, 8)).sum().backward()  # unchanged by the error
    assert first.up.weight.grad is not None
    assert not isinstance(model.stem.weight, DTensor)


def test_wrong_arguments(ranks: Ranks) -> None:
    ranks(2).run(_wrong)


def _different_neighbors(rank: int, world_size: int) -> None:
    model = Net()
    OURS(model.blocks[0], reshard_after_forward=2)
    with pytest.raises(UnsupportedError, match="reshard_after_forward=2 of one unit, and another gathers"):
        OURS(model, reshard_after_forward=True)
    OURS(model.blocks[1], reshard_after_forward=True)
    with pytest.raises(UnsupportedError, match=r"=2 of one unit, and blocks\.1 gathers again among other"):
        OURS(model)


def test_units_that_gather_again_among_different_ranks(ranks: Ranks) -> None:
    ranks(4).run(_different_neighbors)
