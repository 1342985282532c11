"""Training with inputs and attributes that change between steps continues with the bits of plain PyTorch.

Each case has the number of programs that its steps need.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.frontend.inputs import leaf_key
from graphshard.frontend.signature import Signature
from graphshard.module.installed_programs import reason_at, reason_of
from graphshard.torch_compat.torch_ops import pytree

STEPS = 14


@dataclass
class Example:
    """An input with tensors and a weight."""

    x: Tensor
    weight: float


pytree.register_dataclass(Example)


class Net(nn.Module):
    """Takes every kind of input at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.temperature, self.p = 1.0, 0.0

    def forward(
        self,
        x: Tensor | dict[str, Tensor] | list[Tensor] | Example,
        step: int = 0,
        *,
        rate: float = 1.0,
        tag: str = "",
        document: int = 0,
        lengths: list[int] | None = None,
    ) -> Tensor:
        if isinstance(x, dict):
            x = x["left"] * 2 + x["right"]
        elif isinstance(x, list):
            x = torch.cat(x)
        elif isinstance(x, Example):
            x = x.x * x.weight
        for layer in self.layers:
            x = layer(x).tanh()
        if tag == "double":
            x = x * 2
        x = x * rate / self.temperature + step
        if lengths is not None:
            x = torch.stack([part.mean() for part in x.split(lengths)])
        return nn.functional.dropout(x, self.p).square().mean()


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _x(step: int, rows: int = 6) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(step))


def _lengths(step: int) -> list[int]:
    first = 1 + step % 5
    return [first, 6 - first]


def _keys(step: int) -> dict[str, Tensor]:
    pairs = [("left", _x(step)), ("right", _x(step + 100))]
    return dict(pairs if step % 2 else reversed(pairs))


def _calls(make: Callable[[int], Call], steps: int = STEPS) -> Callable[[nn.Module], Iterator[Call]]:
    return lambda net: (make(step) for step in range(steps))


def _attribute(name: str, values: Callable[[int], float]) -> Callable[[nn.Module], Iterator[Call]]:
    def calls(net: nn.Module) -> Iterator[Call]:
        for step in range(STEPS):
            setattr(net, name, values(step))
            yield (_x(step),), {}

    return calls


def _evaluated(net: nn.Module) -> Iterator[Call]:
    """Evaluate on another batch after each third step."""
    for step in range(STEPS):
        net.train()
        torch.set_grad_enabled(True)
        yield (_x(step),), {}
        if step % 3 == 2:
            net.eval()
            torch.set_grad_enabled(False)
            yield (_x(step, 9),), {}
    torch.set_grad_enabled(True)


# The calls of a training, and their number of programs.
CASES: dict[str, tuple[Callable[[nn.Module], Iterator[Call]], int]] = {
    "a step number": (_calls(lambda step: ((_x(step), step), {})), 2),
    "a learning rate": (_calls(lambda step: ((_x(step),), {"rate": 0.1 * 0.9**step})), 2),
    "a tag": (_calls(lambda step: ((_x(step),), {"tag": ("double", "a", "b")[step % 3]})), 2),
    "a document's number": (_calls(lambda step: ((_x(step),), {"document": 1000 + step})), 1),
    "a list of lengths": (_calls(lambda step: ((_x(step),), {"lengths": _lengths(step)})), 3),
    "the order of a dict": (_calls(lambda step: ((_keys(step),), {})), 1),
    "a dataclass": (_calls(lambda step: ((Example(_x(step), 1.0 + step),), {})), 2),
    "a list of tensors": (_calls(lambda step: (([_x(step)] * (1 + step % 3),), {})), 3),
    "the last batch": (_calls(lambda step: ((_x(step, 2 if step % 7 == 6 else 6),), {})), 2),
    "an evaluation": (_evaluated, 2),
    "an annealed dropout": (_attribute("p", lambda step: 0.5 - step / 40), STEPS),
    "a temperature": (_attribute("temperature", lambda step: 1.0 + step / 8), 2),
    "30 lengths": (_calls(lambda step: ((_x(step, 3 + 7 * step % 30),), {}), 36), 2),
}


def _train(net: nn.Module, calls: Callable[[nn.Module], Iterator[Call]]) -> list[Tensor]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    found = []
    for step, (args, kwargs) in enumerate(calls(net)):
        torch.manual_seed(step)  # for dropout
        loss = net(*args, **kwargs)
        found.append(loss.detach())
        if loss.requires_grad:
            loss.backward()
            found += [param.grad.clone() for param in net.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in found]


def _compared(mesh: DeviceMesh, case: str, **options: Any) -> list[Any]:
    """Compare a training with the plain model; return its programs."""
    plain, calls = Net(), CASES[case][0]
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager", **options)
    expected, found = _train(plain, calls), _train(ours, calls)
    assert len(found) == len(expected) > STEPS
    assert all(map(torch.equal, found, expected))
    return graphshard.programs(ours)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick_cases("a document's number")
def test_training_continues(mesh: DeviceMesh, case: str) -> None:
    assert len(_compared(mesh, case)) == CASES[case][1]


@pytest.mark.parametrize("case", ["a step number", "a tag", "a list of lengths", "an annealed dropout", "30 lengths"])
@pytest.mark.quick_cases("a step number")
def test_training_continues_beyond_the_limit(mesh: DeviceMesh, case: str) -> None:
    assert len(_compared(mesh, case, max_captures=2)) == 2


# --- reasons -----------------------------------------------------------------------------------------------------


