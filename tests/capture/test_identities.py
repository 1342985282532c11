"""What is one object and what is two: inputs that modules hold, buffers, and lists in attributes."""

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


class _Net(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))
        self.last: Any = None
        self.kept: list[Any] = []
        self.rows, self.columns = [1], [1]
        self.nested: dict[str, list[int]] = {"rows": [2], "columns": [2]}
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(self, x)
        return result


def _pair(mesh: DeviceMesh, body: Callable[..., Any]) -> tuple[_Net, _Net]:
    plain = _Net(body)
    return plain, graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")


def _reuses(net: _Net, x: Tensor) -> Tensor:
    known, net.last = net.last is x, x
    return net.linear(x) + (100 if known else 0)


def test_the_input_of_the_last_call(mesh: DeviceMesh) -> None:
    """The answer was that of the capture, silently."""
    plain, ours = _pair(mesh, _reuses)
    x, y = torch.ones(2, 4), torch.ones(2, 4)
    for given in (x, x, x, y, x, y, y):
        assert torch.equal(ours(given), plain(given))
        assert ours.last is given
    assert [program.reason for program in graphshard.programs(ours)] == [
        "first call",
        "_Net.last was None and is float32[2, 4] with strides [4, 1]",
        "input 0 was the tensor last and is another",
    ]


def _writes(net: _Net, x: Tensor) -> Tensor:
    known = net.kept[0]
    x.mul_(2)
    y: Tensor = net.linear(x) + known
    return y


def test_an_input_that_is_in_a_list_and_written_to(mesh: DeviceMesh) -> None:
    """It was an error: two inputs that share memory."""
    plain, ours = _pair(mesh, _writes)
    for model in (plain, ours):
        model.kept.append(torch.ones(2, 4))
    for _ in range(2):
        assert torch.equal(ours(ours.kept[0]), plain(plain.kept[0]))
        assert torch.equal(ours.kept[0], plain.kept[0])
        assert torch.equal(ours(torch.ones(2, 4)), plain(torch.ones(2, 4)))
    assert len(graphshard.programs(ours)) == 2


def _of_buffers(net: _Net, x: Tensor) -> Tensor:
    net.scale.add_(1)
    return net.linear(x) + (100 if x is net.scale else 0)


def test_a_buffer_that_is_given(mesh: DeviceMesh) -> None:
    """What forward wrote to it was not seen in the input, silently."""
    plain, ours = _pair(mesh, _of_buffers)
    for _ in range(2):
        assert torch.equal(ours(ours.scale), plain(plain.scale))
        assert torch.equal(ours(torch.ones(4)), plain(torch.ones(4)))
        assert torch.equal(ours(ours.shift), plain(plain.shift))
    assert torch.equal(ours.scale, plain.scale)


def test_buffers_that_are_tied_later(mesh: DeviceMesh) -> None:
    def body(net: _Net, x: Tensor) -> Tensor:
        net.scale.add_(1)
        y: Tensor = net.linear(x) + net.shift
        return y

    plain, ours = _pair(mesh, body)
    x = torch.ones(2, 4)
    assert torch.equal(ours(x), plain(x))
    for model in (plain, ours):
        model.shift = model.scale
    for _ in range(2):
        assert torch.equal(ours(x), plain(x))
    for model in (plain, ours):
        model.shift = model.scale.clone()
    assert torch.equal(ours(x), plain(x))
    assert len(graphshard.programs(ours)) == 2


def test_tensors_that_become_one(mesh: DeviceMesh) -> None:
    def body(net: _Net, x: Tensor) -> Tensor:
        net.last[0].add_(1)
        y: Tensor = net.linear(x) + net.last[1]
        return y

    plain, ours = _pair(mesh, body)
    x = torch.ones(2, 4)
    for several in (True, False, True):
        for model in (plain, ours):
            one = torch.ones(4)
            model.last = [one, torch.ones(4) if several else one]
        assert torch.equal(ours(x), plain(x))
    assert len(graphshard.programs(ours)) == 2


def _compares(net: _Net, x: Tensor) -> Tensor:
    one = net.rows is net.columns or net.nested["rows"] is net.nested["columns"]
    return net.linear(x) + (100 if one else 0)


def _separate(net: _Net) -> None:
    net.rows, net.nested = [1], {"rows": [2], "columns": [2]}


def _join(net: _Net) -> None:
    net.rows = net.columns


def _join_within(net: _Net) -> None:
    net.nested["rows"] = net.nested["columns"]


def test_lists_that_forward_compares(mesh: DeviceMesh) -> None:
    """Lists were compared by what is in them, and so the answer was that of the capture."""
    plain, ours = _pair(mesh, _compares)
    x = torch.ones(2, 4)
    for change in (_separate, _join, _separate, _join_within, _separate):
        for model in (plain, ours):
            change(model)
        assert torch.equal(ours(x), plain(x))
    reasons = [program.reason for program in graphshard.programs(ours)]
    assert reasons[1:] == ["lists, dicts or sets that were one object are several, or the other way round"] * 2


def test_a_program_from_a_file(mesh: DeviceMesh, tmp_path: Path) -> None:
    """It is for the tensor that the module holds, wherever that is."""
    plain, x = _Net(lambda net, x: net.linear(x) + (100 if x is net.last else 0)), torch.ones(2, 4)
    plain.last = x
    path = graphshard.export(plain, (1,), tmp_path / "net.gshard", example_inputs=(x,), backend="eager")
    ours = copy.deepcopy(plain)
    graphshard.load(path, ours, mesh)
    assert torch.equal(ours(ours.last), plain(x))
    with pytest.raises(graphshard.ArtifactError, match="input 0 was the tensor last and is another"):
        ours(x.clone())
