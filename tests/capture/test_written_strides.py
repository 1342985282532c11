"""What an operator writes to lies as it lay before, as in eager mode: what follows computes in the same order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import graphshard
from tests.ranks import FakeWorld

WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu_": lambda x: x.relu_(),
    "add_": lambda x: x.add_(0.5),
    "mul_, by a tensor": lambda x: x.mul_(torch.full_like(x, 1.5)),
    "copy_": lambda x: x.copy_(x.detach().contiguous() * 2),
    "masked_fill_": lambda x: x.masked_fill_(x.detach() > 0.5, 0.25),
    "to a view": lambda x: x.view(x.shape[0], -1).mul_(2.0).view_as(x) + x,
}


class Pyramid(nn.Module):
    """The smallest map, with strides of the batch in its dims of size 1, decides how the larger ones lie."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, 32)
        self.conv = nn.Conv2d(32, 32, 3, padding=1)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        y = self.write(self.norm(self.stem(x)))
        y = F.interpolate(y, size=8, mode="nearest")
        return self.conv(y).square().mean()


@pytest.fixture
def mesh(fake_world: FakeWorld) -> DeviceMesh:
    fake_world(1)
    return init_device_mesh("cpu", (1,))


@pytest.mark.parametrize("name", WRITES)
def test_bits_after_a_write(mesh: DeviceMesh, name: str) -> None:
    torch.manual_seed(0)
    model = Pyramid(WRITES[name])
    plain = copy.deepcopy(model)
    x = torch.randn(2, 32).as_strided((2, 32, 1, 1), (32, 1, 32, 32))
    compiled = graphshard.compile(model, mesh, backend="eager")
    losses = []
    for each in (compiled, plain):
        loss = each(x)
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    for (key, param), other in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        grad: Any = param.grad
        assert other.grad is not None
        assert torch.equal(grad.full_tensor(), other.grad), key
