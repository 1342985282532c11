"""What hooks, and functions of the user's with a backward, read and write while backward runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.ir.errors import CaptureError
from graphshard.ir.operators import CHECKED
from tests.helpers import captured


class _Settings:
    def __init__(self) -> None:
        self.scale = 2.0


class _Net(nn.Module):
    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4))
        self.plain = torch.ones(4)
        self.number, self.settings = 2.0, _Settings()
        self.others: list[Any] = [nn.Identity()]

    def hook(self, grad: Tensor) -> Tensor | None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.register_hook(self.hook)
        return y * 2


class _Number(_Net):
    def hook(self, grad: Tensor) -> Tensor:
        return grad * self.number


class _Setting(_Net):
    def hook(self, grad: Tensor) -> Tensor:
        return grad * self.settings.scale


class _OfClass(_Net):
    def hook(self, grad: Tensor) -> Tensor:
        return grad * self.factor


class _Buffer(_Net):
    def hook(self, grad: Tensor) -> Tensor:
        assert isinstance(self.mask, Tensor)
        return grad * self.mask


class _Plain(_Net):
    def hook(self, grad: Tensor) -> Tensor:
        return grad * self.plain


class _OfModule(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_full_backward_hook(lambda module, given, made: (given[0] * module.number,))
        self.linear.number = 2.0

    def hook(self, grad: Tensor) -> None:
        return None


class _OfAnother(_Net):
    """A module that the hook knows, and no module has."""

    def __init__(self) -> None:
        super().__init__()
        self.others[0].number = 2.0

    def hook(self, grad: Tensor) -> Tensor:
        return grad * self.others[0].number


class _Statistics(_Net):
    """In the hook the buffer is what forward has left."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def hook(self, grad: Tensor) -> Tensor:
        assert self.norm.running_mean is not None
        return grad * self.norm.running_mean

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x)).square()


class _Parameter(_Net):
    def hook(self, grad: Tensor) -> Tensor:
        return grad * self.linear.weight.detach().sum()


READERS = [_Number, _Setting, _OfClass, _Buffer, _Plain, _OfModule, _OfAnother, _Statistics, _Parameter]


@pytest.mark.parametrize("cls", READERS)
def test_what_hooks_read(mesh: DeviceMesh, cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was what it had been at the capture, silently."""
    torch.manual_seed(0)
    plain = cls()
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for step in range(3):
        x = torch.randn(3, 4)
        found = []
        for model in (ours, plain):
            given = x.clone().requires_grad_()
            model(given).sum().backward()
            grad = model.linear.weight.grad
            found.append((getattr(grad, "full_tensor", lambda grad=grad: grad)(), given.grad))
            model.zero_grad()
            model.number, model.settings.scale = 2.0 + step, 3.0 + step
            model.plain, model.mask = model.plain + 1, model.mask + 1
        monkeypatch.setattr(_OfClass, "factor", 3.0 + step)
        torch.testing.assert_close(*found, rtol=0, atol=0)


class _Writes(_Net):
    def hook(self, grad: Tensor) -> None:
        assert isinstance(self.mask, Tensor)
        self.mask.mul_(0.9).add_(grad.sum(0))


class _WritesPlain(_Net):
    def hook(self, grad: Tensor) -> None:
        self.plain[0] = 3


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.mask = mask
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.mask.copy_(grad.sum(0))
        return grad, None


class _WritesInFunction(_Net):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Function.apply(self.linear(x), self.mask)
        return y


@pytest.mark.parametrize(
    ("cls", "line", "what"),
    [
        (_Writes, r"self.mask.mul_\(0.9\).add_\(grad.sum\(0\)\)", "buffer mask"),
        (_WritesPlain, r"self.plain\[0\] = 3", "input 1"),
        (_WritesInFunction, r"ctx.mask.copy_\(grad.sum\(0\)\)", "buffer mask"),
    ],
)
def test_what_backward_writes(mesh: DeviceMesh, cls: Any, line: str, what: str) -> None:
    """That of the function was lost, silently; the others were assertions within torch."""
    ours = graphshard.compile(cls(), mesh, backend="eager")
    with pytest.raises(CaptureError, match=rf"{line}\nA hook, or the backward of (.|\n)*\({what}\)$"):
        ours(torch.ones(3, 4))
    assert torch.equal(ours.mask, torch.ones(4))
    assert torch.equal(ours.plain, torch.ones(4))


class _SetByForward(_Net):
    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return super().forward(x)

    hook = _Number.hook


def test_what_forward_sets(mesh: DeviceMesh) -> None:
    ours = graphshard.compile(_SetByForward(), mesh, backend="eager")
    with pytest.raises(CaptureError, match=r"return grad \* self.number\n.* reads what forward sets on a module"):
        ours(torch.ones(3, 4))


class _Eigenvalues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvals(x * self.scale).abs().square().sum()


def test_what_backward_checks(mesh: DeviceMesh) -> None:
    """The gradient of eig solves an equation, which fails where there are too few eigenvectors."""
    plain = _Eigenvalues()
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for model in (ours, plain):
        model(torch.tensor([[2.0, 1], [0.5, 1]])).backward()
    mine: Any = ours.scale.grad
    assert torch.equal(mine.full_tensor(), plain.scale.grad)
    program = captured(_Eigenvalues(), (torch.ones(2, 2),), world_size=1)
    (check,) = program.phases["joint"].module.graph.find_nodes(op="call_function", target=CHECKED)
    assert check.args[2] == "torch.linalg.solve"
    with pytest.raises(torch.linalg.LinAlgError, match=r"linalg.solve: .* the input matrix is singular"):
        CHECKED(torch.ones(2), torch.tensor(1, dtype=torch.int32), "torch.linalg.solve", True)
