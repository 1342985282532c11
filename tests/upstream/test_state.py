"""Counterparts of test_fully_shard_state.py: classes of sharded modules, and modules that cannot be sharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

import graphshard
from graphshard.errors import ArgumentError
from tests.distributed.nets import Block
from tests.distributed.twins import assert_same, grads_of, local, twins, world_mesh
from tests.ranks import Ranks
from tests.upstream.lockstep import own_rows, squares, stack


def _applied_twice(rank: int, world_size: int) -> None:
    """Apply each of the two APIs after each of them."""
    ours, theirs = twins(stack(), world_mesh())
    with pytest.raises(ArgumentError, match=r"it is already compiled\. Compile the root module, once\."):
        graphshard.compile(ours, world_mesh())
    graphshard.compile(theirs, world_mesh())  # which takes it over
    with pytest.raises(AssertionError, match="can only be applied to a module once"):
        fully_shard(theirs, mesh=world_mesh())


def test_a_module_is_sharded_once(ranks: Ranks) -> None:
    """`TestFullyShardState.test_fully_shard_reapply`."""
    ranks(2).run(_applied_twice)


def _classes(rank: int, world_size: int) -> None:
    ours, theirs = twins(stack(), world_mesh())
    assert isinstance(ours, nn.Sequential)
    assert (type(ours).__name__, type(theirs).__name__) == ("FSDPSequential", "FSDPSequential")
    assert [type(sub).__name__ for sub in ours.modules()] == [type(sub).__name__ for sub in theirs.modules()]
    assert type(copy.copy(ours)) is type(ours)
    x = own_rows(0)
    results: list[dict[str, Any]] = []
    for model in (ours, theirs):
        part = model[:2]
        assert type(part) is nn.Sequential
        assert list(part) == [model[0], model[1]]
        squares(model(x)).backward()
        model.zero_grad()
        output = part(x)
        squares(output).backward()
        results.append({"output": output.detach()})
    assert_same(*results, "output of a slice")
    assert_same(grads_of(ours), grads_of(theirs), "gradients of a slice")
    assert ours[2].up.weight.grad is None


def test_class_names_match_fsdp2_and_slices_keep_the_old_class(ranks: Ranks) -> None:
    """`TestFullyShardState.test_fully_shard_cls`: a slice runs its modules on the same shards."""
    ranks(2).run(_classes)


def _containers(rank: int, world_size: int) -> None:
    for container in (nn.ModuleList([Block(4, 6)]), nn.ModuleDict({"first": Block(4, 6), "second": Block(4, 6)})):
        name = type(container).__name__
        with pytest.raises(ArgumentError, match=f"^model: {name} has no forward, so there is nothing to compile"):
            graphshard.compile(container, world_mesh())
        with pytest.raises(ValueError, match="containers that do not implement forward"):
            fully_shard(container, mesh=world_mesh())
        assert all(type(local(param)) is nn.Parameter for param in container.parameters())


def test_rejects_containers_without_a_forward(ranks: Ranks) -> None:
    """`TestFullyShardState.test_fully_shard_unsupported_module_cls`."""
    ranks(2).run(_containers)
