"""What a method reads besides its arguments is told apart from what it read before; no graph, no ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphshard.capture.variables import read_by


class _Settings:
    """Has a number, and a property that nobody is to run."""

    def __init__(self) -> None:
        self.inner = SimpleNamespace(factor=1)

    @property
    def computed(self) -> float:
        raise AssertionError("it was run")


NUMBERS: dict[str, Any] = {"a": [1, 2], "b": {3}}
SETTINGS = _Settings()
FACTOR = 1


def _helper() -> Any:
    return FACTOR


def _method(self: Any, mesh: Any, start: list[int] = [0]) -> Any:  # noqa: B006
    return NUMBERS["a"], SETTINGS.inner.factor, SETTINGS.computed, start, _helper()


def _set_factor(value: Any) -> None:
    globals()["FACTOR"] = value


CHANGES: dict[str, Callable[[], Any]] = {
    "item of a list in a dict": lambda: NUMBERS["a"].append(3),
    "item of a set": lambda: NUMBERS["b"].add(4),
    "attribute of an attribute": lambda: setattr(SETTINGS.inner, "factor", 2),
    "default of an argument": lambda: _method.__defaults__[0].append(1),
    "global of a function that it calls": lambda: _set_factor(2),
    "type of a number": lambda: _set_factor(True),
    "object": lambda: _set_factor(_Settings()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_seen(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    monkeypatch.setitem(globals(), "FACTOR", 1)
    decorated = torch.no_grad()(_method)
    before = read_by(decorated)
    assert read_by(_method) == before == read_by(decorated)
    CHANGES[change]()
    assert read_by(decorated) != before


def test_variables_of_a_closure() -> None:
    factor: Any = torch.ones(1)

    def method(self: Any, mesh: Any) -> Any:
        return self * factor

    before = read_by(method)
    factor.add_(1)  # the same tensor, which a program reads at each call
    assert read_by(method) == before
    factor = torch.ones(1)
    assert read_by(method) != before


def test_torch_s_own_functions_are_left_alone() -> None:
    assert read_by(torch.nn.Linear.forward) == ()
    assert read_by(None) == ()
