"""Memory and overlap, observed while real ranks train."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import graphshard
from graphshard.passes import MakePlan
from graphshard.schedule.fsdp2_order import PlanByUnit
from graphshard.torch_compat.torch_ops import TorchDispatchMode
from tests.distributed.nets import Block
from tests.distributed.twins import GATHERS, AliveBytes, assert_same, filled, fsdp2, grads_of, world_mesh
from tests.ranks import Ranks

BLOCKS = 4
# Unit by unit, without packing, so that weights stay distinguishable.
PASSES = graphshard.Pipeline().replace("plan", MakePlan(PlanByUnit(pack_gathers_below=0)))


class _Stack(nn.Module):
    """A stack of blocks only."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


# --- gathered blocks ----------------------------------------------------------------------------------------

DIM, HIDDEN = 128, 256
WEIGHT_BYTES = DIM * HIDDEN * 4


def _blocks() -> nn.Module:
    return _Stack(lambda: Block(DIM, HIDDEN, bias=True))


def _linears(width: int) -> nn.Module:
    """Return a stack with one weight per block."""
    return _Stack(lambda: nn.Linear(width, width, bias=False))


class _Watch(TorchDispatchMode):
    """Counts the gathered weights of blocks that are alive after each operator, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: dict[int, StorageWeakRef] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._opname in GATHERS:
            storage = args[0].untyped_storage()
            if storage.nbytes() == WEIGHT_BYTES:
                self.gathered[storage._cdata] = StorageWeakRef(storage)
        self.most = max(self.most, self.alive(expected=self.most))
        return result

    def alive(self, expected: int = 0) -> int:
        """Return the number of gathered weights; wait briefly for gloo's threads to release results."""
        patience = time.monotonic() + 0.5
        while True:
            number = sum(not ref.expired() for ref in self.gathered.values())
            if number <= expected or time.monotonic() > patience:
                return number
            time.sleep(0.001)


def _gathered_blocks(
    rank: int, world_size: int, backend: str, reshard: bool | None
) -> tuple[float, float, float, float]:
    """Return the number of gathered blocks: maximum in forward, after it, maximum in backward, after it."""
    model = graphshard.compile(_blocks(), world_mesh(), backend=backend, reshard_after_forward=reshard, passes=PASSES)
    x = torch.randn(4, DIM, requires_grad=True)  # so that backward needs the first weight
    model(x).backward()
    blocks = []
    with _Watch() as watch:
        loss = model(x)
    blocks += [watch.most, watch.alive()]
    watch.most = 0
    with watch:
        loss.backward()
    blocks += [watch.most, watch.alive()]
    return tuple(number / 2 for number in blocks)  # a block has two weights


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.slow
def test_two_blocks_are_gathered_at_a_time(ranks: Ranks, backend: str) -> None:
    """The block that computes and the next one, whose gather overlaps."""
    assert ranks(2).run(_gathered_blocks, backend, None) == [(2, 0, 2, 0)] * 2


@pytest.mark.slow
def test_without_resharding_all_blocks_stay_gathered(ranks: Ranks) -> None:
    assert ranks(2).run(_gathered_blocks, "eager", False) == [(4, 4, 4, 0)] * 2


# --- bytes --------------------------------------------------------------------------------------------------

WIDTH = 256

# In weights: two gathered ones; in backward one, a gradient, and all gradient shards. Gloo's copies are not counted.
ACTIVATIONS = 0.1
EXPECTED = 2 + ACTIVATIONS, 2 + BLOCKS / 2 + ACTIVATIONS


