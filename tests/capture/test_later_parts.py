"""Buffers, children and attributes that a module gets after the capture, by forward itself or by somebody else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard
from tests.ranks import FakeWorld


@pytest.fixture
def mesh(fake_world: FakeWorld) -> DeviceMesh:
    fake_world(1)
    return init_device_mesh("cpu", (1,))


def _batch(rows: int) -> Tensor:
    return torch.arange(4.0 * rows).view(rows, 4)


class _Masked(nn.Module):
    """Makes a mask when it is called with more rows than before, as many models do."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.persistent = persistent

    def forward(self, x: Tensor) -> Tensor:
        mask = getattr(self, "mask", None)
        if mask is None or len(mask) < len(x):
            self.register_buffer("mask", 2 * torch.ones(len(x), 1), persistent=self.persistent)
        y: Tensor = self.linear(x) * self.mask[: len(x)]
        return y


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_forward_registers(mesh: DeviceMesh, persistent: bool) -> None:
    """It became an attribute: not in the state dict, and an error when forward registered it again."""
    plain = _Masked(persistent=persistent)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for rows in (2, 5, 3, 5):
        assert torch.equal(ours(_batch(rows)), plain(_batch(rows)))
        for model in (ours, plain):
            assert isinstance(model._buffers["mask"], Tensor)
            assert ("mask" in model.state_dict()) == persistent
        assert torch.equal(ours.mask, plain.mask)
    assert len(graphshard.programs(ours)) == 4  # of two that make a mask, and two that find one


class _Once(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "first"):
            self.register_buffer("first", x.detach().sum())
        y: Tensor = self.linear(x) + self.first
        return y


def test_a_buffer_of_the_first_call(mesh: DeviceMesh) -> None:
    """Later calls find what the first has registered."""
    plain = _Once()
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for scale in (1, 2, 3):
        assert torch.equal(ours(_batch(2) * scale), plain(_batch(2) * scale))
    assert ours.first == _batch(2).sum()


class _Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * (2 if hasattr(self.linear, "extra") else 1)
        return y


ADDED: dict[str, Callable[[nn.Module], Any]] = {
    "a buffer": lambda module: module.register_buffer("extra", torch.ones(1)),
    "a child": lambda module: module.add_module("extra", nn.ReLU()),
    "a number": lambda module: setattr(module, "extra", 3),
}


@pytest.mark.parametrize("what", ADDED)
def test_what_somebody_adds(mesh: DeviceMesh, what: str) -> None:
    """A buffer was not noticed."""
    plain = _Asks()
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    x = _batch(2)
    first = plain(x)
    assert torch.equal(ours(x), first)
    for model in (plain, ours):
        ADDED[what](model.linear)
    assert torch.equal(ours(x), plain(x))
    assert not torch.equal(ours(x), first)


def test_a_registered_buffer_in_a_file(mesh: DeviceMesh, tmp_path: Any) -> None:
    """The program of a file registers it, too."""
    plain = _Once()
    path = tmp_path / "once.gshard"
    graphshard.export(copy.deepcopy(plain), (1,), path, example_inputs=(_batch(2),), backend="eager")
    loaded = graphshard.load(path, copy.deepcopy(plain), mesh)
    assert torch.equal(loaded(_batch(2)), plain(_batch(2)))
    assert torch.equal(loaded._buffers["first"], plain.first)
