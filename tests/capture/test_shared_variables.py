"""Variables and lists that several functions have, such as hooks that append to one list, as in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard
from tests.ranks import FakeWorld


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x).relu())
        return y


# A model, and what its variable is now.
Case: TypeAlias = tuple[nn.Module, Callable[[], Any]]


def _features() -> Case:
    """As they are extracted: a list that hooks of all layers append to."""
    net, features = _Net(), []
    for layer in (net.a, net.b):
        layer.register_forward_hook(lambda module, args, out: features.append(out))
    return net, lambda: [feature.tolist() for feature in features]


def _features_that_are_taken() -> Case:
    net, features = _Net(), []

    def take() -> list[Any]:
        taken = [feature.tolist() for feature in features]
        features.clear()
        return taken

    net.a.register_forward_pre_hook(lambda module, args: features.append(args[0]))
    net.a.register_forward_hook(lambda module, args, out: features.append(out))
    return net, take


def _counted() -> Case:
    net, number = _Net(), 0

    def add(module: Any, args: Any, out: Any) -> None:
        nonlocal number
        number += 1

    def triple(module: Any, args: Any, out: Any) -> None:
        nonlocal number
        number *= 3

    net.a.register_forward_hook(add)
    net.a.register_forward_hook(add)
    net.b.register_forward_hook(triple)
    return net, lambda: number


class _Logging(nn.Linear):
    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__(4, 4)
        self.name, self.log = name, log

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(f"{self.name} begins")
        y = super().forward(x)
        self.log.append(f"{self.name} ends")
        return y


def _a_list_of_two_modules() -> Case:
    """What they append is in the order of the calls."""
    net, log = _Net(), []
    net.a, net.b = _Logging("a", log), _Logging("b", log)
    net.b.register_forward_pre_hook(lambda module, args: log.append("between"))
    return net, lambda: list(log)


class _Closures(_Net):
    def __init__(self) -> None:
        super().__init__()
        number, log = 0, []

        def add() -> None:
            nonlocal number
            number += 1

        self.add, self.number = add, lambda: number
        self.note, self.note_twice = log.append, lambda item: log.extend((item, item))
        self.log = lambda: (number, list(log))

    def forward(self, x: Tensor) -> Tensor:
        self.add()
        self.note_twice(len(x))
        return super().forward(x) * self.number()


def _closures() -> Case:
    """One of them sees what another has changed in the same call."""
    net = _Closures()
    return net, net.log


seen: list[int] = []


def _a_global() -> Case:
    seen.clear()
    net = _Net()
    net.a.register_forward_hook(lambda module, args, out: seen.append(1))
    net.b.register_forward_hook(lambda module, args, out: seen.append(2))
    return net, lambda: list(seen)


CASES = (_features, _features_that_are_taken, _counted, _a_list_of_two_modules, _closures, _a_global)


@pytest.mark.parametrize("make", CASES)
def test_as_in_eager_mode(fake_world: FakeWorld, make: Callable[[], Case]) -> None:
    """The first call of a model with two such hooks never ended; of closures one saw what the capture had left."""
    fake_world(1)
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net, now = make()
        if compiled:
            mesh: DeviceMesh = init_device_mesh("cpu", (1,))
            graphshard.compile(net, mesh, backend="eager")
        found.append([(net(torch.full((2, 4), float(step))).tolist(), now()) for step in range(4)])
        if compiled:
            assert len(graphshard.programs(net)) == 1
    assert found[0] == found[1]
