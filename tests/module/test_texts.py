"""Texts of numbers that depend on values: printed, returned, or left on a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from tests.module.test_value_guards import Asking, X


def _returned(net: Any, y: Tensor, number: Tensor) -> Any:
    return y, f"{y.sum().item():.3f}"


def _key(net: Any, y: Tensor, number: Tensor) -> Any:
    return {f"loss {y.sum().item()}": y}


def _kept(net: Any, y: Tensor, number: Tensor) -> Any:
    net.message = str(y.sum().item())
    return y


@pytest.mark.parametrize("forward", [_returned, _key, _kept])
def test_texts_of_unknown_numbers_are_errors(mesh: DeviceMesh, forward: Callable[..., Any]) -> None:
    model = graphshard.compile(Asking(forward), mesh, backend="eager")
    with pytest.raises(graphshard.CaptureError, match=r"text of a number .* Return the number, or the tensor"):
        model(X, torch.ones(1))


def test_texts_of_unknown_numbers_may_be_printed(mesh: DeviceMesh, capsys: pytest.CaptureFixture[str]) -> None:
    def forward(net: Any, y: Tensor, number: Tensor) -> Tensor:
        print(f"loss {y.sum().item():.3f}")
        return y

    model = graphshard.compile(Asking(forward), mesh, backend="eager")
    assert torch.equal(model(X, torch.ones(1)), Asking(forward)(X, torch.ones(1)))
    assert "loss \u2983" in capsys.readouterr().out


def test_texts_of_known_numbers(mesh: DeviceMesh) -> None:
    def forward(net: Any, y: Tensor, number: Tensor) -> Any:
        return {f"{number.item():.1f}": y}

    model = graphshard.compile(Asking(forward), mesh, backend="eager")
    assert [*model(X, torch.tensor(0.5)), *model(X, torch.tensor(2.25))] == ["0.5", "2.2"]


def test_texts_decide(mesh: DeviceMesh) -> None:
    """A text of a number that is not known is in no dict."""

    def forward(net: Any, y: Tensor, number: Tensor) -> Any:
        return y.relu() if str(number.item()) in {"1": None} else y

    model, plain = graphshard.compile(Asking(forward), mesh, backend="eager"), Asking(forward)
    for value in (1, 2, 1):
        assert torch.equal(model(X, torch.tensor(value)), plain(X, torch.tensor(value)))


def test_what_is_only_printed_decides_nothing(mesh: DeviceMesh, capsys: pytest.CaptureFixture[str]) -> None:
    def forward(net: Any, y: Tensor, number: Tensor) -> Tensor:
        print(f"number {number.item()}")
        return y

    model = graphshard.compile(Asking(forward), mesh, backend="eager")
    for value in (1, 2, 3):
        model(X, torch.tensor(value))
    assert len(graphshard.programs(model)) == 1
    assert "number \u2983" in capsys.readouterr().out


def test_zeros_keep_their_sign(mesh: DeviceMesh) -> None:
    """And a number that is found out for its text has one program for each value."""

    def forward(net: Any, y: Tensor, number: Tensor) -> Any:
        value = float(number)
        return str(value), y * [1, 2][int(value > 0)]

    model = graphshard.compile(Asking(forward), mesh, backend="eager")
    assert [model(X, torch.tensor(value))[0] for value in (0.0, -0.0, 0.0, 2.0, 2.0)] == [
        "0.0",
        "-0.0",
        "0.0",
        "2.0",
        "2.0",
    ]
    assert len(graphshard.programs(model)) == 3
