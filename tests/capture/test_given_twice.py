"""Calls that are given one tensor several times: it is one in forward, and calls with several have another program."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.export import Dim

import graphshard
from graphshard.ir.errors import ArtifactError


class _Net(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.body = body

    def forward(self, *args: Any) -> Any:
        return self.body(self.linear, *args)


def _pair(mesh: DeviceMesh, body: Callable[..., Any], **options: Any) -> tuple[nn.Module, nn.Module]:
    plain = _Net(body)
    return plain, graphshard.compile(copy.deepcopy(plain), mesh, backend="eager", **options)


def _asks(linear: nn.Module, x: Any, y: Any) -> Tensor:
    result: Tensor = linear(x) + (100 if x is y else 0)
    return result


def _writes(linear: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    result: Tensor = linear(y).sum()
    return result


def _one(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def _several(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.clone()


def test_forward_asks_whether_they_are_one(mesh: DeviceMesh) -> None:
    """It was told no, silently."""
    plain, ours = _pair(mesh, _asks)
    x = torch.ones(2, 4)
    for given in ((x, x), (x, x.clone()), (x, x)):
        assert torch.equal(ours(*given), plain(*given))
    reasons = [program.reason for program in graphshard.programs(ours)]
    assert reasons == ["first call", "inputs that were several tensors are one, or the other way round"]


def test_forward_writes_to_one_of_them(mesh: DeviceMesh) -> None:
    plain, ours = _pair(mesh, _writes)
    given = [torch.ones(2, 4), torch.ones(2, 4)]
    for _ in range(2):
        results = [model(x, x) for model, x in zip((plain, ours), given)]
        assert torch.equal(*results)
        assert torch.equal(*given)


def test_attention_to_itself(mesh: DeviceMesh) -> None:
    """Torch projects queries, keys and values at once where they are one tensor, which rounds otherwise."""
    plain = nn.MultiheadAttention(32, 4, batch_first=True)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    x = torch.randn(2, 7, 32)
    for given in ((x, x, x), (x, x.clone(), x)):
        assert torch.equal(ours(*given)[0], plain(*given)[0])


def test_dynamic_sizes(mesh: DeviceMesh) -> None:
    batch = {0: Dim("batch")}
    plain, ours = _pair(mesh, lambda linear, pair: _asks(linear, *pair), dynamic_shapes=(([batch, batch],),))
    for rows in (3, 5):
        x = torch.ones(rows, 4)
        assert torch.equal(ours([x, x]), plain([x, x]))
        assert torch.equal(ours([x, x.clone()]), plain([x, x.clone()]))
    assert len(graphshard.programs(ours)) == 2


def _forces(linear: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    y.requires_grad_()
    return (linear(x) * y).square().sum()


def test_forward_makes_one_of_them_require_a_gradient(mesh: DeviceMesh) -> None:
    grads = []
    for model in _pair(mesh, _forces):
        x = torch.arange(8.0).view(2, 4)
        model(x, x).backward()
        grads.append(x.grad)
    assert grads[0] is not None
    assert torch.equal(*grads)


def test_a_dtensor(mesh: DeviceMesh) -> None:
    _, ours = _pair(mesh, lambda linear, x, y: linear(x.to_local()) + (100 if x is y else 0))
    x = DTensor.from_local(torch.ones(2, 4), mesh, [Replicate()])
    other = DTensor.from_local(torch.ones(2, 4), mesh, [Replicate()])
    assert torch.allclose(ours(x, x), ours(x, other) + 100)


@pytest.mark.parametrize("example", [_one, _several])
def test_a_program_from_a_file(mesh: DeviceMesh, tmp_path: Path, example: Callable[[Tensor], Any]) -> None:
    """An example that is given one tensor twice stands for calls with several, too."""
    plain, x = _Net(_asks), torch.ones(2, 4)
    path = graphshard.export(plain, (1,), tmp_path / "net.gshard", example_inputs=example(x), backend="eager")
    ours = graphshard.load(path, copy.deepcopy(plain), mesh)
    assert torch.equal(ours(x, x.clone()), plain(x, x.clone()))
    if example is _one:
        assert torch.equal(ours(x, x), plain(x, x))
    else:
        with pytest.raises(ArtifactError, match="inputs that were several tensors are one, or the other way round"):
            ours(x, x)


def test_an_example_stands_for_all_calls(tmp_path: Path) -> None:
    """A file of plain torch is not told which inputs are one tensor."""
    plain, x = _Net(lambda linear, x, y: linear(x) + y), torch.ones(2, 4)
    path = tmp_path / "plain.pt2"
    graphshard.export(plain, (1,), path, example_inputs=(x, x), mode="inference", backend="eager")
    y = torch.arange(8.0).view(2, 4)
    assert torch.equal(torch.export.load(path).module()(x, y), plain(x, y))
