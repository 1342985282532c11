"""What an operator writes to lies as it lay before, as in eager mode: what follows computes in the same order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import graphshard

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


# What changes the shape or the order of what forward has made, in place.
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "squeeze_": lambda x: x.view(1, 20, 5).squeeze_(0),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "as_strided_": lambda x: x.as_strided_((5, 20), (1, 5)),
    "resize_": lambda x: x * x.detach().clone().resize_(20, 1),
    "torch.stft, which does": lambda x: torch.view_as_real(
        torch.stft(x.reshape(-1), 10, window=torch.ones(10), return_complex=True)
    ),
    "torch.istft": lambda x: torch.istft(
        torch.stft(x.reshape(-1), 10, window=torch.ones(10), return_complex=True), 10, window=torch.ones(10)
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_change_of_shape_in_place(mesh: DeviceMesh, name: str) -> None:
    """The result got the strides of before for its new shape: other numbers, silently."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(20, 5))

        def forward(self, x: Tensor) -> Tensor:
            return IN_PLACE[name](x * self.w) * 3

    torch.manual_seed(0)
    plain, x = Net(), torch.randn(20, 5)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    found = []
    for model in (plain, ours):
        y = model(x)
        y.square().sum().backward()
        grad: Any = model.w.grad
        found.append((y.detach(), y.stride(), grad.full_tensor() if model is ours else grad))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert torch.equal(found[0][2], found[1][2])
