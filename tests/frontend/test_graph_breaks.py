"""Graph breaks: errors with line, reason and remedy, or a warning if the module is split, without lasting effects."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.torch_version import TorchVersion

import graphshard
from graphshard.errors import CaptureError, UnsupportedError
from tests.helpers import Blocks

_FOLLOWS_PYTEST = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13", reason="Dynamo follows what pytest makes of an assert"
)


class Net(Blocks):
    """A model whose forward runs a function first."""

    def __init__(self, before: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(2, 4)
        self.before, self.calls = before, 0
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += x.sum()
        x = self.before(self, x) * self.scale
        return super().forward(nn.functional.dropout(x, 0.5))


def by_value(net: Net, x: Tensor) -> Tensor:
    return x if net.scale.sum() > 0 else -x


def by_item(net: Net, x: Tensor) -> Tensor:
    return x[: int(net.scale.sum())] if int(net.scale.sum()) > 2 else x


def by_chance(net: Net, x: Tensor) -> Tensor:
    return x * random.random()


def from_file(net: Net, x: Tensor) -> Tensor:
    with open("/dev/null") as file:
        return x + len(file.read())


def by_index(net: Net, x: Tensor) -> Tensor:
    return x[list(x[:, 0].long()), :]


def raises(net: Net, x: Tensor) -> Tensor:
    if x.shape[0] == 3:
        raise KeyError("three rows", 3)
    return x


def misfits(net: Net, x: Tensor) -> Tensor:
    return x if x.shape[0] != 3 else x @ torch.ones(3, 3)


def asserts(net: Net, x: Tensor) -> Tensor:
    assert x.shape[0] != 3, "three rows"
    return x


REASONS = [
    (by_value, "Detected data-dependent branching", r"torch\.where"),
    (by_item, "A Python value that depends on values of tensors decides here", r"torch\.where"),
    # Dynamo traces it from torch 2.14 on, as an input of the graph.
    (by_chance, r"(Dynamo does not know how to trace the builtin .*|Python draws a )random", r"torch\.rand"),
    (by_index, "reads values of tensors, which a trace does not have", r"torch\.where"),
    (from_file, "Dynamo does not know how to trace builtin operator `open`", "outside of forward"),
]
named = pytest.mark.parametrize(
    ("before", "reason", "remedy"), REASONS, ids=lambda value: getattr(value, "__name__", "")
)


def _line(function: Callable[..., Any]) -> str:
    return rf"test_graph_breaks\.py:{function.__code__.co_firstlineno + 1}\b"


@named
def test_fullgraph_raises(mesh: DeviceMesh, before: Any, reason: str, remedy: str) -> None:
    """With line, reason and remedy; the model is unchanged."""
    model = graphshard.compile(Net(before), mesh, backend="eager", fullgraph=True)
    state = torch.get_rng_state(), random.getstate(), set(model.__dict__), set(model.layers[0].__dict__)
    with pytest.raises(
        CaptureError,
        match=rf"(?s)^graphshard cannot capture Net\.forward at .*{_line(before)}\n.*{reason}.*{remedy}",
    ) as caught:
        model(torch.ones(5, 4))
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert (model.calls, model.seen.item()) == (0, 0)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (random.getstate(), set(model.__dict__), set(model.layers[0].__dict__)) == state[1:]
    assert all(type(param).__name__ == "Parameter" or param.is_leaf for param in model.parameters())


@named
def test_the_module_is_split_with_a_warning(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture, before: Any, reason: str, remedy: str
) -> None:
    """The warning appears once; units are captured separately. Forward runs once per call."""
    plain = Net(before)
    model = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for each in (plain, model):
        torch.manual_seed(0)
        random.seed(0)
        for _ in range(3):
            each(torch.ones(5, 4)).backward()
    assert (plain.calls, plain.seen.item()) == (model.calls, model.seen.item()) == (3, 60)
    for own, other in zip(model.parameters(), plain.parameters()):
        assert torch.equal(own.grad.to_local(), other.grad)
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and "split" in record.message
    ]
    (warning,) = warnings
    for part in (
        "Net is split",
        f"test_graph_breaks.py:{before.__code__.co_firstlineno + 1}",
        "layers.0, layers.1",
        "fullgraph=True",
    ):
        assert part in warning
    assert len([each for each in graphshard.programs(model) if "layers" in each.title]) == 2


@pytest.mark.parametrize(
    ("before", "error", "text"),
    [
        (raises, KeyError, "three rows"),
        (misfits, RuntimeError, "mat1 and mat2|same reduction dim"),
        pytest.param(*(asserts, AssertionError, "three"), marks=_FOLLOWS_PYTEST),
    ],
)
@pytest.mark.quick_cases("misfits-RuntimeError-mat1 and mat2|same reduction dim")
def test_exceptions_of_forward_propagate(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture, before: Any, error: type[Exception], text: str
) -> None:
    """It is not a graph break: the next call is captured whole."""
    plain = Net(before)
    model = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for each in (plain, model):
        with pytest.raises(error, match=text):
            each(torch.ones(3, 4))
        each(torch.ones(5, 4)).backward()
    assert [program.title for program in graphshard.programs(model)][-1:] == ["Net-0"]
    assert model.calls == plain.calls == 2
    assert not [record for record in caplog.records if "is split" in record.message]


def _detects_tracing(net: Net, x: Tensor) -> Tensor:
    return (None if torch.compiler.is_compiling() else (x,))[0]  # type: ignore[index]


def test_exceptions_of_dynamo_split_the_module(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    """An error of a statement that eager mode does not run, with example inputs and in the first call."""
    plain = Net(_detects_tracing)
    model = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager", example_inputs=(torch.ones(5, 4),))
    for each in (plain, model):
        torch.manual_seed(0)
        each(torch.ones(5, 4)).backward()
    for own, other in zip(model.parameters(), plain.parameters()):
        assert torch.equal(own.grad.to_local(), other.grad)
    assert "Forward raises TypeError" in caplog.text


def test_fullgraph_keeps_the_type_of_an_exception(mesh: DeviceMesh) -> None:
    """If Dynamo saw the exception."""
    model = graphshard.compile(Net(raises), mesh, backend="eager", fullgraph=True)
    with pytest.raises(KeyError, match="three rows"):
        model(torch.ones(3, 4))


def _writes(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.scale.mul_(2)
    return by_value(net, x)


def test_a_write_to_a_parameter_is_an_error(mesh: DeviceMesh) -> None:
    """The shards would not see it."""
    model = graphshard.compile(Net(_writes), mesh, backend="eager")
    with pytest.raises(UnsupportedError, match=r"^forward of Net writes to the parameter scale, of which"):
        model(torch.ones(5, 4))
    assert torch.equal(model.scale.to_local(), torch.ones(4))


def test_a_copy_is_split_again(mesh: DeviceMesh) -> None:
    """A copy of a split model has separate programs."""
    model = graphshard.compile(Net(by_value), mesh, backend="eager")
    model(torch.ones(5, 4)).backward()
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each.zero_grad()
        torch.manual_seed(0)
        each(torch.ones(5, 4)).backward()
    for own, other in zip(model.parameters(), twin.parameters()):
        assert torch.equal(own.grad.to_local(), other.grad.to_local())
