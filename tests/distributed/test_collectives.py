"""Collectives counted while real ranks train: at most FSDP2's number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import graphshard
from graphshard.torch_compat.dtensor import all_gather_into
from tests.distributed.nets import Block
from tests.distributed.twins import CountLaunches, assert_same, grads_of, twins, world_mesh
from tests.ranks import Ranks

BLOCKS = 3

# (all-gathers, reductions)
Counts = tuple[int, int]


class _Net(nn.Module):
    """n blocks, and a root with parameters at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block(6, 10, bias=True) for _ in range(BLOCKS))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def _counts(launches: Mapping[str, int]) -> Counts:
    # On two gloo ranks all-gathers and reduce-scatters run as different all-to-all operators.
    gathers = sum(number for name, number in launches.items() if "gather" in name or "alltoall_base" in name)
    reductions = sum(number for name, number in launches.items() if "reduce" in name or "all_to_all" in name)
    assert gathers + reductions == sum(launches.values()), f"unknown collective among {dict(launches)}"
    return gathers, reductions


def _count(call: Callable[[], Any]) -> tuple[Counts, Any]:
    with CountLaunches() as mode:
        result = call()
    return _counts(mode.launches), result


def _count_step(model: nn.Module, x: Tensor) -> tuple[Counts, Counts]:
    """Count the collectives in forward and backward of the second step."""
    model(x).backward()
    model.zero_grad()
    forward, loss = _count(lambda: model(x))
    backward, _ = _count(loss.backward)
    return forward, backward


def _both_counts(rank: int, world_size: int, frozen: list[str], options: dict[str, Any]) -> list[tuple[Counts, Counts]]:
    model = _Net()
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part in name for part in frozen))
    pair = twins(model, world_mesh(), **options)
    x = torch.randn(4, 5)
    counts = [_count_step(model, x) for model in pair]
    assert_same(grads_of(pair[0]), grads_of(pair[1]), "gradients")
    return counts


@pytest.mark.parametrize(
    ("reshard", "backward_gathers"),
    [(True, BLOCKS + 1), (None, BLOCKS), (False, 0)],
    ids=lambda value: str(value),
)
@pytest.mark.quick_cases("False-0")
def test_counts_of_collectives_match_fsdp2(ranks: Ranks, reshard: bool | None, backward_gathers: int) -> None:
    """One launch per unit and direction. By default the root stays gathered between forward and backward."""
    expected = (BLOCKS + 1, 0), (backward_gathers, BLOCKS + 1)
    for ours, theirs in ranks(2).run(_both_counts, [], {"reshard_after_forward": reshard}):
        assert ours == theirs == expected


@pytest.mark.parametrize(
    ("frozen", "backward", "backward_of_fsdp2"),
    [
        # Backward ends where no earlier parameter is trained; FSDP2 still prefetches the block below.
        (["stem", "blocks.0"], (BLOCKS - 1, BLOCKS), (BLOCKS, BLOCKS)),
        # A frozen block in the middle passes gradients on, but has none to reduce.
        (["blocks.1"], (BLOCKS, BLOCKS), (BLOCKS, BLOCKS)),
        # Frozen weights and trained biases share a bucket.
        (["weight"], (BLOCKS, BLOCKS + 1), (BLOCKS, BLOCKS + 1)),
    ],
    ids=["lower-part", "one-block", "all-weights"],
)
@pytest.mark.slow
def test_frozen_parameters_are_not_reduced(
    ranks: Ranks, frozen: list[str], backward: Counts, backward_of_fsdp2: Counts
) -> None:
    for ours, theirs in ranks(2).run(_both_counts, frozen, {}):
        assert ours == ((BLOCKS + 1, 0), backward)
        assert theirs == ((BLOCKS + 1, 0), backward_of_fsdp2)


def _with_comm_debug_mode(rank: int, world_size: int) -> list[Counts]:
    counts = []
    for model in twins(_Net(), world_mesh()):
        x = torch.randn(4, 5)
        model(x).backward()
        with CommDebugMode() as mode:
            model(x).backward()
        counts.append(_counts({str(op): number for op, number in mode.get_comm_counts().items()}))
        model(x)  # the mode has no lasting effect
    return counts