def _signature(*args: Any, grad: bool = True, **kwargs: Any) -> Signature:
    leaves, structure = pytree.tree_flatten((args, kwargs))
    return Signature(
        structure=structure,
        inputs=tuple(map(leaf_key, leaves)),
        training=(True,),
        grad=grad,
        autocast=False,
        params=(),
    )


X = torch.ones(2, 3)
REASONS = [
    (_signature(X), _signature(torch.ones(2, 4)), "args[0] was float32[2, 3] and is float32[2, 4]"),
    (_signature(labels=X), _signature(labels=X.int()), "labels was float32[2, 3] and is int32[2, 3]"),
    (
        _signature(X),
        _signature(torch.ones(3, 2).T),
        "args[0] was float32[2, 3] with strides [3, 1] and is float32[2, 3] with strides [1, 2]",
    ),
    (
        _signature(X),
        _signature(X.clone().requires_grad_()),
        "args[0] was float32[2, 3] without a gradient and is float32[2, 3] with a gradient",
    ),
    (_signature(X, step=1), _signature(X, step=2), "step was 1 and is 2"),
    (_signature(X, tag="a"), _signature(X, tag="b"), "tag was 'a' and is 'b'"),
    (_signature(X, rate=0.0), _signature(X, rate=-0.0), "rate was 0.0 and is -0.0"),
    (_signature({"x": [X, 1]}), _signature({"x": [X, 2]}), "args[0]['x'][1] was 1 and is 2"),
    (_signature(Example(X, 1.0)), _signature(Example(X, 2.0)), "args[0].weight was 1.0 and is 2.0"),
    (_signature(X), _signature(None), "args[0] was float32[2, 3] and is None"),
    (_signature(X), _signature(X, X), "newly passed: args[1]"),
    (_signature(X, a=1, b=2), _signature(X), "not passed any more: a, b"),
    (_signature(a=1, b=2), _signature(b=2, a=1), "the inputs were in the order a, b and are in the order b, a"),
    (_signature({"a": 1, "b": 2}), _signature({"b": 2, "a": 1}), "the keys of args[0] were [a, b] and are [b, a]"),
    (_signature(x=[X]), _signature(x=[X, X, X]), "x had 1 entry and has 3 entries"),
    (_signature(x=[X, {"y": (1,)}]), _signature(x=[X, {"y": [1]}]), "x[1]['y'] was a tuple and is a list"),
    (
        _signature(1, 2, 3, 4, 5),
        _signature(6, 7, 8, 9, 5),
        "args[0] was 1 and is 6, args[1] was 2 and is 7, args[2] was 3 and is 8, 1 more inputs changed",
    ),
    (_signature(X), _signature(X, grad=False), "gradients are off"),
]


@pytest.mark.parametrize(("before", "now", "text"), REASONS)
def test_a_reason_names_the_input_with_both_values(before: Signature, now: Signature, text: str) -> None:
    assert reason_of(now, [before]).text == text


def test_a_reason_compares_with_the_nearest_program() -> None:
    known = [_signature(X, step=5, grad=False), _signature(X, step=1), _signature(X, X, step=2)]
    assert reason_of(_signature(X, step=2), known).text == "step was 1 and is 2"


GUARDS = [
    ("args[1] == 1", "args[1] was 1 and is 2"),
    ("step == 1", ""),
    ("module.p == 0.2", ""),
    (
        "tensor 'args[0]' size mismatch at index 0. expected 2, actual 3",
        "args[0] was float32[2, 3] and is float32[3, 3]",
    ),
    ("args[10] == 1", ""),
    ("tag == 'a'; args[0].requires_grad", "args[0] was float32[2, 3] and is float32[3, 3], tag was 'a' and is 'b'"),
]


@pytest.mark.parametrize(("guard", "text"), GUARDS)
def test_a_reason_names_the_inputs_of_a_guard(guard: str, text: str) -> None:
    before, now = _signature(X, 1, tag="a"), _signature(torch.ones(3, 3), 2, tag="b")
    found = reason_at(guard, now, before)
    assert (found.text if found is not None else "") == text


def test_a_reason_names_the_guarded_structure() -> None:
    before, now = _signature(X), _signature(X, tag="b")
    found = reason_at("len(kwargs) == 0", now, before)
    assert found is not None
    assert found.text == "newly passed: tag"
    assert reason_at("module.p == 0.2", now, before) is None


# --- logs --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_log_warns_from_the_fourth_recapture_on(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    ours = graphshard.compile(Net(), mesh, backend="eager")
    with caplog.at_level(logging.INFO, "graphshard.module.installed_programs"):
        for step in range(7):
            ours(_x(0), tag=str(step))
    expected = [f"capture {step} of Net: tag was '{step - 1}' and is '{step}'" for step in range(7)]
    expected[0] = "capture 0 of Net: first call"
    found = [record.getMessage() for record in caplog.records]
    assert all(map(str.startswith, found, expected))
    remedy = "Leave the input out if forward does not need it, or give it a few values."
    assert [remedy in text for text in found] == [step == 4 for step in range(7)]  # reported once
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 4 + [logging.WARNING] * 3


@pytest.mark.slow
def test_the_limit_is_reported_once(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    ours = graphshard.compile(Net(), mesh, backend="eager", max_captures=2)
    for step in range(8):
        ours(_x(0), tag=str(step % 4))
    (text,) = (r.getMessage() for r in caplog.records if "max_captures" in r.getMessage())
    assert re.search(r"The last capture: tag was '1' and is '2'.*\. Leave the input out", text)
