"""Changing numbers in forward are inputs: one program for all values, bitwise equal to FSDP2."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import graphshard
from tests.distributed.nets import rows
from tests.distributed.twins import assert_same, fsdp2, grads_of, world_mesh
from tests.ranks import FakeWorld, Ranks


class _Net(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.body = body
        self.step, self.scale, self.decay = 0, 1.0, 0.5
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.body(self, self.layers[0](x))).square().mean()


def _warm_up(net: Any, x: Tensor) -> Tensor:
    net.step += 1
    return x.sin() * min(1.0, net.step / 3)


def _moving(net: Any, x: Tensor) -> Tensor:
    net.step += 1
    net.mean.lerp_(x.detach().mean(0), 1 / net.step)
    return x - net.mean * (1 - net.decay**net.step)


def _everywhere(net: Any, x: Tensor) -> Tensor:
    net.step += 1
    net.scale *= 1.25
    y = (x + net.step) / net.scale - net.step * x.cos()
    return torch.where(y > net.scale, y, y.mul(net.scale)).add_(net.step)


def _in_a_region(net: Any, x: Tensor) -> Tensor:
    net.step += 1
    return checkpoint(lambda x: (x * net.step).tanh() * net.step, x, use_reentrant=False)


def _read_only(net: Any, x: Tensor) -> Tensor:
    return x * net.scale + net.scale / 3


# Number of programs: one for the first value and one for all others; a comparison has two outcomes.
BODIES: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "warm-up": (_warm_up, 2),
    "a moving mean": (_moving, 2),
    "everywhere": (_everywhere, 2),
    "in a region": (_in_a_region, 2),
    "changed by the user": (_read_only, 2),
}


def _train(rank: int, world_size: int, body: Any, backend: str) -> list[str]:
    torch.manual_seed(0)
    model = _Net(body)
    twin = fsdp2(copy.deepcopy(model), world_mesh())
    pair = graphshard.compile(model, world_mesh(), backend=backend), twin
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in pair]
    for step in range(6):
        found = []
        for model, optim in zip(pair, optims):
            if body is _read_only:
                model.scale = 1.0 + step / 7
            loss = model(rows(10 * step + rank))
            loss.backward()
            grads = grads_of(model)
            optim.step()
            optim.zero_grad()
            state = {"step": torch.tensor(model.step), "scale": torch.tensor(model.scale), "mean": model.mean.clone()}
            found.append({"loss": loss.detach(), **state, **{name: grad.to_local() for name, grad in grads.items()}})
        if backend == "eager":
            assert_same(*found, f"step {step}")
        else:
            torch.testing.assert_close(*found)
    return [program.reason for program in graphshard.programs(pair[0])]


@pytest.mark.parametrize("case", BODIES)
@pytest.mark.quick_cases("warm-up")
def test_training_matches_fsdp2_with_few_programs(ranks: Ranks, case: str) -> None:
    body, programs = BODIES[case]
    for reasons in ranks(2).run(_train, body, "eager"):
        assert len(reasons) == programs, reasons


def _compiled(rank: int, world_size: int, body: Any) -> list[str]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Inductor cannot compile")
        return _train(rank, world_size, body, "inductor")


@pytest.mark.slow
def test_training_in_inductor(ranks: Ranks) -> None:
    for reasons in ranks(2).run(_compiled, _everywhere):
        assert reasons == ["first call", "_Net.step was 0 and is 1"]


@pytest.mark.slow
def test_names_a_number_that_cannot_be_an_input(fake_world: FakeWorld, caplog: Any) -> None:
    fake_world(1)
    model = _Net(lambda net, x: nn.functional.dropout(x, net.scale))
    ours = graphshard.compile(model, init_device_mesh("cpu", (1,)), backend="eager", max_captures=5)
    with caplog.at_level(logging.WARNING, "graphshard"):
        _anneal(ours)
    texts = [record.getMessage() for record in caplog.records]
    (limit,) = (text for text in texts if "max_captures=5" in text)
    assert "The last capture: _Net.scale was 0.3 and is 0.25. Keep a number that changes in a buffer" in limit
    assert len(graphshard.programs(ours)) == 5


def _anneal(model: Any) -> None:
    for step in range(6):
        model.scale = (50 - 5 * step) / 100
        model(rows(0))


def test_a_number_with_two_values_is_captured_for_both(fake_world: FakeWorld) -> None:
    fake_world(1)
    ours = graphshard.compile(_Net(_read_only), init_device_mesh("cpu", (1,)), backend="eager")
    for step in range(6):
        ours.scale = 0.5 if step % 2 else 1.0
        ours(rows(0))
    assert len(graphshard.programs(ours)) == 2