def _peaks(rank: int, world_size: int) -> list[tuple[float, float]]:
    """Return the memory of forward and backward, in weights, for graphshard and FSDP2."""
    weight_bytes = WIDTH * WIDTH * 4
    model = _linears(WIDTH)
    twin = fsdp2(copy.deepcopy(model), world_mesh())
    pair = graphshard.compile(model, world_mesh(), backend="eager", passes=PASSES), twin
    x = torch.randn(1, WIDTH, requires_grad=True)
    peaks = []
    for model, expected in zip(pair, (EXPECTED, (math.inf, math.inf))):
        model(x).backward()
        model.zero_grad()
        before = [x, x.grad, *(param.to_local() for param in model.parameters())]
        modes = [AliveBytes(before, bound * weight_bytes) for bound in expected]
        with modes[0]:
            loss = model(x)
        with modes[1]:
            loss.backward()
        peaks.append(tuple(mode.most / weight_bytes for mode in modes))
    assert_same(*map(grads_of, pair), "gradients")
    return peaks


@pytest.mark.slow
def test_peak_memory(ranks: Ranks) -> None:
    """Below FSDP2, which copies inputs and outputs of collectives."""
    for ours, theirs in ranks(2).run(_peaks):
        for peak, expected, of_fsdp2 in zip(ours, EXPECTED, theirs):
            assert peak < min(expected, of_fsdp2)


# --- time ---------------------------------------------------------------------------------------------------


class _Clock(TorchDispatchMode):
    """Simulated time: a block's matmuls and its collectives take half a second each.

    Collectives run in sequence on one link while other operators continue. The order of launches, waits and matmuls is
    the real one, independent of this machine's speed.
    """

    def __init__(self, block_bytes: int) -> None:
        super().__init__()
        self.block_bytes = block_bytes
        self.now = self.link = 0.0
        self.arrival: dict[int, float] = {}  # by address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._opname == "wait_tensor":
            self.now = max(self.now, self.arrival.pop(args[0].data_ptr(), self.now))
        elif func.namespace in ("c10d", "_c10d_functional"):
            received = filled(args) if func._opname in GATHERS else result
            self.link = max(self.link, self.now) + received.nbytes / self.block_bytes
            self.arrival[received.data_ptr()] = self.link
        elif func._opname in ("mm", "addmm"):
            self.now += 0.5
        return result


def _seconds(rank: int, world_size: int) -> tuple[float, float]:
    model = _blocks()
    block_bytes = sum(param.nbytes for param in model.blocks[0].parameters())
    graphshard.compile(model, world_mesh(), backend="eager", passes=PASSES)
    x = torch.randn(4, DIM, requires_grad=True)
    model(x).backward()
    with _Clock(block_bytes) as forward:
        loss = model(x)
    with _Clock(block_bytes) as backward:
        loss.backward()
    assert not forward.arrival
    assert not backward.arrival
    return forward.now, backward.now


@pytest.mark.slow
def test_compute_overlaps_the_next_gather_and_the_last_reduction(ranks: Ranks) -> None:
    """Only the first gather and the last reduction are exposed. Without overlap a block would take 2 and 4 seconds."""
    for forward, backward in ranks(2).run(_seconds):
        assert forward == pytest.approx(1 + BLOCKS)
        assert 2 * BLOCKS + 1 < backward < 1 + 2 * BLOCKS + 1  # it starts with a part of the last block


class _InTurn(TorchDispatchMode):
    """The second rank launches its second gather after the first rank has launched its second gather and multiplied."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.gathers = 0
        self.store = dist.distributed_c10d._get_default_store()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname in GATHERS:
            self.gathers += 1
            if self.rank == 1 and self.gathers == 2:
                self.store.wait(["multiplied"], timedelta(seconds=20))
        result = func(*args, **(kwargs or {}))
        if func._opname == "mm" and self.rank == 0 and self.gathers == 2:
            self.store.set("multiplied", "")
        return result


def _in_turn(rank: int, world_size: int) -> None:
    model = graphshard.compile(_linears(DIM), world_mesh(), backend="eager")
    x = torch.randn(4, DIM)
    model(x)
    with _InTurn(rank) as mode:
        model(x)
    assert mode.gathers == BLOCKS


def test_a_launch_does_not_wait_for_other_ranks(ranks: Ranks) -> None:
    ranks(2).run(_in_turn)
