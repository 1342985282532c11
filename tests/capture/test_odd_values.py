"""Values and calls that few models have: complex numbers, slices as results, a class that overrides `__call__`."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.ir.errors import CaptureError


class _Complex(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * 2j + 1j).imag


class _Slices(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, slice]:
        return super().forward(x), slice(0, len(x))


class _Called(nn.Linear):
    """Counts, and changes what forward returns."""

    calls = 0

    def __call__(self, x: Tensor) -> Any:
        self.calls += 1
        return super().__call__(x) + 100


class _Outer(nn.Module):
    def __init__(self, *_: int) -> None:
        super().__init__()
        self.called = _Called(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.called(x) * self.called.calls
        return y


@pytest.mark.parametrize("cls", [_Complex, _Slices, _Called, _Outer])
def test_as_in_eager_mode(mesh: DeviceMesh, cls: Any) -> None:
    """The first two were errors of graphshard's own; `__call__` of the compiled class ran twice."""
    plain = cls(4, 4)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for scale in (1, 2):
        mine, expected = ours(torch.ones(2, 4) * scale), plain(torch.ones(2, 4) * scale)
        if isinstance(expected, tuple):
            assert mine[1:] == expected[1:]
            mine, expected = mine[0], expected[0]
        assert torch.equal(mine, expected)
    assert getattr(ours, "calls", 0) == getattr(plain, "calls", 0)


class _Recent(nn.Module):
    """Keeps what was used last at the end of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.used: dict[int, int] = {2: 1, 3: 1}

    def forward(self, x: Tensor) -> Tensor:
        self.used[len(x)] = self.used.pop(len(x)) + 1
        y: Tensor = self.linear(x) * next(iter(self.used))
        return y


def test_an_order_that_forward_changes(mesh: DeviceMesh) -> None:
    """The items were left where they had been, silently."""
    ours = graphshard.compile(_Recent(), mesh, backend="eager")
    with pytest.raises(CaptureError, match=r"_Recent.forward at .*: it puts the items of used into another order"):
        ours(torch.ones(2, 4))
    assert ours.used == {2: 1, 3: 1}


class _Partial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = functools.partial(torch.mul, other=2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.linear(x))


def test_keywords_of_a_partial_that_change(mesh: DeviceMesh) -> None:
    """They were those of the capture."""
    plain = _Partial()
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for other in (2.0, 7.0, torch.full((4,), 3.0), 2.0):
        for model in (plain, ours):
            model.scale.keywords["other"] = other
        assert torch.equal(ours(torch.ones(2, 4)), plain(torch.ones(2, 4)))
