"""Optimizers and losses that `compile_step` rejects."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn

from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.module.compile_step import check_loss, check_optimizer
from graphshard.runtime.gradient_accumulation import Accumulation
from graphshard.runtime.step_overlap import is_elementwise

SEPARATELY = r"Call loss.backward\(\), optimizer.step\(\) and optimizer.zero_grad\(\) one after the other instead"


class Own(torch.optim.AdamW):
    """An optimizer with a custom step."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Branching(torch.optim.Optimizer):
    """An optimizer whose step branches on values."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad.norm() > 1:
                    param.data -= 0.1 * param.grad


class Initialized(torch.optim.SGD):
    """An optimizer with different state."""

    def _init_group(self, *args: Any) -> Any:
        return super()._init_group(*args)


class Named(torch.optim.AdamW):
    """AdamW under another name."""


def _refused(optimizer: torch.optim.Optimizer, model: nn.Module) -> str:
    with pytest.raises(UnsupportedError, match=SEPARATELY) as caught:
        check_optimizer(optimizer, model)
    return str(caught.value)


def test_lbfgs() -> None:
    model = nn.Linear(2, 2)
    line = inspect.unwrap(torch.optim.LBFGS.step).__code__.co_firstlineno
    text = (
        rf"the step of LBFGS, .*lbfgs\.py:{line}, computes the loss several times, by a closure. Call optimizer.step\("
    )
    with pytest.raises(UnsupportedError, match=text):
        check_optimizer(torch.optim.LBFGS(model.parameters()), model)


@pytest.mark.parametrize(("cls", "method"), [(Own, "step"), (Branching, "step"), (Initialized, "_init_group")])
def test_rejects_a_custom_optimizer(cls: type[torch.optim.Optimizer], method: str) -> None:
    """The error names the line."""
    model = nn.Linear(2, 2)
    given: tuple[Any, ...] = (model.parameters(), {"lr": 0.1} if cls is Branching else 0.1)
    text = _refused(cls(*given), model)
    line = inspect.unwrap(getattr(cls, method)).__code__.co_firstlineno
    assert re.search(rf"{cls.__name__} has a {method} of its own, .*test_step_checks\.py:{line}, which may look", text)


@pytest.mark.parametrize("name", ["Adafactor", "Rprop"])
def test_rejects_some_torch_optimizers(name: str) -> None:
    """They also fail on sharded parameters."""
    model = nn.Linear(2, 2, bias=False)
    text = _refused(getattr(torch.optim, name)(model.parameters(), lr=0.1), model)
    assert re.search(rf"the step of {name}, .*{name.lower()}\.py:\d+, takes no DTensors in torch 2.13", text)


class OwnMuon(torch.optim.Muon):
    """A Muon with a custom step."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_muon() -> None:
    """torch's is accepted, and runs after backward; a custom step is rejected."""
    model = nn.Linear(2, 2, bias=False)
    check_optimizer(torch.optim.Muon(model.parameters()), model)
    assert not is_elementwise(torch.optim.Muon(model.parameters()))
    assert "OwnMuon has a step of its own" in _refused(OwnMuon(model.parameters()), model)


def test_accepts_a_subclass_without_changes() -> None:
    model = nn.Linear(2, 2)
    optimizer = Named(model.parameters())
    check_optimizer(optimizer, model)
    assert is_elementwise(optimizer)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # wraps `step` to count calls
    check_optimizer(optimizer, model)


def test_a_step_that_was_replaced() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.step = lambda: None  # type: ignore[method-assign]
    assert re.search(r"the step of SGD was replaced by .*test_step_checks\.py:\d+", _refused(optimizer, model))


def test_hooks_and_options() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    hook = optimizer.register_step_pre_hook(lambda *_: None)
    assert "a hook is registered on the step of SGD" in _refused(optimizer, model)
    hook.remove()
    optimizer.param_groups[0]["differentiable"] = True
    assert "group 0 of SGD has differentiable=True" in _refused(optimizer, model)


def test_parameters_of_another_model() -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters())
    with pytest.raises(ArgumentError, match=r"parameter 0 of group 0, of shape \[2, 3\], is not the model's"):
        check_optimizer(optimizer, nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (3.0, "returned 3.0, and backward begins with a tensor of one element"),
        (torch.ones(2, requires_grad=True), r"returned a tensor of shape \[2\]"),
        (torch.ones(()), "returned a tensor that needs no gradients"),
    ],
)
def test_losses(loss: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=f"loss: the model {text}"):
        check_loss(loss, "the model")


def test_rejects_a_loss_without_a_call() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert Accumulation().trained_by_one_call(weight.sum()) == frozenset()
