"""Unused random numbers are drawn, too, so that later random numbers equal FSDP2's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.ir.graph import is_idle_draw
from tests.distributed.nets import rows
from tests.distributed.twins import assert_same, grads_of, twins, world_mesh
from tests.helpers import captured, through
from tests.ranks import FakeWorld, Ranks

Body = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Two units with dropout after each; `body(self, x)` draws unused numbers between them."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.layers[0](x), 0.5)
        return F.dropout(self.layers[1](self.body(self, x)), 0.5).square().mean()


def _unused(net: Net, x: Tensor) -> Tensor:
    F.dropout(net.layers[2](x), 0.3) + 1
    return x


def _last_of_its_unit(net: Net, x: Tensor) -> Tensor:
    F.dropout(x, 0.3)
    return x


def _a_tuple(net: Net, x: Tensor) -> Tensor:
    F.rrelu(net.layers[2](x), training=True)
    return x


def _without_gradient(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        F.dropout(net.layers[2](x), 0.3)
    return x


def _recomputed(net: Net, x: Tensor) -> Tensor:
    def region(x: Tensor) -> Tensor:
        F.dropout(net.layers[2](x), 0.3)
        return F.dropout(x.tanh(), 0.3)

    found = checkpoint(region, x, use_reentrant=False)
    assert isinstance(found, Tensor)
    return found


def _recomputed_for_nothing(net: Net, x: Tensor) -> Tensor:
    """Checkpoint noise that backward does not need."""
    found = checkpoint(lambda x: F.dropout(x.tanh(), 0.3) + torch.randn_like(x), x, use_reentrant=False)
    assert isinstance(found, Tensor)
    return found


class _NoisyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        torch.rand_like(grad)
        return grad * torch.rand_like(grad)


def _in_backward(net: Net, x: Tensor) -> Tensor:
    found = _NoisyBackward.apply(x)
    assert isinstance(found, Tensor)
    return found


BODIES = (_unused, _last_of_its_unit, _a_tuple, _without_gradient, _recomputed, _recomputed_for_nothing, _in_backward)


def _steps(rank: int, world_size: int, body: Body) -> None:
    torch.manual_seed(0)
    pair = twins(Net(body), world_mesh())
    for step in range(2):
        found = []
        for model in pair:
            model.zero_grad()
            torch.manual_seed(10 * step + rank)
            loss = model(rows(step + rank, 5, 8))
            loss.backward()
            found.append({"loss": loss.detach(), "next": torch.rand(1), **grads_of(model)})
        assert_same(*found, f"step {step}")


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.quick_cases("_a_tuple")
def test_unused_random_numbers_are_drawn(ranks: Ranks, body: Body) -> None:
    ranks(2).run(_steps, body)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.quick_cases("eager")
def test_without_gradients_and_with_inductor(fake_world: FakeWorld, backend: str) -> None:
    fake_world(1)
    model = Net(_unused)
    twin = copy.deepcopy(model)
    compiled = graphshard.compile(model, init_device_mesh("cpu", (1,)), backend=backend)
    x = rows(0, 5, 8)
    states = []
    for each in (compiled, twin):
        torch.manual_seed(0)
        with torch.no_grad():
            each(x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_unused_draws_run_in_forward_only() -> None:
    program = through(captured(Net(_unused), (rows(0, 5, 8),)), "reorder")
    idle = {name: sum(map(is_idle_draw, phase.module.graph.nodes)) for name, phase in program.phases.items()}
    assert idle == {"forward": 1, "backward": 0}
