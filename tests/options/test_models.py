"""Models that cannot be compiled, and the errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.errors import ArgumentError


def _scripted() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))


def _traced() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), torch.jit.trace(nn.ReLU(), torch.ones(2, 4)))


@pytest.mark.parametrize("make", [_scripted, _traced, lambda: torch.jit.script(nn.Linear(4, 4))])
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_modules_of_torch_jit(mesh: DeviceMesh, make: Any) -> None:
    """torch raised an AttributeError."""
    with pytest.raises(ArgumentError, match=r"was made by torch.jit, .*\. Leave torch.jit.script or trace out"):
        graphshard.compile(make(), mesh)


@torch.jit.script
def _gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.7 * x)


class _Scripted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _gelu(super().forward(x))
        return y


def test_functions_of_torch_jit(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain, ours = _Scripted(4, 4), _Scripted(4, 4)
    ours.load_state_dict(plain.state_dict())
    graphshard.compile(ours, mesh, backend="eager")
    for size in (3, 2, 3):
        x = torch.randn(size, 4)
        assert torch.equal(ours(x), plain(x))


@pytest.mark.parametrize(
    ("make", "name"),
    [(lambda: nn.LazyLinear(4), "weight of LazyLinear"), (nn.LazyBatchNorm1d, "weight of LazyBatchNorm1d")],
)
def test_modules_without_shapes(mesh: DeviceMesh, make: Any, name: str) -> None:
    """torch's message was about a tensor."""
    model = nn.Sequential(nn.Linear(4, 4), make())
    with pytest.raises(ArgumentError, match=rf"1\.{name} has no shape yet\. Call the model once with an"):
        graphshard.compile(model, mesh)
    model(torch.ones(3, 4))
    assert graphshard.compile(model, mesh, backend="eager")(torch.ones(3, 4)).shape == (3, 4)
