"""Updates of shards by the optimizer's step, and by torch's fused kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from graphshard.runtime.step_overlap import Arrival, Updates

Params = list[nn.Parameter]


def _params() -> Params:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size)) for size in ((64, 33), (7,), (0, 3), ())]


def _gradients(params: Params, number: int) -> list[torch.Tensor]:
    torch.manual_seed(number)
    return [torch.randn_like(param) for param in params]


def _train(
    params: Params,
    optimizer: Optimizer,
    updates: Updates | None = None,
    gradients: Callable[[Params, int], list[torch.Tensor]] = _gradients,
    steps: int = 3,
) -> None:
    """Train some steps, with `updates` or with the optimizer itself."""
    for number in range(steps):
        given = gradients(params, number)
        if updates is None:
            for param, grad in zip(params, given):
                param.grad = grad
            optimizer.step()
            optimizer.zero_grad()
        else:
            updates.begin()
            updates.take([Arrival(param, grad) for param, grad in zip(params, given)])


def _assert_same(ours: tuple[Params, Optimizer], theirs: tuple[Params, Optimizer]) -> None:
    """Check that parameters and states have the same bits, types and names."""
    for param, expected in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(param, expected)
        state, expected_state = ours[1].state[param], theirs[1].state[expected]
        assert list(state) == list(expected_state)
        for name, value in expected_state.items():
            assert state[name].dtype is value.dtype
            assert torch.equal(state[name], value), name


OPTIONS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {}),
    "adam": (Adam, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    "lr is a tensor": (AdamW, {"lr": torch.tensor(0.02)}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_fused_by_default(name: str) -> None:
    """The kernel and bits of `fused=True`; the state is compatible with separate operators, too."""
    cls, options = OPTIONS[name]
    ours, fused, plain = _params(), _params(), _params()
    optimizers = [cls(params, **{"lr": 0.02, **options}) for params in (ours, plain)]  # type: ignore[arg-type]
    expected = cls(fused, **{"lr": 0.02, **options, "fused": True})  # type: ignore[arg-type]
    fused_adam = f"_fused_{cls.__name__.lower()}_"
    with mock.patch.object(torch, fused_adam, wraps=getattr(torch, fused_adam)) as kernel:
        _train(ours, optimizers[0], Updates(optimizers[0], fuses=True))
    assert kernel.called  # on some CPUs it rounds as separate operators do
    _train(fused, expected)
    _train(plain, optimizers[1])
    _assert_same((ours, optimizers[0]), (fused, expected))
    torch.testing.assert_close(ours, plain)
    assert optimizers[0].param_groups[0]["fused"] is None


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": False}], ids=str)
def test_choices_of_the_user(options: dict[str, bool]) -> None:
    """The bits of the chosen implementation."""
    ours, theirs = _params(), _params()
    optimizers = [AdamW(params, lr=0.02, **options) for params in (ours, theirs)]  # type: ignore[arg-type]
    _train(ours, optimizers[0], Updates(optimizers[0], fuses=True))
    _train(theirs, optimizers[1])
    _assert_same((ours, optimizers[0]), (theirs, optimizers[1]))


def _column_major(params: Params, number: int) -> list[torch.Tensor]:
    """Return gradients in column-major order."""
    return [grad.t().contiguous().t() if grad.dim() == 2 else grad for grad in _gradients(params, number)]


def _columns() -> Params:
    return [nn.Parameter(param.detach().t()) if param.dim() == 2 else param for param in _params()]


@pytest.mark.parametrize(
    ("params", "gradients"),
    [
        (_params, _column_major),
        (_columns, _gradients),
        (_columns, lambda params, n: [g.contiguous() for g in _gradients(params, n)]),
    ],
    ids=["gradients", "parameters and gradients", "parameters"],
)
def test_by_columns(params: Callable[[], Params], gradients: Callable[[Params, int], list[torch.Tensor]]) -> None:
    """torch's fused kernel would pair elements by position in memory."""
    ours, theirs = params(), params()
    optimizers = [AdamW(each, lr=0.02) for each in (ours, theirs)]
    _train(ours, optimizers[0], Updates(optimizers[0], fuses=True), gradients)
    _train(theirs, optimizers[1], None, gradients)
    _assert_same((ours, optimizers[0]), (theirs, optimizers[1]))


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("float64")
def test_steps_in_float64() -> None:
    """Created with this default dtype, and continued with another: the kernel would misread the steps."""
    ours, theirs = _params(), _params()
    optimizers = [AdamW(params, lr=0.02) for params in (ours, theirs)]
    updates = Updates(optimizers[0], fuses=True)
    _train(ours, optimizers[0], updates)
    _train(theirs, optimizers[1])
    assert optimizers[0].state[ours[0]]["step"].dtype is torch.float64
    torch.set_default_dtype(torch.float32)
    _train(ours, optimizers[0], updates)
    _train(theirs, optimizers[1])
    _assert_same((ours, optimizers[0]), (theirs, optimizers[1]))


def test_state_of_another_type() -> None:
    """Moments in float64 and parameters in float32, which the kernel does not support."""
    ours = _params()
    theirs = copy.deepcopy(ours)
    optimizers = [AdamW(params, lr=0.02) for params in (ours, theirs)]
    for params, optimizer in zip((ours, theirs), optimizers):
        _train(params, optimizer, steps=1)
        for param in params:
            optimizer.state[param]["exp_avg_sq"] = optimizer.state[param]["exp_avg_sq"].double()
    _train(ours, optimizers[0], Updates(optimizers[0], fuses=True), steps=2)
    _train(theirs, optimizers[1], steps=2)
    _assert_same((ours, optimizers[0]), (theirs, optimizers[1]))


def test_state_by_columns() -> None:
    """As a checkpoint may contain it."""
    ours, theirs = _params(), _params()
    optimizers = [AdamW(params, lr=0.02) for params in (ours, theirs)]
    for params, optimizer in zip((ours, theirs), optimizers):
        _train(params, optimizer, steps=1)
        optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"].t().contiguous().t()
    _train(ours, optimizers[0], Updates(optimizers[0], fuses=True), steps=2)
    _train(theirs, optimizers[1], steps=2)
    _assert_same((ours, optimizers[0]), (theirs, optimizers[1]))
