"""State outside of the modules that forward reads and leaves: globals, other modules, classes, slots, defaults."""

from __future__ import annotations

import argparse
import copy
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from tests.capture import settings


class _Config:
    def __init__(self) -> None:
        self.scale, self.calls = 2.0, 0


class _Slotted:
    __slots__ = ("__weakref__", "calls", "empty", "scale")

    def __init__(self) -> None:
        self.scale, self.calls = 2.0, 0

    def method(self, x: Tensor) -> Tensor:
        return x * NUMBER


@dataclass(frozen=True, slots=True)
class _Frozen:
    scale: float = 2.0
    calls: int = 0


CONFIG, SIMPLE, ARGUMENTS = _Config(), types.SimpleNamespace(scale=2.0, calls=0), argparse.Namespace(scale=2.0, calls=0)
SLOTTED, FROZEN = _Slotted(), _Frozen()


def _scaled(x: Tensor) -> Tensor:
    return x * CONFIG.scale


def _with_default(x: Tensor, options: Any = {"scale": 2.0}) -> Tensor:  # noqa: B006 - that is the test
    return x * options["scale"]


def _with_keyword(x: Tensor, *, config: Any = CONFIG) -> Tensor:
    return x * config.scale


def _set_default(value: float) -> None:
    (options,) = _with_default.__defaults__ or ()
    options["scale"] = value


def _importing(x: Tensor) -> Tensor:
    from tests.capture import settings as inside

    return x * inside.SCALE


def _importing_as(x: Tensor) -> Tensor:
    import tests.capture.settings as inside

    return x * inside.SCALE


def _importing_a_name(x: Tensor) -> Tensor:
    from tests.capture.settings import SCALE

    return x * SCALE


class _Reader:
    """An object whose methods name globals."""

    def method(self, x: Tensor) -> Tensor:
        return x * NUMBER

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x * NUMBER

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x * NUMBER

    @property
    def scale(self) -> float:
        return NUMBER


NUMBER = 2.0
TABLE = dict.fromkeys(range(1000), 2.0)
READER = _Reader()


def _set_number(value: float) -> None:
    globals()["NUMBER"] = value


# What forward computes, and how the scale in it is changed.
READS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[float], None]]] = {
    "an object": (lambda x: x * CONFIG.scale, lambda value: setattr(CONFIG, "scale", value)),
    "in a function": (_scaled, lambda value: setattr(CONFIG, "scale", value)),
    "a namespace": (lambda x: x * SIMPLE.scale, lambda value: setattr(SIMPLE, "scale", value)),
    "arguments": (lambda x: x * ARGUMENTS.scale, lambda value: setattr(ARGUMENTS, "scale", value)),
    "a module": (lambda x: x * settings.SCALE, lambda value: setattr(settings, "SCALE", value)),
    "a class": (lambda x: x * settings.Inner.scale, lambda value: setattr(settings.Inner, "scale", value)),
    "slots": (lambda x: x * SLOTTED.scale, lambda value: setattr(SLOTTED, "scale", value)),
    "frozen slots": (lambda x: x * FROZEN.scale, lambda value: object.__setattr__(FROZEN, "scale", value)),
    "a default": (_with_default, _set_default),
    "an import": (_importing, lambda value: setattr(settings, "SCALE", value)),
    "an import under a name": (_importing_as, lambda value: setattr(settings, "SCALE", value)),
    "an import of a name": (_importing_a_name, lambda value: setattr(settings, "SCALE", value)),
    "a method of an object": (lambda x: READER.method(x), _set_number),
    "a method of an object with slots": (lambda x: SLOTTED.method(x), _set_number),
    "a static method of an object": (lambda x: READER.static(x), _set_number),
    "a class method of an object": (lambda x: READER.of_class(x), _set_number),
    "a property of an object": (lambda x: x * READER.scale, _set_number),
    "a large table": (lambda x: x * TABLE[7], lambda value: TABLE.update({7: value})),
    "a keyword's default": (_with_keyword, lambda value: setattr(CONFIG, "scale", value)),
}


