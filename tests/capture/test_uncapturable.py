"""What cannot be captured: errors that name the line and the remedy."""

from __future__ import annotations

import functools
import inspect
import io
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import is_grad_enabled, nn
from torch._higher_order_ops import while_loop
from torch.utils.checkpoint import checkpoint

from graphshard.ir.errors import CaptureError
from tests.helpers import Scale, captured, step, through

X = torch.ones(4)


class _Branch(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.w
        if y.sum() > 0:
            return y
        return -y


class _Item(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = max(self.w.sum().item(), 1.0)
        return x * self.w * scale


class _Int(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w if int(self.w.sum()) > 3 else x


class _Rows(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.w
        for row in torch.nonzero(y):
            y = y.index_fill(0, row, 1.0)
        return y


class _Size(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.w
        return torch.eye(int(y.sum())) @ y


class _Object(Scale):
    def forward(self, x: torch.Tensor) -> Any:
        y = x * self.w
        return y, lambda: y


class _While(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return while_loop(lambda v: v.sum() < 3, lambda v: (v + 1,), (x * self.w,))[0]


class _Shapes(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.w) @ torch.ones(5, 5)


class _Write(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.w.mul_(2)
        return x * self.w


class _WriteToData(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.w.data[1:].mul_(2)
        return x * self.w


# Attributes of objects that are globals are not followed, as those of modules are.
@functools.cache
def foreign() -> nn.Parameter:
    """What nobody can follow."""
    return nn.Parameter(torch.ones(4))


foreign()  # it is there before anything is traced


class _Foreign(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w * foreign()


def test_no_backward_reaches_a_checkpointed_region() -> None:
    """Autograd saves its results in their own graph, which keeps nothing alive after the trace."""

    class Model(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            leaf = (x * 2).requires_grad_()
            (grad,) = torch.autograd.grad(leaf.tanh().sum(), leaf, create_graph=True)
            inside = checkpoint(torch.tanh, leaf + grad, use_reentrant=False)
            return (inside * self.w).sum()

    model = Model(4)
    (results,) = step(through(captured(model, (X,), world_size=1), "partition"), model, [(X,)])
    model(X).backward()
    assert torch.equal(results["grad:w"], model.w.grad)


@functools.cache
def kept() -> list[torch.Tensor]:
    """A list that nobody can follow."""
    return []


class _Keep(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept().append(x * self.w)
        return x * self.w


class _KeepGradient(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.w
        y.register_hook(lambda grad: kept().append(grad))
        return y * 2


class _Backward(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * self.w).sum()
        y.backward(retain_graph=True)
        return y


class _Accumulated(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w if self.w.grad is None else x


class _Sparse(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.embedding(x.long(), self.w[:, None], sparse=True)


class _Asks(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():  # outside of the checkpoint there is one answer
            return x
        return checkpoint(self.region, x * self.w, use_reentrant=True)

    def region(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.is_grad_enabled() else x


class _AsksByName(_Asks):
    def region(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3 if is_grad_enabled() else x


class _Convert(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.to(torch.bfloat16)
        return x * self.w


class _ListOfSizes(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(4, 4).bool()
        rows[tuple(x.long()), tuple(x.long())] = True
        return x * self.w * rows.sum()


class _Generator(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w * torch.rand(4, generator=torch.Generator())


UNCAPTURABLE = [
    (_Branch, "if y.sum() > 0:", "The condition depends on the values of a tensor. Use torch.where"),
    (
        _Item,
        "scale = max(self.w.sum().item(), 1.0)",
        "A tensor's value becomes a Python number. Keep it a tensor",
    ),
    (_Int, "return x * self.w if int(self.w.sum()) > 3 else x", "A tensor's value becomes a Python number."),
    (_Rows, "for row in torch.nonzero(y):", "The number of rounds depends on the values of a tensor."),
    (_Size, "return torch.eye(int(y.sum())) @ y", "A size that depends on the values of a tensor must be known here."),
    (
        _While,
        "return while_loop(lambda v: v.sum() < 3, lambda v: (v + 1,), (x * self.w,))[0]",
        "This operator takes functions, which graphshard cannot schedule yet.",
    ),
    (
        _Generator,
        "return x * self.w * torch.rand(4, generator=torch.Generator())",
        "A program draws from torch's default generator only.",
    ),
    (_ListOfSizes, "rows[tuple(x.long()), tuple(x.long())] = True", "A tensor's value becomes a Python number."),
    (_Shapes, "return (x * self.w) @ torch.ones(5, 5)", "This line cannot be traced, or it fails for these inputs."),
]


UNCAPTURABLE_WITH_GRADIENTS = [
    (_Convert, "self.to(torch.bfloat16)", "Forward writes to a parameter."),
    (_Write, "self.w.mul_(2)", "Forward writes to a parameter. The full parameter exists during the call only"),
    (_WriteToData, "self.w.data[1:].mul_(2)", "Forward writes to a parameter."),
    (
        _Foreign,
        "return x * self.w * foreign()",
        "Forward uses a tensor that requires a gradient and belongs",
    ),
    (_Sparse, "return F.embedding(x.long(), self.w[:, None], sparse=True)", "The gradient of this embedding would be"),
    (_Backward, "y.backward(retain_graph=True)", "Gradients of parameters are accumulated after the call."),
    (_Accumulated, "return x * self.w if self.w.grad is None else x", "Gradients of parameters are accumulated after"),
    (_Asks, "return x * 2 if torch.is_grad_enabled() else x", "A checkpoint with use_reentrant=True runs this twice:"),
    (_AsksByName, "return x * 3 if is_grad_enabled() else x", "A checkpoint with use_reentrant=True runs this twice:"),
    (_Keep, "kept().append(x * self.w)", "A tensor of this forward is kept outside of the modules after"),
    (
        _KeepGradient,
        "y.register_hook(lambda grad: kept().append(grad))",
        "A tensor of this forward is kept outside of the modules after the call.",
    ),
]


@pytest.mark.parametrize(
    ("cls", "line", "advice"),
    UNCAPTURABLE_WITH_GRADIENTS,
    ids=[cls.__name__ for cls, *_ in UNCAPTURABLE_WITH_GRADIENTS],
)
def test_an_error_where_a_program_would_differ(cls: type[nn.Module], line: str, advice: str) -> None:
    """What forward does to tensors that are not its own is never left out in silence."""
    with pytest.raises(CaptureError, match=_error(cls, line, advice)):
        captured(cls(4), (X,))
    assert torch.is_grad_enabled is is_grad_enabled
    kept().clear()


def test_torch_func_in_forward() -> None:
    """Its tensors are wrapped once more; they are no foreign ones."""

    class Model(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            slopes = torch.func.grad(lambda w: (x * w).pow(3).sum())(self.w)
            return torch.vmap(lambda row: row * self.w)(x[None] + slopes).sum()

    model = Model(4)
    (results,) = step(through(captured(model, (X,), world_size=1), "partition"), model, [(X,)])
    model(X).backward()
    assert torch.equal(results["grad:w"], model.w.grad)


def test_tensors_without_a_gradient_may_be_anybodys() -> None:
    """The program has them as constants."""

    class Model(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w * foreign().detach()

    (constant,) = captured(Model(4), (X,)).constants.values()
    assert constant.data_ptr() == foreign().data_ptr()


@pytest.mark.parametrize(("cls", "line", "advice"), UNCAPTURABLE, ids=[cls.__name__ for cls, *_ in UNCAPTURABLE])
def test_an_error_names_the_line(cls: type[nn.Module], line: str, advice: str) -> None:
    """File and number of the line, the line, and what to do about it."""
    with pytest.raises(CaptureError, match=_error(cls, line, advice)):
        captured(cls(4), (X,), grad=False)


def _error(cls: type[nn.Module], line: str, advice: str) -> str:
    """The beginning of the message for a line of a class, to be matched."""
    lines, start = inspect.getsourcelines(cls)
    number = next(i for i, text in enumerate(lines, start) if text.strip() == line)
    return re.escape(f"graphshard cannot capture {cls.__name__}.forward at {__file__}:{number}\n    {line}\n{advice}")


@pytest.mark.parametrize(("number", "text"), [(0, "first, and not again"), (1, "again, and not at first")])
def test_a_buffer_that_one_of_two_runs_writes(number: int, text: str) -> None:
    """A forward is run twice while it is captured; what an object that nobody can look into lets it write."""
    calls = io.StringIO()

    class Writes(Scale):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.write(".")
            if len(calls.getvalue()) == number + 1:
                self.total.add_(x)
            return x * self.w

    with pytest.raises(CaptureError, match=f"which writes buffer total when it runs {text}"):
        captured(Writes(), (X,))


def test_the_line_may_be_in_a_submodule() -> None:
    expected = r"(?s)cannot capture Sequential.forward at .*test_uncapturable.py.*if y.sum"
    with pytest.raises(CaptureError, match=expected):
        captured(nn.Sequential(nn.ReLU(), _Branch(4)), (X,))
