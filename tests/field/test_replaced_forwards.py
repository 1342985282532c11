"""Forwards that are replaced before and after sharding, of leaves, units and the model itself.

FSDP2 shards parameters in hooks around `__call__`, so it does not notice what `forward` is: it is right in all cases
here. graphshard captures forwards, and traces through functions that replace them.
"""

from __future__ import annotations

import copy
import functools
import logging
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import graphshard
from tests.distributed.twins import world_mesh
from tests.field.trials import assert_equal, full, gradients, on_graphshard, on_plain_torch
from tests.ranks import Ranks

Patch = Callable[[nn.Module], None]


class Block(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


class Net(nn.Module):
    """Two units, and a head in the root's unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PLACES: tuple[Callable[[nn.Module], nn.Module], ...] = (
    lambda model: model.layers[1].up,
    lambda model: model.layers[0],
    lambda model: model.head,
    lambda model: model,
)


# --- ways to replace a forward -----------------------------------------------------------------------------------


def _closure(module: nn.Module) -> None:
    before = module.forward
    module.forward = lambda *args: before(*args) * 2


def _wraps(module: nn.Module) -> None:
    """As loggers and profilers do."""
    before = module.forward

    @functools.wraps(before)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return before(*args, **kwargs) * 2

    module.forward = forward


def _hooked(module: nn.Module) -> None:
    """As Accelerate does for dispatched and offloaded models: the old forward stays as `_old_forward`."""

    class Doubled(ModelHook):
        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return output * 2

    add_hook_to_module(module, Doubled())


def _unhooked(module: nn.Module) -> None:
    _hooked(module)
    remove_hook_from_module(module)


def _autocast(module: nn.Module) -> None:
    """As `Accelerator.prepare_model` does with mixed precision."""
    before: Any = module.forward
    forward = torch.autocast("cpu", torch.bfloat16)(before.__func__)
    module.forward = types.MethodType(forward, module)


def _compiled(module: nn.Module) -> None:
    module.forward = torch.compile(module.forward, backend="eager")


class Scaled(torch.autograd.Function):
    """A kernel with a backward written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight) * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight * 3, grad.flatten(0, -2).t() @ x.flatten(0, -2) * 3


