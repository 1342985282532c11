"""A program is captured again if what methods of parameters read changes, and only then."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import ops
from torch.distributed.device_mesh import DeviceMesh

import graphshard

STATE = types.SimpleNamespace(factor=1.0, step=0, a=types.SimpleNamespace())
STATE.a.b = types.SimpleNamespace(c=types.SimpleNamespace(d=types.SimpleNamespace(factor=1.0)))
STEPS = types.SimpleNamespace(epoch=0, size=8)
FACTORS = deque([1.0], maxlen=1)
logaddexp = ops.aten.logaddexp
step = 0


class Table(dict):  # type: ignore[type-arg]
    """A dict with attributes."""


class Config:
    """A class that holds settings."""

    table = Table(factor=1.0)


def _innermost() -> float:
    return float(STATE.factor)


def _inner() -> float:
    return _innermost()


def _outer() -> float:
    return _inner()


def _net(mesh: DeviceMesh, factor: Callable[[], float]) -> torch.nn.Linear:
    """Return a compiled layer whose weight is multiplied by a factor where it is gathered."""

    def before(self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return (self,), None

    @torch.no_grad()
    def after(self: Any, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        weight = gathered[0] * factor()
        return weight, (weight,)

    net: Any = graphshard.compile(torch.nn.Linear(4, 4, bias=False), mesh, backend="eager")
    shard = net.weight._local_tensor
    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before.__get__(shard), after.__get__(shard)
    return net  # type: ignore[no-any-return]


def _set_table(value: float) -> None:
    Config.table["factor"] = value


READ: dict[str, tuple[Callable[[], float], Callable[[float], Any]]] = {
    "chain": (lambda: float(STATE.a.b.c.d.factor), lambda value: setattr(STATE.a.b.c.d, "factor", value)),
    "functions": (_outer, lambda value: setattr(STATE, "factor", value)),
    "deque": (lambda: FACTORS[0], FACTORS.append),
    "subclass of dict": (lambda: Config.table["factor"], _set_table),
}


@pytest.mark.parametrize("name", READ)
def test_a_change_of_what_is_read(mesh: DeviceMesh, name: str) -> None:
    factor, change = READ[name]
    net = _net(mesh, factor)
    first = net(torch.ones(2, 4))
    change(2.0)
    try:
        torch.testing.assert_close(net(torch.ones(2, 4)), 2 * first)
    finally:
        change(1.0)


def test_other_attributes_change_at_each_step(mesh: DeviceMesh) -> None:
    """They have the names of attributes that the method reads of other objects."""
    global step

    def factor() -> float:
        return float(STATE.factor * STEPS.size + 0 * config.step)

    config = types.SimpleNamespace(step=1, size=0)
    net = _net(mesh, factor)
    for _ in range(3):
        step, STATE.step, STATE.size, config.size = step + 1, STATE.step + 1, STATE.step, config.size + 1
        STEPS.epoch, STEPS.step = STEPS.epoch + 1, step
        net(torch.ones(2, 4)).sum().backward()
    assert len(graphshard.programs(net)) == 1


def test_operators_that_are_read_for_the_first_time(mesh: DeviceMesh) -> None:
    """Torch adds them, and their overloads, as attributes when they are read, which is not a change of a variable."""
    vars(ops.aten).pop("logaddexp2", None)
    vars(logaddexp).pop("default", None)

    def factor() -> Any:
        one = torch.ones(())
        return ops.aten.logaddexp2(one, one) + logaddexp.default(one, one)

    net = _net(mesh, factor)
    for _ in range(2):
        net(torch.ones(2, 4))
    assert len(graphshard.programs(net)) == 1
