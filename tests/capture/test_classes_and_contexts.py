"""What forward reads and leaves outside of modules: on classes, in contexts, functions, iterators, arrays."""

from __future__ import annotations

import array
import copy
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.ir.errors import CaptureError

X = torch.ones(2, 4)
CONTEXT: ContextVar[float] = ContextVar("CONTEXT", default=2.0)
EMPTY: ContextVar[float] = ContextVar("EMPTY")


class _Base(nn.Module):
    scale: ClassVar[float] = 2.0
    seen: ClassVar[list[int]] = []
    sizes: ClassVar[dict[str, int]] = {"rows": 0}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.ones_(self.linear.weight)


class _Of(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() * type(self).scale


class _OfClass(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() * self.__class__.scale


class _OfMethod(_Base):
    @classmethod
    def factor(cls) -> float:
        return cls.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() * self.factor()


class _ByName(_Base):
    def forward(self, x: Tensor) -> Tensor:
        scale: float = getattr(type(self), "scale")  # noqa: B009 - that is the test
        return self.linear(x).sum() * scale


class _OfContext(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() * CONTEXT.get()


class _WithDefault(_Base):
    def forward(self, x: Tensor, variable: ContextVar[float] = CONTEXT) -> Tensor:
        return self.linear(x).sum() * variable.get()


def _set_class(value: float) -> None:
    _Base.scale = value


def _set_context(value: float) -> None:
    CONTEXT.set(value)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    _set_class(2.0)
    _set_context(2.0)
    _Base.seen.clear()
    _Base.sizes["rows"] = 0


@pytest.mark.parametrize(
    ("cls", "change"),
    [
        (_Of, _set_class),
        (_OfClass, _set_class),
        (_OfMethod, _set_class),
        (_ByName, _set_class),
        (_OfContext, _set_context),
        (_WithDefault, _set_context),
    ],
)
def test_a_change_takes_effect(mesh: DeviceMesh, cls: type[_Base], change: Callable[[float], None]) -> None:
    plain = cls()
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for value in (2.0, 3.0, 2.0):
        change(value)
        assert torch.equal(ours(X), plain(X))
    _, second = graphshard.programs(ours)
    assert second.reason.endswith("was 2.0 and is 3.0")
    assert (".get() was" in second.reason) == (change is _set_context)


class _Doubles(_Base):
    def forward(self, x: Tensor) -> Tensor:
        type(self).scale *= 2
        return self.linear(x).sum() * self.scale


class _Collects(_Base):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return self.linear(x).sum() * len(self.seen)


class _Queues(_Base):
    recent: ClassVar[deque[int]] = deque([1], maxlen=4)

    def forward(self, x: Tensor) -> Tensor:
        self.recent.append(self.recent[-1] + 1)
        return self.linear(x).sum() * self.recent[-1]


class _Counts(_Base):
    def forward(self, x: Tensor) -> Tensor:
        self.sizes["rows"] += len(x)
        return self.linear(x).sum() * self.sizes["rows"]


class _Advances(_Base):
    def forward(self, x: Tensor) -> Tensor:
        CONTEXT.set(CONTEXT.get() + 1)
        return self.linear(x).sum() * CONTEXT.get()


@pytest.mark.parametrize(
    ("cls", "now"),
    [
        (_Doubles, lambda: _Doubles.scale),
        (_Collects, lambda: list(_Base.seen)),
        (_Counts, lambda: dict(_Base.sizes)),
        (_Queues, lambda: list(_Queues.recent)),
        (_Advances, CONTEXT.get),
    ],
)
def test_what_forward_leaves_is_there_after_every_call(
    mesh: DeviceMesh, cls: type[_Base], now: Callable[[], Any]
) -> None:
    """The capture runs forward more than once, and leaves what one call would."""
    found = []
    for model in (cls(), graphshard.compile(cls(), mesh, backend="eager")):
        nn.init.ones_(model.linear.bias)
        _set_context(2.0)
        _Base.seen.clear()
        _Base.sizes["rows"] = 0
        _Queues.recent.clear()
        _Queues.recent.append(1)
        if "scale" in vars(cls):
            del cls.scale
        found.append([(model(X).item(), now()) for _ in range(3)])
    assert found[0] == found[1]


def test_what_a_class_inherits_is_seen_again(mesh: DeviceMesh) -> None:
    """A capture that follows an attribute does not give the class one of its own."""
    model = graphshard.compile(_Of(), mesh, backend="eager")
    model(X)
    assert "scale" not in vars(_Of)


class _Hides(_Base):
    calls: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        _count(type(self))
        return self.linear(x).sum()


def _count(kind: type[_Hides]) -> None:
    kind.calls += 1


class _Fills(_Base):
    def forward(self, x: Tensor) -> Tensor:
        EMPTY.set(EMPTY.get(0.0) + 1)
        return self.linear(x).sum()


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (_Hides, r"it sets _Hides\.calls, an attribute of a class, .* Set it as type\(self\)\.calls, or keep"),
        (
            _Fills,
            r"it sets forward\.EMPTY\.get\(\) to could not be taken back\. Give the variable a value, or a default",
        ),
    ],
)
def test_what_cannot_be_followed_is_an_error(mesh: DeviceMesh, cls: type[_Base], text: str) -> None:
    model = graphshard.compile(cls(), mesh, backend="eager")
    with pytest.raises(CaptureError, match=text):
        model(X)
    assert _Hides.calls == 0


class _Counter:
    """An object that counts for all of its class."""

    number: ClassVar[int] = 1

    def next(self) -> int:
        type(self).number += 1
        return self.number


class _Computed:
    def __get__(self, owner: object, kind: type) -> float:
        return 2.0


class _Described:
    """A class that computes an attribute."""

    factor = _Computed()

    def of(self) -> float:
        return type(self).factor


def _attribute() -> int:
    _attribute.number += 1  # type: ignore[attr-defined]
    return _attribute.number  # type: ignore[attr-defined,no-any-return]


def _appended(numbers: list[int]) -> int:
    numbers.append(1)
    return len(numbers)


class _Uses(_Base):
    def __init__(self, held: Any, use: Callable[[Any], float]) -> None:
        super().__init__()
        self.held, self.use = held, use

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() * self.use(self.held)


@pytest.mark.parametrize(
    ("made", "use"),
    [
        (_Counter, lambda held: held.next()),
        (_Described, lambda held: held.of()),
        (int, lambda held: _attribute()),
        (lambda: functools.partial(_appended, [1]), lambda held: held()),
    ],
    ids=["a class of an object", "a descriptor", "a function", "an argument of a partial"],
)
def test_what_others_keep(mesh: DeviceMesh, made: Callable[[], Any], use: Callable[[Any], float]) -> None:
    found = []
    for compiled in (False, True):
        _Counter.number = _attribute.number = 1  # type: ignore[attr-defined]
        model = _Uses(made(), use)
        nn.init.ones_(model.linear.bias)
        model = graphshard.compile(model, mesh, backend="eager") if compiled else model
        found.append([model(X).item() for _ in range(3)])
    assert found[0] == found[1]
    assert isinstance(vars(_Described)["factor"], _Computed)


def _first_raised(values: Any) -> float:
    values[0] += 1
    return float(values[0])


@pytest.mark.parametrize(
    ("held", "use", "text"),
    [
        (itertools.count(1), next, "iterator held"),
        (iter([1, 2, 3, 4, 5]), next, "iterator held"),
        ((number for number in range(1, 9)), next, "iterator held"),
        (np.ones(1), _first_raised, r"it writes to _Uses\.held, of ndarray, which no program does"),
        (bytearray([1]), _first_raised, r"it writes to _Uses\.held, of bytearray"),
        (array.array("i", [1]), _first_raised, r"it writes to _Uses\.held, of array"),
    ],
    ids=["count", "list", "generator", "numpy", "bytearray", "array"],
)
def test_what_no_program_does_is_an_error(mesh: DeviceMesh, held: Any, use: Callable[[Any], float], text: str) -> None:
    model = graphshard.compile(_Uses(held, use), mesh, backend="eager")
    with pytest.raises(CaptureError, match=text):
        model(X)


@pytest.mark.parametrize(
    "held", [np.ones(2), np.ones((2, 3, 2))[:, 1, 0], bytearray([1, 1]), array.array("i", [1, 1])], ids=type
)
def test_an_array_that_somebody_changes(mesh: DeviceMesh, held: Any) -> None:
    """It was taken for the one of the capture, as it is the same object."""
    model = graphshard.compile(_Uses(held, lambda values: float(values[0])), mesh, backend="eager")
    once = model(X).item()
    held[0] = 3
    assert model(X).item() == pytest.approx(3 * once)
    held[0] = 1
    assert model(X).item() == once
    assert len(graphshard.programs(model)) == 2


def test_an_array_that_is_no_buffer(mesh: DeviceMesh) -> None:
    """Times have no format of Python's, objects no bytes, and large arrays are told by what they are."""
    times, objects, large = np.array(["2026-11-27"], "datetime64[D]"), np.array([{}]), np.zeros(20_000)
    model = graphshard.compile(_Uses((times, objects, large), len), mesh, backend="eager")
    model(X)
    model(X)
    assert len(graphshard.programs(model)) == 1