@pytest.mark.slow
def test_counts_match_comm_debug_mode(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's `CommDebugMode` sees the same counts."""

    for ours, theirs in ranks(2).run(_with_comm_debug_mode):
        assert ours == theirs == (2 * BLOCKS + 1, BLOCKS + 1)


class _Tower(nn.Module):
    """A model in which every layer is a unit, including the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(7, 6), Block(6, 10, bias=True), Block(6, 10, bias=True)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _tower_counts(rank: int, world_size: int) -> list[tuple[Counts, Counts]]:
    return [_count_step(model, torch.arange(4)) for model in twins(_Tower(), world_mesh())]


@pytest.mark.slow
def test_units_unused_in_backward_are_not_gathered_again(ranks: Ranks) -> None:
    """The gradient of an embedding does not depend on its weight. FSDP2 gathers it nevertheless."""
    for ours, theirs in ranks(2).run(_tower_counts):
        assert ours == ((3, 0), (2, 3))
        assert theirs == ((3, 0), (3, 3))


def _alone(rank: int, world_size: int) -> tuple[tuple[Counts, Counts], tuple[Counts, Counts]]:
    alone = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("other", "shard"))["shard"]
    model = _Net()
    plain = copy.deepcopy(model)
    graphshard.compile(model, alone, backend="eager")
    x = torch.randn(4, 5)
    counts = _count_step(model, x), _count_step(plain, x)
    assert_same(grads_of(model), grads_of(plain), "gradients")
    return counts


@pytest.mark.slow
def test_world_of_one_launches_no_collectives(ranks: Ranks) -> None:
    for ours, plain in ranks(2).run(_alone):
        assert ours == plain == ((0, 0), (0, 0))


def _inference(rank: int, world_size: int) -> list[Counts]:
    counts = []
    # By default FSDP2 would keep the root gathered between calls.
    for model in twins(_Net(), world_mesh(), reshard_after_forward=True):
        model.eval()
        with torch.no_grad():
            model(torch.ones(4, 5))
            counts.append(_count(lambda model=model: model(torch.ones(4, 5)))[0])
    return counts


@pytest.mark.slow
def test_inference_reduces_nothing(ranks: Ranks) -> None:
    for ours, theirs in ranks(2).run(_inference):
        assert ours == theirs == (BLOCKS + 1, 0)


def _gather_of(rank: int, world_size: int) -> int:
    """Return the bytes that a gather allocates at most, in blocks of at least the preallocated result's size."""
    for like in (torch.empty(5, 3), torch.empty(1, dtype=torch.bfloat16), torch.empty(0, 4), torch.empty(4, 3).t()):
        shard = torch.empty_like(like).copy_(torch.arange(like.numel()).reshape(like.shape) + 100 * rank)
        full = _gathered(shard)
        theirs = [torch.empty(like.shape, dtype=like.dtype) for _ in range(world_size)]
        dist.all_gather(theirs, shard.contiguous())
        assert torch.equal(full, torch.cat(theirs))
    shard = torch.ones(1000, 10)
    with torch.profiler.profile(profile_memory=True) as profile:
        full = _gathered(shard)
    found = [event.self_cpu_memory_usage for event in profile.events()]
    assert max(found) >= full.nbytes, "the result, at least, is seen"
    return sum(size for size in found if size >= full.nbytes)


def _gathered(shard: Tensor) -> Tensor:
    full = shard.new_empty(dist.get_world_size() * shard.shape[0], *shard.shape[1:])
    all_gather_into(full, shard, dist.group.WORLD.group_name)
    return torch.ops._c10d_functional.wait_tensor(full)  # type: ignore[no-any-return]


def test_two_gloo_ranks_gather_without_a_buffer(ranks: Ranks) -> None:
    """Gloo's all-gather allocates a buffer of the result's size; the all-to-all used here does not."""
    assert ranks(2).run(_gather_of) == [2 * 1000 * 10 * 4] * 2
