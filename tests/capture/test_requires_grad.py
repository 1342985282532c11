"""Forward that makes what it is given require a gradient, as models of forces and gradient penalties do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.ir.errors import CaptureError


class _Net(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.body = body

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


def _x() -> Tensor:
    return torch.arange(8.0).view(2, 4)


def _penalty(net: _Net, x: Tensor) -> Tensor:
    x.requires_grad_()
    y = net.linear(x).square().sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    return y + slope.square().sum()


def _set(net: _Net, x: Tensor) -> Tensor:
    x.requires_grad = True
    return net.linear(x).square().sum()


def _set_behind_shapes(net: _Net, x: Tensor) -> Tensor:
    """Neither shapes nor what has no gradient is a use."""
    rows = torch.zeros(x.shape[0], 1) + x.detach()[:, :1] + (x > 1)[:, :1]
    x.requires_grad_(True)
    return (net.linear(x) + rows).square().sum()


def _set_in_a_dict(net: _Net, x: Tensor) -> Tensor:
    given = {"x": x, "n": 2}
    return _penalty(net, given["x"]) * given["n"]


BODIES = (_penalty, _set, _set_behind_shapes, _set_in_a_dict)


def _trained(net: nn.Module, *inputs: Tensor) -> list[Any]:
    """What is seen of calls with these inputs and their backward."""
    seen: list[Any] = []
    for x in inputs:
        loss = net(x)
        seen += [loss.item(), x.requires_grad, x.is_leaf]
        loss.backward()
        assert x.grad is not None
        seen.append(x.grad.tolist())
    return [*seen, [_whole(p.grad).tolist() for p in net.parameters()]]


def _whole(grad: Any) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


@pytest.mark.parametrize("body", BODIES)
def test_inputs_are_left_as_in_eager_mode(mesh: DeviceMesh, body: Callable[..., Any]) -> None:
    """`x.requires_grad` stayed False, and `x.grad` None, silently; also of a tensor that is given again."""
    plain = _Net(body)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    seen = []
    for net in (plain, ours):
        first = _x()
        seen.append(_trained(net, first, _x() + 1, first))
    assert seen[0] == seen[1]


def test_without_gradients(mesh: DeviceMesh) -> None:
    ours = graphshard.compile(_Net(_set), mesh, backend="eager")
    x = _x()
    with torch.no_grad():
        ours(x)
    assert x.requires_grad
    assert x.grad is None


def test_what_is_cast_for_forward_stays_as_it_is(mesh: DeviceMesh) -> None:
    """Forward is given a copy of it, as with FSDP2."""
    ours = graphshard.compile(_Net(_set), mesh, backend="eager", mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    x = _x()
    ours(x).backward()
    assert not x.requires_grad


def test_a_file_says_so(mesh: DeviceMesh, tmp_path: Path) -> None:
    plain = _Net(_penalty)
    path = graphshard.export(plain, (1,), tmp_path / "net.gshard", example_inputs=(_x(),), backend="eager")
    loaded = graphshard.load(path, copy.deepcopy(plain), mesh)
    assert _trained(loaded, _x()) == _trained(plain, _x())


# Each line is the one that is refused.
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "behind its first use": (lambda net, x: (net.linear(x), x.requires_grad_())[0].sum(), "behind its first use"),
    "in a list": (lambda net, x: (torch.cat([x, x]), x.requires_grad_())[0].sum(), "behind its first use"),
    "as a keyword": (lambda net, x: (net.linear(input=x), x.requires_grad_())[0].sum(), "behind its first use"),
    "of a parameter": (lambda net, x: net.linear(x + net.linear.weight.requires_grad_(False)[0]), "of a parameter"),
    "of a buffer": (lambda net, x: net.linear(x * net.scale.requires_grad_()), "of a parameter or buffer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_line(mesh: DeviceMesh, name: str) -> None:
    body, what = REFUSED[name]
    ours = graphshard.compile(_Net(body), mesh, backend="eager")
    where = rf"_Net.forward at .*{body.__code__.co_firstlineno}\n(.*\n)+.*{what}"
    with pytest.raises(CaptureError, match=where) as error:
        ours(_x())
    assert "Set it outside of the call" in str(error.value)


def test_a_parameter_that_requires_one_already(mesh: DeviceMesh) -> None:
    plain = _Net(lambda net, x: net.linear(x * net.linear.weight.requires_grad_()[0]).sum())
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    assert torch.equal(ours(_x()), plain(_x()))