def _method(module: nn.Module) -> None:
    """As Liger's patches of instances do: `types.MethodType` of a function that reads parameters."""

    def linear(self: nn.Module, x: Tensor) -> Tensor:
        return Scaled.apply(x, self.weight)

    def block(self: nn.Module, x: Tensor) -> Tensor:
        return x + F.silu(F.linear(self.norm(x), self.up.weight, self.up.bias))

    def net(self: nn.Module, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return Scaled.apply(x, self.head.weight)

    forward = linear if isinstance(module, nn.Linear) else block if isinstance(module, Block) else net
    module.forward = types.MethodType(forward, module)


PATCHES: dict[str, Patch] = {
    "closure": _closure,
    "wraps": _wraps,
    "accelerate": _hooked,
    "unhooked": _unhooked,
    "autocast": _autocast,
    "compiled": _compiled,
    "liger": _method,
}


# --- tests -------------------------------------------------------------------------------------------------------


def _step(model: nn.Module) -> list[Tensor | None]:
    """Train two steps with the same batch."""
    found: list[Tensor | None] = []
    for _ in range(2):
        model.zero_grad()
        loss = model(torch.linspace(-1, 1, 24).view(2, 3, 4)).square().mean()
        loss.backward()
        found += [loss.detach(), *(None if grad is None else full(grad) for grad in gradients(model))]
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param.sub_(param.grad, alpha=0.1)
    return found


def _train(patch: Patch, places: tuple[Callable[[nn.Module], nn.Module], ...]) -> Callable[[nn.Module], list[Any]]:
    def train(model: nn.Module) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for replaced, place in enumerate(places, start=1):
            patch(place(model))
            found += _step(model)
            if isinstance(model, FSDPModule):
                assert len(graphshard.programs(model)) <= replaced
        return found

    return train


def _after(rank: int, world_size: int, patch: str, first: bool) -> None:
    def train(model: nn.Module) -> list[Tensor | None]:
        found = [] if first else _step(model)
        replaced = _train(PATCHES[patch], PLACES)
        if isinstance(model, FSDPModule) and not first:
            for place in PLACES:
                PATCHES[patch](place(model))
                found += _step(model)
            assert len(graphshard.programs(model)) <= 1 + len(PLACES)
            return found
        return found + replaced(model)

    assert_equal(on_graphshard(Net, train), on_plain_torch(Net, train))


def _before(rank: int, world_size: int, patch: str) -> None:
    def build() -> nn.Module:
        model = Net()
        for place in PLACES:
            PATCHES[patch](place(model))
        return model

    assert_equal(on_graphshard(build, _step), on_plain_torch(build, _step))


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.quick_cases("closure", "accelerate", "liger")
def test_replaced_after_sharding(ranks: Ranks, patch: str) -> None:
    """Before the first call, one place after the other: one program for each, and the right numbers."""
    ranks(2).run(_after, patch, True)


@pytest.mark.slow
@pytest.mark.parametrize("patch", PATCHES)
def test_replaced_after_the_first_call(ranks: Ranks, patch: str) -> None:
    ranks(2).run(_after, patch, False)


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.quick_cases("liger", "accelerate")
def test_replaced_before_sharding(ranks: Ranks, patch: str) -> None:
    """As trainers do: the kernels first, then the sharding. graphshard refused a model whose own forward was one."""
    ranks(2).run(_before, patch)


def _around(rank: int, world_size: int) -> list[str]:
    """Time the model's forward in a function, which cannot be traced: what it wraps stays one program."""
    messages: list[str] = []
    log = logging.getLogger("graphshard.module")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)

    def train(model: nn.Module) -> list[Tensor | None]:
        before, seconds = model.forward, []

        def timed(x: Tensor) -> Tensor:
            start = time.perf_counter()
            result = before(x)
            seconds.append(time.perf_counter() - start)
            return result * 2

        model.forward = timed
        found = _step(model)
        assert len(seconds) == 2
        found.append(full(model.layers[0](torch.ones(2, 4))))
        model.forward = before
        return found + _step(model)

    def ours(model: nn.Module) -> list[Tensor | None]:
        found = train(model)
        names = [program.title for program in graphshard.programs(model)]
        # Under `timed`, where the root is gathered before; layers.0; without it.
        assert len(names) == 3, names
        return found

    try:
        assert_equal(on_graphshard(Net, ours), on_plain_torch(Net, train))
    finally:
        log.removeHandler(handler)
    return messages


def test_wrapper_with_a_clock(ranks: Ranks) -> None:
    (message,) = ranks(2).run(_around)[0]
    assert message.startswith(
        "Net.forward was replaced by _around.<locals>.train.<locals>.timed, which is not captured"
    )
    assert "It has a graph break" in message


def _copied(rank: int, world_size: int) -> None:
    """Copies, plain models and calls of parts with replaced forwards."""
    x = torch.ones(2, 3, 4)
    plain = Net()
    model = graphshard.compile(copy.deepcopy(plain), world_mesh(), backend="eager")
    for each in (plain, model):
        _hooked(each.layers[0])
        _method(each.layers[1].up)
        _wraps(each)
    assert torch.equal(model.layers[1](x), plain.layers[1](x))
    assert torch.equal(model.layers[0](x), plain.layers[0](x))
    assert torch.equal(copy.deepcopy(model)(x), plain(x))
    assert torch.equal(model(x), plain(x))
    with graphshard.uncompiled(model):
        assert torch.equal(model(x), plain(x))
    assert torch.equal(model(x), plain(x))


def test_copies_and_parts(ranks: Ranks) -> None:
    ranks(2).run(_copied)
