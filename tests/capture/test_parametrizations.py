"""Weights that parametrizations compute, within `torch.nn.utils.parametrize.cached()`."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrizations, parametrize

import graphshard
from graphshard.ir.errors import CaptureError


class _Twice(nn.Module):
    def __init__(self, parametrization: Any, *, within: bool = False) -> None:
        super().__init__()
        self.linear = parametrization(nn.Linear(4, 4))
        self.within = within

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached() if self.within else contextlib.nullcontext():
            y: Tensor = self.linear(x) + self.linear(2 * x)
            return y


def _step(model: nn.Module, around: bool) -> dict[str, Tensor]:
    with parametrize.cached() if around else contextlib.nullcontext():
        model(torch.ones(3, 4)).square().sum().backward()
    found = {f"{name}.grad": p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())
    return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in found.items()}


def test_around_a_call(mesh: DeviceMesh) -> None:
    """What the trace remembered was used in the next one, an AssertionError of torch's; and it is seen when it ends."""
    torch.manual_seed(0)
    plain = _Twice(parametrizations.weight_norm)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for around in (True, False, True):
        torch.testing.assert_close(_step(ours, around), _step(plain, around), rtol=0, atol=0)
    assert len(graphshard.programs(ours)) == 2
    assert not parametrize._cache


def test_what_writes_to_buffers(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = _Twice(parametrizations.spectral_norm, within=True)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(_step(ours, around=False), _step(plain, around=False), rtol=0, atol=0)
    other = graphshard.compile(_Twice(parametrizations.spectral_norm), mesh, backend="eager")
    with pytest.raises(
        CaptureError, match=r"parametrizations.weight.0._[uv], .* Open parametrize.cached\(\) in forward"
    ):
        _step(other, around=True)
