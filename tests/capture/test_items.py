"""Numbers that depend on values, as results and in attributes: what `item()` and `tolist()` give for a log."""

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
from graphshard.ir.errors import CaptureError


class _Net(nn.Module):
    def __init__(self, tell: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tell = tell
        self.last: Any = None

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return y.sum(), self.tell(self, y.detach())


def _leave(net: Any, y: Tensor) -> None:
    net.last = y.mean().item()


TOLD: dict[str, Callable[[Any, Tensor], Any]] = {
    "float": lambda net, y: y.mean().item(),
    "int": lambda net, y: (y > 0).sum().item(),
    "in a dict": lambda net, y: {"mean": y.mean().item(), "most": [y.amax().item()]},
    "computed with": lambda net, y: 2 * y.mean().item() + 1,
    "divided": lambda net, y: (y.mean().item() / 3, (y > 0).sum().item() / 7),
    "list": lambda net, y: y[0].tolist(),
    "in an attribute": _leave,
}


def _seen(net: nn.Module) -> list[Any]:
    found = []
    for scale in (1, 2, -3):
        loss, told = net(torch.ones(2, 4) * scale)
        loss.backward()
        found += [loss.item(), told, type(told), net.last]
    return found


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", TOLD)
def test_numbers_of_each_call(mesh: DeviceMesh, name: str, backend: Any) -> None:
    """Floats were refused, as objects with more than attributes; ints were a ValueError of Python's."""
    torch.manual_seed(0)
    plain = _Net(TOLD[name])
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend=backend)
    expected = _seen(plain)
    if backend == "eager":
        assert _seen(ours) == expected
    else:
        assert [type(value) for value in _seen(ours)] == [type(value) for value in expected]
    assert len(graphshard.programs(ours)) == 1


@pytest.mark.parametrize("name", TOLD)
def test_in_a_file(mesh: DeviceMesh, name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = _Net(TOLD[name])
    path = graphshard.export(plain, (1,), tmp_path / "a", example_inputs=(torch.ones(2, 4),), backend="eager")
    assert _seen(graphshard.load(path, copy.deepcopy(plain), mesh)) == _seen(plain)


def test_a_float_that_must_be_known(mesh: DeviceMesh) -> None:
    """The advice was that of sizes."""
    ours = graphshard.compile(_Net(lambda net, y: y * float(y.mean())), mesh, backend="eager")
    with pytest.raises(CaptureError, match=r"A tensor's value becomes a Python number\. Keep it a tensor"):
        ours(torch.ones(2, 4))
