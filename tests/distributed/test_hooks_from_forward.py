"""Hooks that forward registers and removes match FSDP2: later calls see the change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphshard
from tests.distributed.nets import rows
from tests.distributed.twins import assert_same, grads_of, twins, world_mesh
from tests.ranks import Ranks


class Collector:
    """Collects values from hooks during a forward."""

    active: list[Tensor] | None = None


COLLECTOR = Collector()


class Net(nn.Module):
    """Two units; `body(self, x)` calls them."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.body = body
        self.hooked = False
        self.handle: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x).square().mean()

    def run(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x).tanh())

    def double(self, module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        return out * 2


def _collects(net: Net, x: Tensor) -> Tensor:
    """Register hooks at the first call that needs them, as transformers does to collect hidden states."""
    if not net.hooked:
        for layer in net.layers:
            layer.register_forward_hook(_collecting("out", 0))
        net.hooked = True
    COLLECTOR.active = []
    try:
        x = net.run(x)
        return x + COLLECTOR.active[0]
    finally:
        COLLECTOR.active = None


def _collecting(key: str, index: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        if COLLECTOR.active is not None and key == "out":
            COLLECTOR.active.append(args[index] + out)

    return hook


def _removes_after_one_call(net: Net, x: Tensor) -> Tensor:
    x = net.run(x)
    if net.handle is not None:
        net.handle.remove()
        net.handle = None
    return x


def _registers_and_removes(net: Net, x: Tensor) -> Tensor:
    handle = net.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    x = net.run(x)
    handle.remove()
    return net.run(x)


def _registers_a_method(net: Net, x: Tensor) -> Tensor:
    if not net.hooked:
        net.hooked = True
        net.layers[0].register_forward_hook(net.double, with_kwargs=True)
        net.layers[1].register_forward_hook(functools.partial(_times, 3))
    return net.run(x)


def _times(factor: int, module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * factor


def _with_handle(net: Net) -> Net:
    """Add two hooks to a layer; forward removes the first."""
    net.handle = net.layers[0].register_forward_hook(net.double, with_kwargs=True)
    net.layers[0].register_forward_hook(lambda module, args, out: out + 1)
    return net


# With the number of programs: of two units, as a change of hooks splits the call, and of the model from the next call
# on; a forward that changes hooks in each call stays split.
CASES = {
    "lazy": (lambda: Net(_collects), 3),
    "once": (lambda: _with_handle(Net(_removes_after_one_call)), 3),
    "both": (lambda: Net(_registers_and_removes), 3),
    "method": (lambda: Net(_registers_a_method), 3),
}


def _steps(rank: int, world_size: int, case: str) -> int:
    make, _ = CASES[case]
    torch.manual_seed(0)
    pair = twins(make(), world_mesh())
    for step in range(3):
        losses = []
        for model in pair:
            model.zero_grad()
            losses.append(model(rows(10 * step + rank)))
            losses[-1].backward()
        assert torch.equal(*losses), step
        assert_same(*map(grads_of, pair), f"gradients of step {step}")
    return len(graphshard.programs(pair[0]))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick_cases("method")
def test_hooks_match_eager_mode(ranks: Ranks, case: str) -> None:
    """If forward changes hooks, the next call is captured again."""
    assert ranks(2).run(_steps, case) == [CASES[case][1]] * 2
