"""Conditions on values that only guard an exception are checked after each call; others cannot be captured."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.capture.guards import expected_truth
from tests.capture.guarded import GUARDS, OTHERS, catches, refuse


class _Asking:
    """Is false, and notes what the code that asks expects."""

    def __init__(self) -> None:
        self.expected: Any = "not asked"

    def __bool__(self) -> bool:
        self.expected = expected_truth(sys._getframe(1))
        return False


@pytest.mark.parametrize("function", GUARDS, ids=lambda f: f.__name__)
def test_guards_are_recognised(function: Callable[[Any], Any]) -> None:
    flag = _Asking()
    function(flag)
    assert flag.expected is False


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_others_are_not(function: Callable[[Any], Any]) -> None:
    flag = _Asking()
    function(flag)
    if function is catches and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 does not say which exceptions are caught")
    assert flag.expected is None


class Guarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        refuse(tokens, weights)
        torch._check_tensor_all(weights > 0)
        return (self.embed(tokens).sum(-1) * weights).sum()


def test_conditions_are_checked_after_each_call(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = graphshard.compile(Guarded(), mesh, backend="eager")
    plain = Guarded()
    plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    good = torch.tensor([0, 3]), torch.tensor([1.0, 2.0])
    loss = model(*good)
    assert torch.equal(loss, plain(*good))
    loss.backward()
    plain(*good).backward()
    assert torch.equal(model.embed.weight.grad.full_tensor(), plain.embed.weight.grad)
    for inputs, line in (
        ((torch.tensor([0, 4]), good[1]), "if tokens.max() >= 4:"),
        ((good[0], torch.tensor([1.0, torch.inf])), "assert weights.isfinite().all()"),
        ((good[0], torch.tensor([1.0, -1.0])), "torch._check_tensor_all(weights > 0)"),
    ):
        with pytest.raises(graphshard.InputError, match=rf"forward raises .* at .*\.py:\d+: {re.escape(line)}"):
            model(*inputs)
    assert torch.equal(model(*good), loss)
    (program,) = graphshard.programs(model)
    assert [check.expected for check in program.checks] == [False, True, True]


class Drops(nn.Module):
    """Skips its layer at random, as transformers' layerdrop does."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand([]) < self.probability:
            return x
        return self.linear(x)


def test_conditions_on_random_numbers(mesh: DeviceMesh) -> None:
    """With probability 0 the condition never holds; otherwise the message says what to do."""
    x = torch.randn(2, 3)
    model = Drops(0.0)
    expected = model(x)
    assert torch.equal(graphshard.compile(model, mesh, backend="eager")(x), expected)
    with pytest.raises(graphshard.CaptureError, match=r"test_guards.py:\d+\n.*\n.*random number.*layerdrop=0"):
        graphshard.compile(Drops(0.1), mesh, backend="eager")(x)


class Likelihood(nn.Module):
    """A loss of torch's that is written in Python and refuses negative variances."""

    def __init__(self) -> None:
        super().__init__()
        self.variance = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.gaussian_nll_loss(x, torch.zeros_like(x), self.variance(x))


def test_conditions_within_functions_of_torch(mesh: DeviceMesh) -> None:
    """They are checked, too, and the message names the line that calls the function."""
    model = Likelihood()
    nn.init.constant_(model.variance.weight, 1.0)
    nn.init.constant_(model.variance.bias, 0.0)
    expected = F.gaussian_nll_loss(torch.ones(2, 3), torch.zeros(2, 3), torch.full((2, 3), 3.0))
    compiled = graphshard.compile(model, mesh, backend="eager")
    assert torch.equal(compiled(torch.ones(2, 3)), expected)
    with pytest.raises(graphshard.InputError, match=r"test_guards\.py:\d+: return F\.gaussian_nll_loss"):
        compiled(-torch.ones(2, 3))
