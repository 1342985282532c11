"""Buffers, children and attributes that a module gets after the capture, by forward itself or by somebody else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard


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


def _of_dict(net: nn.Module) -> Any:
    return len([name for name in net.__dict__ if name == "extra"]), net.__dict__.get("extra")


# How forward asks for all attributes of itself, or of an object.
ALL: dict[str, Callable[[nn.Module], Any]] = {
    "__dict__": _of_dict,
    "vars": lambda net: "extra" in vars(net),
    "vars, values": lambda net: vars(net).get("extra", 5),
    "dir": lambda net: "extra" in dir(net),
    "vars of an object": lambda net: sorted(vars(net.config).items()),
}


class _AsksForAll(nn.Module):
    def __init__(self, ask: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.config = SimpleNamespace(a=1)
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * len(str(self.ask(self)))
        return y


@pytest.mark.parametrize("name", ALL)
def test_all_attributes_at_once(mesh: DeviceMesh, name: str) -> None:
    """`vars(self)` and `dir(self)` were those of the capture, with the values that they had."""
    plain = _AsksForAll(ALL[name])
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for values in ({}, {"extra": 1}, {"extra": 100_000}, {"extra": 100_000, "more": 2}):
        for model in (plain, ours):
            target = model.config if "object" in name else model
            for key, value in values.items():
                setattr(target, key, value)
        assert torch.equal(ours(_batch(2)), plain(_batch(2))), values
    before = len(graphshard.programs(ours))
    ours(_batch(2))
    assert len(graphshard.programs(ours)) == before


class _Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shifted(x) if hasattr(self, "shifted") else self.linear(x)
        return y * getattr(self.linear, "gain", 1)


@pytest.fixture
def optional() -> Iterator[type]:
    """A class that may be given attributes, which are taken away again."""
    before = dict(vars(_Optional))
    yield _Optional
    for name in vars(_Optional).keys() - before.keys():
        delattr(_Optional, name)


def test_an_attribute_that_a_class_is_given_later(
    mesh: DeviceMesh, optional: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a class has none was not part of what a program was captured for."""
    plain = optional()
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    assert torch.equal(ours(_batch(2)), plain(_batch(2)))
    monkeypatch.setattr(nn.Linear, "gain", 3, raising=False)
    assert torch.equal(ours(_batch(2)), plain(_batch(2)))
    optional.shifted = lambda self, x: self.linear(x + 1)  # type: ignore[attr-defined]
    assert torch.equal(ours(_batch(2)), plain(_batch(2)))
    assert len(graphshard.programs(ours)) == 3
