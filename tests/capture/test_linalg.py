"""What torch.linalg fails at, and what it cannot be traced with."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.ir.errors import CaptureError


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


class _Catches(_Scaled):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return torch.linalg.cholesky(x * self.scale)
        except torch.linalg.LinAlgError:
            return x * self.scale


class _Suppresses(_Scaled):
    """Catches other errors."""

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.nullcontext():
            try:
                return torch.linalg.cholesky(x * self.scale)
            except KeyError:
                return x


class _LeastSquares(_Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.lstsq(x * self.scale, x).solution


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older code does not say what catches")
@pytest.mark.parametrize(("cls", "catches"), [(_Catches, True), (_Suppresses, False)])
def test_errors_that_forward_catches(mesh: DeviceMesh, cls: Any, catches: bool) -> None:
    """The message was torch's, though the model is written so that it never comes."""
    ours = graphshard.compile(cls(), mesh, backend="eager")
    assert torch.equal(ours(torch.eye(2)), torch.eye(2))
    with pytest.raises(torch.linalg.LinAlgError) as caught:
        ours(-torch.eye(2))
    said = r"Forward would catch this at .*test_linalg.py:\d+: return torch.linalg.cholesky"
    assert bool(caught.match(said) if catches else "catch" in str(caught.value)) == catches


def test_least_squares(mesh: DeviceMesh) -> None:
    """The message said that this line cannot be traced."""
    ours = graphshard.compile(_LeastSquares(), mesh, backend="eager")
    with pytest.raises(CaptureError, match=r"in the place of torch.linalg.lstsq\(a, b\), torch.linalg.pinv\(a\) @ b"):
        ours(torch.ones(3, 2))
