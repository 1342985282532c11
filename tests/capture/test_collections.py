"""Global variables that are Python's own collections, registries with weak references among them."""

from __future__ import annotations

import collections
import copy
import itertools
import queue
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.ir.errors import CaptureError

HELD: Any = None


def _appends(net: nn.Module) -> int:
    HELD.append(1)
    return len(HELD)


def _counts(net: nn.Module) -> int:
    HELD["calls"] = HELD.get("calls", 0) + 1
    return int(HELD["calls"])


def _puts(net: nn.Module) -> int:
    HELD.put(1)
    return int(HELD.qsize())


def _counts_weakly(net: nn.Module) -> int:
    HELD[net] = HELD.get(net, 0) + 1
    return int(HELD[net])


def _adds_up_weakly(net: nn.Module) -> Tensor:
    HELD[net] = HELD.get(net, torch.zeros(())) + 1
    total: Tensor = HELD[net]
    return total


def _appends_weakly(net: nn.Module) -> int:
    HELD.setdefault(net, []).append(1)
    return len(HELD[net])


def _registers(net: nn.Module) -> int:
    before = len(HELD)
    HELD.add(net)
    return before + 1


def _refers(net: nn.Module) -> int:
    HELD[len(HELD)] = net
    return len(HELD)


CASES: dict[str, tuple[Callable[[], Any], Callable[[nn.Module], Any]]] = {
    "deque": (collections.deque, _appends),
    "UserList": (collections.UserList, _appends),
    "Counter": (collections.Counter, _counts),
    "defaultdict": (lambda: collections.defaultdict(int), _counts),
    "OrderedDict": (collections.OrderedDict, _counts),
    "UserDict": (collections.UserDict, _counts),
    "ChainMap": (collections.ChainMap, _counts),
    "Queue": (queue.Queue, _puts),
    "WeakKeyDictionary": (weakref.WeakKeyDictionary, _counts_weakly),
    "WeakKeyDictionary of tensors": (weakref.WeakKeyDictionary, _adds_up_weakly),
    "WeakKeyDictionary of lists": (weakref.WeakKeyDictionary, _appends_weakly),
    "WeakSet": (weakref.WeakSet, _registers),
    "WeakValueDictionary": (weakref.WeakValueDictionary, _refers),
}


class _Net(nn.Module):
    def __init__(self, factor: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.factor(self)
        return y


@pytest.mark.parametrize("name", CASES)
def test_forward_changes_it(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It was left as the capture had left it, silently."""
    make, factor = CASES[name]
    plain = _Net(factor)
    ours, seen = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager"), []
    for model in (plain, ours):
        monkeypatch.setitem(globals(), "HELD", make())
        seen.append([model(torch.ones(2, 4)).tolist() for _ in range(3)])
    assert seen[0] == seen[1]


def test_somebody_else_changes_it(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _Net(lambda net: 2 if net in HELD else 1)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    x = torch.ones(2, 4)
    monkeypatch.setitem(globals(), "HELD", weakref.WeakSet())
    for change in (HELD.update, HELD.difference_update, HELD.update):
        assert torch.equal(ours(x), plain(x))
        change((plain, ours))
        assert torch.equal(ours(x), plain(x))
    assert len(graphshard.programs(ours)) == 2


def test_the_next_item_of_an_iterator(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the capture was taken at every call."""
    monkeypatch.setitem(globals(), "HELD", itertools.count(1))
    ours = graphshard.compile(_Net(lambda net: next(HELD)), mesh, backend="eager")
    with pytest.raises(CaptureError, match=r"Each call takes the next item of an iterator"):
        ours(torch.ones(2, 4))
    assert next(HELD) == 1
