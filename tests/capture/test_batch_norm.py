"""Batch norm without a momentum: its statistics are averages over all batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard


class _Net(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), norm

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if isinstance(self.norm, nn.BatchNorm2d):
            y = y.reshape(2, 3, -1, 4).permute(0, 3, 1, 2)
        return (self.norm(y).square() * y).sum()


NORMS = [
    nn.BatchNorm1d(4, momentum=None),
    nn.BatchNorm1d(4, momentum=None, affine=False),
    nn.BatchNorm1d(4, momentum=None, track_running_stats=False),
    nn.BatchNorm2d(4, momentum=None),
]


def _seen(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    loss = model(x)
    loss.backward()
    found: dict[str, Any] = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    found |= dict(model.named_buffers()) | {"loss": loss.detach()}
    return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in found.items()}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_averages_over_all_batches(mesh: DeviceMesh, norm: nn.Module, backend: Any) -> None:
    """The capture failed, with advice about sizes."""
    torch.manual_seed(0)
    plain = _Net(copy.deepcopy(norm))
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend=backend)
    exactly = {"rtol": 0.0, "atol": 0.0} if backend == "eager" else {"rtol": 1e-4, "atol": 1e-4}
    for training in (True, True, True, False, True):
        for model in (ours, plain):
            model.train(training)
            model.zero_grad()
        x = torch.randn(18, 4) * 3
        torch.testing.assert_close(_seen(ours, x), _seen(plain, x), **exactly)
    assert len(graphshard.programs(ours)) == 2
