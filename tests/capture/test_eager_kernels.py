"""Operators for which torch has Python functions beside its kernels run as kernels, bit for bit as in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import graphshard
from graphshard.capture.eager_kernels import eager_kernels

SIZES: dict[str, dict[str, Any]] = {
    "linear": {"size": 5},
    "bilinear": {"scale_factor": 2},
    "bilinear, corners": {"size": (5, 4), "align_corners": True},
    "bilinear, antialias": {"size": (5, 4), "antialias": True},
    "bicubic": {"size": (5, 14)},
    "trilinear": {"size": (2, 5, 4)},
    "nearest": {"scale_factor": 1.7},
    "nearest-exact": {"size": (5, 4)},
}


class Scaled(nn.Module):
    """Weights, interpolated."""

    def __init__(self, mode: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(shape))
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.interpolate(self.w * x, mode=self.mode.partition(",")[0], **SIZES[self.mode])
        return (y * y.detach().cos()).sum()


def _compared(mesh: DeviceMesh, mode: str, backend: str) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Loss and gradient of both."""
    torch.manual_seed(0)
    dims = {"linear": 1, "trilinear": 3}.get(mode, 2)
    model = Scaled(mode, (2, 3, 7, 9, 6)[: 2 + dims])
    twin, x = copy.deepcopy(model), torch.randn(model.w.shape)
    found = []
    for each in (graphshard.compile(model, mesh, backend=backend), twin):
        loss = each(x)
        loss.backward()
        grad: Any = each.w.grad
        found.append((loss.detach(), grad.full_tensor() if each is model else grad))
    return found[0], found[1]


@pytest.mark.parametrize("mode", SIZES)
def test_interpolation(mesh: DeviceMesh, mode: str) -> None:
    for ours, plain in zip(*_compared(mesh, mode, "eager"), strict=True):
        assert torch.equal(ours, plain)


def test_interpolation_with_inductor(mesh: DeviceMesh) -> None:
    """Which takes the operators apart itself."""
    for ours, plain in zip(*_compared(mesh, "bilinear", "inductor"), strict=True):
        torch.testing.assert_close(ours, plain)


def test_torch_is_as_before() -> None:
    op = torch.ops.aten.upsample_bilinear2d.vec
    before = dict(op.py_kernels)
    with eager_kernels():
        assert op.py_kernels != before
    assert op.py_kernels == before


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest-exact"])
def test_interpolation_with_dynamic_sizes(mesh: DeviceMesh, mode: str) -> None:
    """Kernels ask for numbers: what torch has in Python runs there, to rounding."""
    torch.manual_seed(0)
    model = Scaled(mode, (2, 3, 1, 1))
    twin = copy.deepcopy(model)
    size = torch.export.Dim("size", min=4)
    compiled = graphshard.compile(model, mesh, backend="eager", dynamic_shapes=({2: size},))
    for extent in (7, 9):
        x = torch.randn(2, 3, extent, 6)
        torch.testing.assert_close(compiled(x), twin(x))
    assert len(graphshard.programs(compiled)) == 1


def _labels() -> torch.Tensor:
    """Of each row up to the first -1."""
    return torch.tensor([[0, 3, -1, 1, 2], [2, -1, 4, 3, 0], [4, 3, 2, 1, 0]])


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, _labels()[:, 0], weight=torch.rand(5)),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, _labels()),
    "multilabel_margin_loss, by row": lambda x: F.multilabel_margin_loss(x, _labels(), reduction="none").sum(),
}


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(mesh: DeviceMesh, name: str, backend: Any) -> None:
    """Torch's function in Python has another result for labels that end before the row does."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return LOSSES[name](x * self.w)

    torch.manual_seed(0)
    plain, x = Net(), torch.randn(3, 5)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend=backend)
    found = []
    for model in (plain, ours):
        torch.manual_seed(1)
        loss = model(x)
        loss.backward()
        grad: Any = model.w.grad
        found.append((loss.detach(), grad.full_tensor() if model is ours else grad))
    if backend == "eager":
        assert all(map(torch.equal, *found))
    else:
        torch.testing.assert_close(found[1], found[0])