class _Net(nn.Module):
    def __init__(self, function: Callable[..., Tensor], **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).sum()


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    CONFIG.scale = SIMPLE.scale = ARGUMENTS.scale = settings.SCALE = settings.Inner.scale = SLOTTED.scale = 2.0
    object.__setattr__(FROZEN, "scale", 2.0)
    _set_default(2.0)
    _set_number(2.0)
    TABLE[7] = 2.0


@pytest.mark.parametrize("case", READS)
def test_a_change_takes_effect_and_going_back_finds_the_program(mesh: DeviceMesh, case: str) -> None:
    function, change = READS[case]
    plain = _Net(function)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    x = torch.randn(2, 4)
    for scale in (2.0, 3.0, 2.0, 3.0):
        change(scale)
        assert torch.equal(ours(x), plain(x))
    first, second = (program.reason for program in graphshard.programs(ours))
    assert first == "first call"
    assert second.endswith("was 2.0 and is 3.0") or "{'scale': 3.0}" in second or "TABLE was {0: 2.0" in second


class _WithProperty(_Net):
    @property
    def scale(self) -> float:
        return NUMBER

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class _WithClass(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.kind.scale


@pytest.mark.parametrize(
    ("plain", "change"),
    [
        (_WithProperty(torch.sin), _set_number),
        (_WithClass(torch.sin, kind=settings.Inner), lambda value: setattr(settings.Inner, "scale", value)),
    ],
    ids=["a property that names a global", "a class in an attribute"],
)
def test_what_a_module_reads_through_others(mesh: DeviceMesh, plain: _Net, change: Callable[[float], None]) -> None:
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    x = torch.randn(2, 4)
    for scale in (2.0, 3.0, 2.0):
        change(scale)
        assert torch.equal(ours(x), plain(x))
    assert len(graphshard.programs(ours)) == 2


def test_an_object_with_slots_that_a_module_holds(mesh: DeviceMesh) -> None:
    """A slot that is filled for the first time is as good as a new attribute."""

    def body(net: Any, x: Tensor) -> Tensor:
        net.held.calls += 1
        return x * (net.held.empty if hasattr(net.held, "empty") else net.held.scale)

    class Net(_Net):
        def forward(self, x: Tensor) -> Tensor:
            return body(self, self.linear(x)).sum()

    plain = Net(torch.sin, held=_Slotted())
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    x = torch.randn(2, 4)
    for number in range(4):
        assert torch.equal(ours(x), plain(x))
        assert ours.held.calls == plain.held.calls == number + 1
        if number == 1:
            ours.held.empty = plain.held.empty = 5.0
    assert [program.reason for program in graphshard.programs(ours)] == [
        "first call",
        "Net.held.empty was missing and is 5.0",
    ]


def _counts(x: Tensor) -> Tensor:
    CONFIG.calls += 1
    SIMPLE.calls += 1
    SLOTTED.calls += 1
    settings.CALLS += 1
    settings.Inner.calls += 1
    return x


def _calls() -> list[int]:
    return [CONFIG.calls, SIMPLE.calls, SLOTTED.calls, settings.CALLS, settings.Inner.calls]


def _collects(x: Tensor, kept: list[Tensor] = []) -> Tensor:  # noqa: B006 - that is the test
    kept.append(x.detach().sum())
    return x


def test_what_forward_leaves_there_is_there_after_every_call(mesh: DeviceMesh) -> None:
    ours = graphshard.compile(_Net(_counts), mesh, backend="eager")
    before = _calls()
    for number in range(3):
        ours(torch.ones(2, 4))
        assert _calls() == [calls + number + 1 for calls in before]
    assert len(graphshard.programs(ours)) == 1


def test_a_default_that_grows(mesh: DeviceMesh) -> None:
    plain = _Net(_collects)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    (kept,) = _collects.__defaults__ or ()
    for number in range(3):
        x = torch.full((2, 4), float(number))
        assert torch.equal(ours(x), plain(x))
        assert len(kept) == 2 * number + 2
        assert torch.equal(kept[-1], kept[-2])
    assert len(graphshard.programs(ours)) == 1
