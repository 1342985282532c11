"""Autograd checks: backwards that would silently differ from eager mode are rejected."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.errors import UnsupportedError


class _Net(nn.Module):
    """A hidden state, values computed from it, and an independent one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.other = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.first(x).tanh()
        self.feature = h * 2
        return h, self.second(self.feature), self.other(x)


def _twins(mesh: DeviceMesh, backend: str = "eager") -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = _Net()
    return graphshard.compile(copy.deepcopy(plain), mesh, backend=backend), plain  # type: ignore[arg-type]


X = torch.linspace(-1, 1, 8).view(2, 4)
PAST = r"output \d of _Net has a hook, or retains its gradient, and output \d, which forward computes from it"


def _scale(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad * 2  # without a gradient autograd raises before the check


REFUSED: dict[str, Callable[[Any], Tensor]] = {
    "hook": lambda net: (out := net(X), out[0].register_hook(_scale), out[1].sum())[2],
    "hook, and a separate gradient": lambda net: (
        out := net(X),
        out[0].register_hook(_scale),
        out[1].sum() + out[0].sum(),
    )[2],
    "retained": lambda net: (out := net(X), out[0].retain_grad(), out[1].sum())[2],
    "retained, in an attribute": lambda net: (out := net(X), net.feature.retain_grad(), out[1].sum())[2],
}
ALLOWED: dict[str, Callable[[Any], Tensor]] = {
    "hook off the path": lambda net: (out := net(X), out[2].register_hook(_scale), sum(out).sum())[2],
    "hook after": lambda net: (out := net(X), out[1].register_hook(_scale), (out[0] + out[1]).sum())[2],
    "gradients of that alone": lambda net: (out := net(X), out[0].register_hook(_scale), out[0].sum())[2],
    "no hook": lambda net: sum(net(X)).sum(),  # type: ignore[misc]
}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.quick_cases(
    "hook-eager",
    "hook, and a separate gradient-eager",
    "hook, and a separate gradient-inductor",
    "retained-eager",
    "retained-inductor",
    "retained, in an attribute-eager",
)
def test_rejects_gradients_that_bypass_a_hook(mesh: DeviceMesh, name: str, backend: str) -> None:
    """Outputs of a program are siblings: a hook would see, and change, only a part of the gradient."""
    net, _ = _twins(mesh, backend)
    held: list[Any] = []  # only referenced tensors are checked
    net.register_forward_hook(lambda module, args, outputs: held.extend(outputs))
    loss = REFUSED[name](net)
    with pytest.raises(UnsupportedError, match=rf"{PAST}.*Register the hook in forward"):
        loss.backward()


@pytest.mark.parametrize("name", ALLOWED)
def test_hooks_that_see_the_whole_gradient(mesh: DeviceMesh, name: str) -> None:
    grads = []
    for net in _twins(mesh):
        ALLOWED[name](net).backward()
        grads.append([None if p.grad is None else _whole(p.grad) for p in net.parameters()])
    for actual, expected in zip(*grads, strict=True):
        assert actual is expected is None or torch.equal(actual, expected)


def _whole(grad: Any) -> Any:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def test_in_a_file(mesh: DeviceMesh, tmp_path: Path) -> None:
    """A file has the code of regions without operators: all possible dependencies count."""
    calls = [graphshard.Call((X,), gradients=[(1,), (0, 1, 2)])]
    path = graphshard.export(_Net(), (1,), tmp_path / "net.gshard", calls=calls, backend="eager")
    net = graphshard.load(path, _Net(), mesh)
    held: list[Any] = []
    net.register_forward_hook(lambda module, args, outputs: held.extend(outputs))
    loss = REFUSED["hook"](net)
    with pytest.raises(UnsupportedError, match=PAST):
        loss.backward()
    ALLOWED["no hook"](net).backward()


def test_outputs_that_are_one_tensor(mesh: DeviceMesh) -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = super().forward(x)
            return y, y.view(-1)

    net = graphshard.compile(Twice(4, 4), mesh, backend="eager")
    one, other = net(X)
    one.register_hook(_scale)
    with pytest.raises(UnsupportedError, match=r"output 0 of Twice has a hook.*output 1"):
        other.sum().backward()


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradients_of_gradients_in_a_file(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Without a graph they would silently be missing in the next backward."""
    calls = [graphshard.Call((X,), gradients=[(1,)])]
    path = graphshard.export(_Net(), (1,), tmp_path / "net.gshard", calls=calls, backend="eager")
    net = graphshard.load(path, _Net(), mesh)
    with pytest.raises(UnsupportedError, match=r"gradients of _Net.*\(create_graph=True\).*none in a loaded file"):
        net(X)[1].sum().backward(create_graph=True)
    net(X)[1].sum().backward()


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in CallBackward")
def test_anomaly_mode(mesh: DeviceMesh) -> None:
    """torch's anomaly mode failed on gradients that are DTensors."""
    net, plain = _twins(mesh)
    for check in (True, False):
        with torch.autograd.set_detect_anomaly(True, check_nan=check):
            for each in (net, plain):
                each(X)[1].sum().backward()
    assert torch.equal(_whole(net.first.weight.grad), plain.first.weight.grad)  # type: ignore[union-attr]
