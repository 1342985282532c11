"""Classes with ways of their own to set attributes and items: what forward leaves is what eager mode leaves."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.ir.errors import CaptureError


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.value: Any = 1.0
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.value = self.value + 1
        y: Tensor = self.linear(x) * self.value
        return y


class _Doubles(_Net):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value * 2 if name in ("value", "scale", "sum") else value)


class _DoublesTensors(_Doubles):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.scale
        self.sum, self.scale = y.sum(), self.scale + 1
        return y


class _Frozen(_Net):
    def __setattr__(self, name: str, value: Any) -> None:
        if "value" in self.__dict__:
            raise AttributeError("frozen")
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["value"] = self.value + 1
        y: Tensor = self.linear(x) * self.value
        return y


class _Doubled:
    def __init__(self) -> None:
        self.value = 1.0

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value * 2)


class _OfObject(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.held = _Doubled()

    def forward(self, x: Tensor) -> Tensor:
        self.held.value = self.held.value + 1
        y: Tensor = self.linear(x) * self.held.value
        return y


class _DoublesItems(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value * 2)


class _DoublesAppended(list[float]):
    def extend(self, values: Any) -> None:
        super().extend([value * 2 for value in values])


class _OfItems(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.list = _DoublesItems(value=1.0, tensor=torch.ones(())), _DoublesAppended()

    def forward(self, x: Tensor) -> Tensor:
        self.items["value"] = self.items["value"] + 1
        self.list.extend([1.0])
        y: Tensor = self.linear(x) * self.items["value"] * self.items["tensor"] * sum(self.list)
        return y


class _Registers(_Net):
    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        super().register_buffer(name, None if tensor is None else tensor * 2, persistent)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "first"):
            self.register_buffer("first", x.sum())
        y: Tensor = self.linear(x) * self.first
        return y


class _InItself:
    """A descriptor that keeps the value, for all objects."""

    def __init__(self) -> None:
        self.value = 1.0

    def __get__(self, owner: Any, cls: Any = None) -> Any:
        return self.value

    def __set__(self, owner: Any, value: Any) -> None:
        self.value = value * 3


class _InRegistry:
    """A descriptor that keeps a value for each object."""

    def __init__(self) -> None:
        self.values: Any = weakref.WeakKeyDictionary()

    def __get__(self, owner: Any, cls: Any = None) -> Any:
        return self.values.get(owner, 1.0)

    def __set__(self, owner: Any, value: Any) -> None:
        self.values[owner] = value * 3


class _InOwner:
    def __get__(self, owner: Any, cls: Any = None) -> Any:
        return owner.__dict__.get("kept", 1.0)

    def __set__(self, owner: Any, value: Any) -> None:
        owner.__dict__["kept"] = value * 3


class _Computed(_Net):
    computed: Any

    def forward(self, x: Tensor) -> Tensor:
        self.computed = self.computed + 1
        y: Tensor = self.linear(x) * self.computed
        return y


class _Reads(_Net):
    computed: Any

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.computed
        return y


def _seen(model: nn.Module) -> list[Any]:
    """Results of some calls, and what is left."""
    results = [model(torch.ones(2, 4)).tolist() for _ in range(3)]
    left = (vars(model).get(name) for name in ("value", "items", "list", "sum"))
    state = [each.item() if isinstance(each, Tensor) else str(each) for each in left]
    return [results, [buffer.tolist() for buffer in model.buffers()], state]


@pytest.mark.parametrize(
    "make", [_Doubles, _DoublesTensors, _Frozen, _OfObject, _OfItems, _Registers], ids=lambda make: make.__name__
)
def test_a_class_that_sets_in_its_own_way(mesh: DeviceMesh, make: Callable[[], nn.Module]) -> None:
    """What forward had left was set again, in the class's own way, and so was another value: silently."""
    seen = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = make()  # a copy would be made with the class's own methods, too
        seen.append(_seen(graphshard.compile(model, mesh, backend="eager") if compiled else model))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", [_InItself, _InRegistry, _InOwner], ids=lambda kind: kind.__name__)
def test_a_descriptor(mesh: DeviceMesh, kind: type) -> None:
    """What it keeps was that of the capture, silently."""
    seen = []
    for compiled in (False, True):
        torch.manual_seed(0)
        cls = type("_Computed", (_Computed,), {"computed": kind()})
        model = cls()
        if compiled:
            graphshard.compile(model, mesh, backend="eager")
        seen.append([_seen(model), model.computed])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", [_InItself, _InRegistry, _InOwner], ids=lambda kind: kind.__name__)
def test_what_a_descriptor_keeps_is_changed(mesh: DeviceMesh, kind: type) -> None:
    cls = type("_Reads", (_Reads,), {"computed": kind()})
    plain = cls()
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for value in (1.0, 2.0, 1.0):
        for model in (plain, ours):
            model.computed = value
        assert torch.equal(ours(torch.ones(2, 4)), plain(torch.ones(2, 4)))
    assert len(graphshard.programs(ours)) == 2


class _Counting(dict[str, float]):
    count = 0

    def __setitem__(self, key: str, value: float) -> None:
        super().__setitem__(key, value)
        self.count += 1


class _OfCounting(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept = _Counting(value=1.0)

    def forward(self, x: Tensor) -> Tensor:
        self.kept["value"] = 2.0
        y: Tensor = self.linear(x) * self.kept.count
        return y


def test_an_attribute_of_a_dict_that_forward_sets(mesh: DeviceMesh) -> None:
    """It was set during the capture only."""
    ours = graphshard.compile(_OfCounting(), mesh, backend="eager")
    with pytest.raises(CaptureError, match=r"it sets _OfCounting\.kept\.count, an attribute of a _Counting, which no"):
        ours(torch.ones(2, 4))


def test_an_attribute_of_a_dict_that_somebody_sets(mesh: DeviceMesh) -> None:
    class Reads(_OfCounting):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x) * self.kept.count
            return y

    plain = Reads()
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for count in (1, 2):
        for model in (plain, ours):
            model.kept.count = count
        assert torch.equal(ours(torch.ones(2, 4)), plain(torch.ones(2, 4)))
