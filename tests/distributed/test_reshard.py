"""`reshard()` between a forward and its backward: full parameters are freed and gathered again, as in FSDP2."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import graphshard
from tests.distributed.twins import CountLaunches, assert_same, grads_of, twins, world_mesh
from tests.ranks import Ranks


class Block(nn.Module):
    """Saves its weight as it is and transposed, and a part of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 6))
        self.both = nn.Parameter(torch.rand(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.both.unbind(0)
        return (x @ self.weight + (x @ self.weight.t()).tanh()) * scale + shift


class Model(nn.Module):
    """Two blocks, and an embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.rand(6))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).tanh() * self.scale
        return self.head(x)


def _tokens(seed: int) -> Tensor:
    return torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(seed))


def _reshard_all(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _keeps(model: nn.Module) -> None:
    model.set_reshard_after_forward(False)


def _keeps_for_microbatches(model: nn.Module) -> None:
    model.set_reshard_after_backward(False)


def _unshards(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def _gathers_again(model: nn.Module) -> None:
    pass


_WAYS = [_keeps, _keeps_for_microbatches, _unshards, _gathers_again]
_POLICIES = {"fp32": MixedPrecisionPolicy(), "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


def _freed_and_gathered_again(rank: int, world_size: int, policy: str) -> None:
    for way in _WAYS:
        torch.manual_seed(0)
        pair = twins(Model(), world_mesh(), mp_policy=_POLICIES[policy])
        for step in range(3):
            for model in pair:
                way(model)
                one, other = (model(_tokens(step * world_size + rank + n)).float().square().sum() for n in (0, 9))
                _reshard_all(model)
                if step == 2:
                    one.backward(retain_graph=True)
                    model.layers[0].reshard()
                    model.reshard()
                    one.backward()
                    other.backward()
                else:
                    (one + other).backward()
                _reshard_all(model)  # FSDP2 leaves unsharded parameters, which have no gradient
            assert_same(*map(grads_of, pair), f"{way.__name__}, gradients of step {step}")


@pytest.mark.slow
def test_backward_gathers_freed_parameters(ranks: Ranks) -> None:
    """Gradients equal FSDP2's."""
    for policy in _POLICIES:
        ranks(2).run(_freed_and_gathered_again, policy)


def _launches(rank: int, world_size: int) -> None:
    for resharded, gathers in ((None, 0), ("layers.0", 1), ("", 1), ("everything", 1)):
        for model in twins(Model(), world_mesh(), reshard_after_forward=False):
            loss = model(_tokens(rank)).square().sum()
            if resharded == "everything":
                _reshard_all(model)
            elif resharded is not None:
                model.get_submodule(resharded).reshard()
            with CountLaunches() as counted:
                loss.backward()
            assert (
                counted.of("gather") <= gathers
                if hasattr(model, "_graphshard_unit")
                else counted.of("gather") >= gathers
            )


@pytest.mark.slow
def test_backward_gathers_nothing_else(ranks: Ranks) -> None:
    """One launch for everything that was freed; FSDP2 launches one per unit."""
    ranks(2).run(_launches)


class Wide(nn.Module):
    """Three matrices of 40 MB, which glibc returns to the system at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3200, 3200, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


_MATRIX = 3200 * 3200 * 4


def _memory(enough: Callable[[int], bool]) -> int:
    """Return the process's memory after delayed frees."""
    for _ in range(50):
        found = psutil.Process().memory_info().rss
        if enough(found):
            break
        time.sleep(0.1)
    return found


def _frees(rank: int, world_size: int) -> None:
    ours, _ = twins(Wide(), world_mesh(), reshard_after_forward=False)
    x = torch.ones(1, 3200, requires_grad=True)
    ours(x).backward()
    loss = ours(x)
    held = psutil.Process().memory_info().rss
    ours.layers[0].reshard()
    assert held - _memory(lambda now: held - now > 0.9 * _MATRIX) > 0.9 * _MATRIX
    ours.layers[1].reshard()
    ours.layers[2].reshard()
    assert held - _memory(lambda now: held - now > 2.9 * _MATRIX) > 2.9 * _MATRIX
    loss.backward()
    ours.zero_grad()


def test_reshard_frees_memory_before_the_backward(ranks: Ranks) -> None:
    ranks(2).run(_frees)


def _by_columns(rank: int, world_size: int) -> None:
    """Shard along the last dim; size 6 is even."""

    def last(param: nn.Parameter) -> Shard:
        return Shard(param.ndim - 1)

    pair = twins(Model(), world_mesh(), reshard_after_forward=False, shard_placement_fn=last)
    for model in pair:
        loss = model(_tokens(rank)).square().sum()
        _reshard_all(model)
        loss.backward()
    assert_same(*map(grads_of, pair), "gradients")


class Odd(nn.Module):
    """Uneven shards along either dim, also of a parameter with transposed memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.b = nn.Parameter(torch.rand(5, 7).t())

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x).tanh() @ self.b.relu()).square().sum()


def _odd(rank: int, world_size: int) -> None:
    """FSDP2 supports none of these, so the reference is a call without `reshard()`."""

    def last(param: nn.Parameter) -> Shard:
        return Shard(param.ndim - 1)

    for place in (None, last):
        torch.manual_seed(0)
        model = graphshard.compile(
            Odd(), world_mesh(), backend="eager", reshard_after_forward=False, shard_placement_fn=place
        )
        grads = []
        for reshards in (False, True):
            loss = model(torch.rand(4, 5, generator=torch.Generator().manual_seed(rank)))
            if reshards:
                model.reshard()
            loss.backward()
            grads.append(grads_of(model))
            model.zero_grad()
        assert_same(*grads, f"gradients of shards by {place}")


@pytest.mark.slow
def test_any_layout_is_gathered_again(ranks: Ranks) -> None:
    ranks(2).run(_by_columns)
    ranks(2).run(_odd)


def _twice(rank: int, world_size: int) -> None:
    ours, _ = twins(Model(), world_mesh(), reshard_after_forward=False)
    loss = ours(_tokens(rank)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_second_backward_raises_torchs_error(ranks: Ranks) -> None:
    """Also after a call that kept full parameters."""
    ranks(2).run(_twice)
