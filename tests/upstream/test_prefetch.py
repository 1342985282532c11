"""Counterparts of test_fully_shard_comm.py: order of collectives and prefetching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule

from tests.distributed.twins import (
    CountLaunches,
    assert_same,
    grads_of,
    local,
    params_of,
    sharded_alike,
)
from tests.ranks import Ranks
from tests.upstream.lockstep import Layer, launches, needs_newer_fsdp2, own_rows, squares

Shard = Callable[..., Any]


class _Net(nn.Module):
    """Layers of different widths, which identify the collectives, between parameters of the root."""

    def __init__(self, depth: int = 3, checkpointed: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(Layer(12 + 4 * index, checkpointed) for index in range(depth))
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


HEAD = {8 * 4: "root"}  # backward gathers only this part of the root: it does not read the stem


def _by_layer(shard: Shard, model: Any, **options: Any) -> None:
    for layer in model.layers:
        shard(layer, **options)
    shard(model, **options)


def _order(model: nn.Module, calls: int = 1) -> tuple[list[str], list[str]]:
    """Return the collectives that forward and backward of the second step launch."""
    squares(model(own_rows(0))).backward()
    model.zero_grad()
    with launches(model, HEAD) as forward:
        loss = torch.stack([squares(model(own_rows(call))) for call in range(calls)]).sum()
    with launches(model, HEAD) as backward:
        loss.backward()
    return forward, backward


FORWARD = ["gather root", "gather layers.0", "gather layers.1", "gather layers.2"]
REDUCTIONS = ["reduce layers.2", "reduce layers.1", "reduce layers.0", "reduce root"]
# Each layer is gathered while the previous one computes, so its gather is launched before that one's reduction.
BACKWARD = ["gather layers.2", "gather layers.1", "reduce layers.2", "gather layers.0", *REDUCTIONS[1:]]
BACKWARDS = {True: ["gather root", *BACKWARD], 2: ["gather root", *BACKWARD], None: BACKWARD, False: REDUCTIONS}


def _orders(rank: int, world_size: int, reshard: bool | int | None, checkpointed: list[str]) -> None:
    for how in checkpointed:
        pair = sharded_alike(
            lambda shard, model: _by_layer(shard, model, reshard_after_forward=reshard), _Net(checkpointed=how)
        )
        ours, theirs = map(_order, pair)
        assert ours == theirs == (FORWARD, BACKWARDS[reshard])
        assert_same(*map(grads_of, pair), "gradients")
    for model in pair:  # two forwards; tests/distributed/test_counts.py counts their collectives
        _order(model, calls=2)
    for name, grad in grads_of(pair[0]).items():
        torch.testing.assert_close(local(grad), local(pair[1].get_parameter(name).grad))


@pytest.mark.parametrize(
    ("reshard", "world_size", "checkpointed"),
    [(True, 2, ["call", ""]), (None, 2, ["composable", ""]), (False, 2, ["call", ""]), (2, 4, [""])],
)
@pytest.mark.slow
def test_layers_are_gathered_one_ahead(
    ranks: Ranks,
    reshard: bool | int | None,
    world_size: int,
    checkpointed: list[str],
) -> None:
    """`TestFullyShardPrefetch.test_fully_shard_backward_prefetch`: also with checkpoints, and with two forwards."""
    ranks(world_size).run(_orders, reshard, checkpointed)


class _Forked(nn.Module):
    """Two outputs, each of which needs another layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, size, bias=False) for size in (8, 4, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layers[0](x).tanh()
        return self.layers[1](x), self.layers[2](x)


def _one_way_after_the_other(rank: int, world_size: int) -> None:
    pair = sharded_alike(_by_layer, _Forked())
    found: list[list[list[str]]] = []
    for model in pair:
        orders: list[list[str]] = []
        for _ in range(2):
            model.zero_grad()
            first, second = model(own_rows(0))
            for loss, last in ((squares(second), False), (squares(first), True)):
                model.set_is_last_backward(last)
                with launches(model) as order:
                    loss.backward(retain_graph=not last)
                orders.append(order)
        found.append(orders[2:])
    assert_same(*map(grads_of, pair), "gradients")
    ours, theirs = found
    # FSDP2 also gathers the other layer and the first, whose weight backward does not read.
    assert ours == [
        ["gather layers.2", "reduce layers.2", "reduce layers.0"],
        ["gather layers.1", "reduce layers.1", "reduce layers.0"],
    ]
    assert all(set(actual) < set(expected) for actual, expected in zip(ours[:1], theirs[:1]))


@pytest.mark.slow
def test_a_backward_for_each_of_two_outputs(ranks: Ranks) -> None:
    """`TestFullyShardPrefetch.test_fully_shard_backward_prefetch`: each backward uses one of two layers."""
    ranks(2).run(_one_way_after_the_other)


def _reshard_all(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _resharded_by_hand(rank: int, world_size: int) -> None:
    pair = sharded_alike(lambda shard, model: _by_layer(shard, model, reshard_after_forward=False), _Net())
    found = []
    for model in pair:
        for _ in range(2):
            model.zero_grad()
            loss = squares(model(own_rows(0)))
            _reshard_all(model)
            with launches(model, HEAD) as backward:
                loss.backward()
        found.append(backward)
    assert_same(*map(grads_of, pair), "gradients")
    ours, theirs = found
    assert theirs == BACKWARDS[True]
    # One launch gathers all that forward had kept and backward reads, which excludes the stem.
    read = sum(param.numel() for param in pair[0].parameters()) - pair[0].stem.weight.numel()
    assert ours == [f"gather {read}", *REDUCTIONS]


def test_manual_reshard_after_forward(ranks: Ranks) -> None:
    """`TestFullyShardCommunication.test_manual_reshard_with_reshard_after_forward_false`."""
    ranks(2).run(_resharded_by_hand)


def _prefetched(rank: int, world_size: int) -> None:
    pair = sharded_alike(_by_layer, _Net(depth=4))
    for number in (1, 2):
        for model in pair:
            layers = model.layers
            for index, layer in enumerate(layers):
                layer.set_modules_to_forward_prefetch([*layers[index + 1 : index + 1 + number]])
                layer.set_modules_to_backward_prefetch([*layers[max(index - number, 0) : index]][::-1])
        ours, theirs = map(_order, pair)
        assert_same(*map(grads_of, pair), "gradients")
        assert ours == theirs
        ahead = [launch for launch in ours[1][: ours[1].index("reduce layers.3")] if "gather" in launch]
        assert ahead == ["gather layers.3", "gather layers.2", "gather layers.1"][: 1 + number]
    # Too late: the last layer's backward has already run.
    for model in pair:
        model.layers[0].set_modules_to_backward_prefetch([model.layers[3]])
        squares(model(own_rows(1))).backward()
    assert_same(*map(grads_of, pair), "gradients")


@pytest.mark.slow
def test_modules_to_prefetch(ranks: Ranks) -> None:
    """`TestFullyShardPrefetch.test_set_modules_to_forward_prefetch`,
    `TestFullyShardPrefetch.test_set_modules_to_backward_prefetch` and
    `TestFullyShardPrefetch.test_backward_misprefetch`."""
    ranks(2).run(_prefetched)


class _Groups(nn.Module):
    """Layers gathered in pairs, and some that are never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(Layer(12 + 4 * index) for index in range(5))
        self.unused = nn.ModuleList(nn.Linear(6 + 2 * index, 2, bias=False) for index in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _pairs(shard: Shard, model: Any) -> None:
    shard(model.layers[0])
    shard([model.layers[1], model.layers[2]])
    shard([model.layers[3], model.unused[0], model.layers[4]])
    shard([model.unused[1], model.embed])
    shard([model.norm, model.head], reshard_after_forward=False)
    shard(model)


def _grouped(rank: int, world_size: int) -> None:
    pair = sharded_alike(_pairs, _Groups())
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in pair]
    for step in range(2):
        found = []
        for model, optim in zip(pair, optims):
            with CountLaunches() as forward:
                loss = squares(model(own_rows(step)))
            with CountLaunches() as backward:
                loss.backward()
            found.append([{kind: count.of(kind) for kind in ("gather", "scatter")} for count in (forward, backward)])
            optim.step()
        assert_same(*map(grads_of, pair), f"gradients of step {step}")
        assert_same(*map(params_of, pair), f"parameters after step {step}")
        for phase in range(2):
            actual, expected = (counts[phase] for counts in found)
            assert (actual["gather"], actual["scatter"]) == ((5, 0), (3, 5))[phase]
            assert actual["gather"] <= expected["gather"]
            assert actual["scatter"] == expected["scatter"]


@needs_newer_fsdp2
@pytest.mark.slow
def test_modules_in_groups(ranks: Ranks) -> None:
    """`TestFullyShardPrefetch.test_fully_shard_multi_module_backward_prefetch` and
    `TestFullyShardPrefetch.test_fully_shard_multi_module_unused_module`."""
    ranks(2).run(_grouped)


class _Wrapped(nn.Module):
    """Checkpointed layers, each with an inner unit, in a nested checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(
            checkpoint_wrapper(nn.Sequential(nn.Linear(8, 8, bias=False), checkpoint_wrapper(Layer(12 + 4 * index))))
            for index in range(3)
        )
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _units_in_checkpoints(shard: Shard, model: Any) -> None:
    shard(model.embed)
    for layer in model.layers:
        shard(layer[1].up, reshard_after_forward=True)
        shard(layer, reshard_after_forward=True)
    shard(model.head)
    shard(model)


def _prefetched_in_checkpoints(rank: int, world_size: int) -> None:
    pair = sharded_alike(_units_in_checkpoints, _Wrapped())
    found = []
    for model in pair:
        for _ in range(2):
            model.zero_grad()
            loss = squares(model(own_rows(0)))
            with CountLaunches() as backward:
                loss.backward()
        layers = model.layers
        model.head.set_modules_to_backward_prefetch([layers[2]])
        layers[2].set_modules_to_backward_prefetch([layers[1], layers[1][1].up])
        layers[1].set_modules_to_backward_prefetch([layers[0], layers[0][1].up])
        layers[0].set_modules_to_backward_prefetch([model.embed])
        for _ in range(2):
            loss = squares(model(own_rows(1)))
            with CountLaunches() as chosen:
                loss.backward()
        found.append([{kind: count.of(kind) for kind in ("gather", "scatter")} for count in (backward, chosen)])
    assert_same(*map(grads_of, pair), "gradients")
    # Backward does not read the first unit's weight.
    assert found == [[{"gather": 7, "scatter": 8}] * 2, [{"gather": 8, "scatter": 8}] * 2]


@pytest.mark.slow
def test_modules_to_prefetch_inside_of_checkpoints(ranks: Ranks) -> None:
    """`TestFullyShardPrefetch.test_set_modules_to_backward_prefetch_inside_ac`."""
    ranks(2).run(_prefetched_in_checkpoints)
