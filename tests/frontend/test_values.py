"""Forwards that read values of tensors return plain torch's results for any values.

If values decide, a program has branches, the module is split, or Python runs it; the results are the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.errors import CaptureError
from graphshard.torch_compat.torch_ops import pytree

X = torch.ones(3, 4)


class Asking(nn.Module):
    """A model whose forward is a function."""

    def __init__(self, function: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.function = function
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, number: Tensor) -> Any:
        return self.function(self, self.linear(x), number)


def _relu_if_any(net: Any, y: Tensor, number: Tensor) -> Tensor:
    return y.relu() if number.any() else y


def _relu_if_more_than_3(net: Any, y: Tensor, number: Tensor) -> Any:
    return y.relu() if number > 3 else y, number.item()


def _asks_of_a_float(net: Any, y: Tensor, number: Tensor) -> Tensor:
    """Ask for properties that symbols always have, and that NaN, infinity and rounded numbers lack."""
    v = number.item()
    sums = (v + 0.1) + 0.2 == v + (0.1 + 0.2)
    truths = (v != v, v == v, v - v == 0, v * 0 == 0, v < float("inf"), 0 < v < 2, sums)
    return y * sum(2**i for i, truth in enumerate(truths) if truth)


def _asks_of_integers(net: Any, y: Tensor, number: Tensor) -> Tensor:
    v = int(number)
    truths = (abs(v) > 1, v / 2 == 0.5, v % 3 == 2, v * 0.1 * 3 > 0.9, 6 // v > 1)
    return y * sum(2**i for i, truth in enumerate(truths) if truth)


def _asks_what_it_is(net: Any, y: Tensor, number: Tensor) -> Tensor:
    return y * (2 if isinstance(number.item(), int) else 3) * (5 if type(number.item()) is float else 7)


def _last_number(net: Any, y: Tensor, number: Tensor) -> Tensor:
    last, net.last = getattr(net, "last", None), number.item()
    return y.relu() if last == net.last else y


def _unless_nan(net: Any, y: Tensor, number: Tensor) -> Tensor:
    total = (y.sum() * number).item()
    return y if total == total else -y


def _after_norm(net: Any, y: Tensor, number: Tensor) -> Tensor:
    """Read the statistics of batch norm after its undeclared write."""
    y = net.norm(y)
    return y if net.norm.running_mean[0] > 0 else -y


def _written(net: Any, y: Tensor, number: Tensor) -> Tensor:
    total = number.clone()
    total.view(-1)[0] = y.sum()
    return y if total.sum() > 0 else -y


def _computed(net: Any, y: Tensor, number: Tensor) -> Tensor:
    """Compute in place on a copy of the input and on a buffer, and pass an argument twice."""
    net.count += 1
    total = number.clone()
    total.add_(total).sub_(net.count)
    values, places = total.sort()
    return y.relu() if places[0] == 1 and values[1] == 3 else y


def _detection_loss(net: Any, y: Tensor, number: Tensor) -> Tensor:
    """Compute no box loss without targets: a size and a number decide, which differ between calls."""
    places = (number > 0).nonzero()[:, 0]
    count = (number > 2).sum().item()
    loss = y.sum() * 0 if places.numel() == 0 else y[places].square().mean()
    return loss / count if count > 0 else loss


def _written_array(net: Any, y: Tensor, number: Tensor) -> Tensor:
    array = number.numpy()
    array[0] = 5
    return y * number


def _kept(net: Any, y: Tensor, number: Tensor) -> Any:
    net.message = str((y.sum() * number).item())
    return y


def _text_of_a_sign(net: Any, y: Tensor, number: Tensor) -> Any:
    value = float(number)
    return str(value), y * [1, 2][int(value > 0)]


def _of_places(net: Any, y: Tensor, number: Tensor) -> Tensor:
    return y.sum() * sum(place for place in number.nonzero()[:, 0])


FORWARDS: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], list[Any]]] = {
    "any": (_relu_if_any, [[1], [0], [1], [0], [5]]),
    "an index": (lambda net, y, number: y[int(number)], [0, 1, 2, 1, 0]),
    "computed with": (lambda net, y, number: (y, number.item()), [1, 2, 3]),
    "decides, and is returned": (_relu_if_more_than_3, [1, 4, 3, 5]),
    "floats": (_asks_of_a_float, [1.0, float("nan"), float("inf"), 0.3, 1.0]),
    "integers": (_asks_of_integers, [1, -2, 2, 3, 1]),
    "absolute": (lambda net, y, number: y.relu() if abs(number.item()) > 1 else y, [1, -2, 2, -1, 0]),
    "classes": (_asks_what_it_is, [1, 2, 0.5, 1]),
    "is True": (lambda net, y, number: y.relu() if number.any().item() is True else y, [1, 0, 1]),
    "equal of several sizes": (
        lambda net, y, number: y.relu() if torch.equal(number[number > 0], torch.tensor([5, 5])) else y,
        [[5, 0, 0], [5, 5, 0], [5, 5, 5], [0, 0, 0]],
    ),
    "the last number": (_last_number, [1, 2, 2, 1, 1]),
    "a parameter": (lambda net, y, number: y if net.linear.weight.sum() > number else -y, [9, -9]),
    "computed from a parameter": (lambda net, y, number: y if (y.sum() + number).sum() > 0 else -y, [9, -9]),
    "nan of a parameter": (_unless_nan, [1.0, float("nan"), 1.0]),
    "random": (lambda net, y, number: y if torch.rand_like(number).sum() > 0.5 else -y, [1.0] * 6),
    "statistics after batch norm": (_after_norm, [1.0, 2.0]),
    "a view was written": (_written, [[1.0], [2.0]]),
    "written before": (_computed, [[2, 1], [2, 3], [3, 1], [2, 1]]),
    "sizes and numbers": (_detection_loss, [[1, 3, 3], [0, 0, 0], [5, 3, 3], [1, 0, 3], [1, 1, 0], [2, 2, 2]]),
    "squeezed": (
        lambda net, y, number: (y[number.nonzero().squeeze()] * 2).squeeze() + 1,
        [[1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 1]],
    ),
    "many places": (_of_places, [[1.0] * 3, [1.0] * 30, [1.0] * 5000]),
    "an array is written": (_written_array, [[1.0], [2.0]]),
    "only the device": (
        lambda net, y, number: y.relu() if torch.linspace(0, 1, 4).sum() > 1 else y,
        [1, 2],
    ),
    "a text": (lambda net, y, number: (y, f"{(y.sum() * number).item():.3f}"), [1.0, 2.0]),
    "a key": (lambda net, y, number: {f"{number.item():.1f}": y}, [0.5, 2.25]),
    "a kept text": (_kept, [1.0, 2.0]),
    "a text decides": (lambda net, y, number: y.relu() if str(number.item()) in {"1": None} else y, [1, 2, 1]),
    "text of a sign": (_text_of_a_sign, [0.0, -0.0, 0.0, 2.0, 2.0]),
}


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.quick_cases(
    "any",
    "an index",
    "computed with",
    "decides, and is returned",
    "floats",
    "absolute",
    "classes",
    "is True",
    "equal of several sizes",
    "a parameter",
    "computed from a parameter",
    "nan of a parameter",
    "random",
    "a view was written",
    "sizes and numbers",
    "many places",
    "an array is written",
    "only the device",
    "a text",
    "a key",
    "a kept text",
    "a text decides",
)
def test_results_gradients_and_attributes(mesh: DeviceMesh, name: str) -> None:
    forward, values = FORWARDS[name]
    nets = graphshard.compile(Asking(forward), mesh, backend="eager"), Asking(forward)
    x = torch.randn(3, 4)
    for index, value in enumerate(values):
        found = []
        for net in nets:
            torch.manual_seed(index)
            number = torch.tensor(value)
            leaves, structure = pytree.tree_flatten(net(x, number))
            sum(leaf.sum() for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad).backward()
            grads = [full for param in net.parameters() if (full := _full(param.grad)) is not None]
            found.append([structure, *leaves, number, *grads, *net.buffers(), getattr(net, "message", "")])
            net.zero_grad()
        for ours, expected in zip(*found, strict=True):
            if isinstance(expected, Tensor):
                assert torch.equal(ours.nan_to_num(7.0), expected.nan_to_num(7.0)), value
            else:
                assert repr(ours) == repr(expected), value


def _full(grad: Any) -> Tensor | None:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


@pytest.mark.slow
def test_inductor(mesh: DeviceMesh) -> None:
    model, plain = graphshard.compile(Asking(_relu_if_any), mesh), Asking(_relu_if_any)
    for value in (1, 0, 1):
        torch.testing.assert_close(model(X, torch.tensor([value])), plain(X, torch.tensor([value])))


def test_computed_numbers_share_a_program(mesh: DeviceMesh) -> None:
    model = graphshard.compile(Asking(lambda net, y, number: (y, number.item())), mesh, backend="eager")
    assert [model(X, torch.tensor(value))[1] for value in (1, 2, 3)] == [1, 2, 3]
    assert len(graphshard.programs(model)) == 1


def test_printed_as_in_eager_mode(mesh: DeviceMesh, capsys: pytest.CaptureFixture[str]) -> None:
    def forward(net: Any, y: Tensor, number: Tensor) -> Tensor:
        print(f"number {number.item()}")
        return y

    model = graphshard.compile(Asking(forward), mesh, backend="eager")
    for value in (1, 2, 3):
        model(X, torch.tensor(value))
    assert capsys.readouterr().out == "number 1\nnumber 2\nnumber 3\n"


def test_forward_raises_for_values(mesh: DeviceMesh) -> None:
    def forward(net: Any, y: Tensor, number: Tensor) -> Tensor:
        total = (y * number).sum().item()
        if total != total:
            raise ValueError("nan")
        return y

    model = graphshard.compile(Asking(forward), mesh, backend="eager")
    assert torch.equal(model(X, torch.ones(1)), Asking(forward)(X, torch.ones(1)))
    with pytest.raises(ValueError, match="nan"):
        model(X, torch.tensor([float("nan")]))


def test_an_operator_raises_for_values(mesh: DeviceMesh) -> None:
    def forward(net: Any, y: Tensor, number: Tensor) -> Tensor:
        return y.relu() if torch.arange(3)[number].sum() > 1 else y

    model = graphshard.compile(Asking(forward), mesh, backend="eager")
    model(X, torch.tensor([1]))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        model(X, torch.tensor([7]))
    assert torch.equal(model(X, torch.tensor([2])), Asking(forward)(X, torch.tensor([2])))


def test_rejects_fake_values(mesh: DeviceMesh) -> None:
    with pytest.raises(CaptureError, match=r"(?s)cannot capture Asking\.forward at .*number\.any\(\)"):
        graphshard.explain(Asking(_relu_if_any), (1,), example_inputs=(X, torch.ones(1, device="meta")))


def test_a_file_cannot_hold_a_branch_on_a_value(tmp_path: Path) -> None:
    """`compile` splits such a module; a file holds whole programs, and the error names the line."""
    with pytest.raises(CaptureError, match=r"(?s)cannot capture Asking\.forward at .*number\.any\(\)"):
        graphshard.export(
            Asking(_relu_if_any), (1,), tmp_path / "net.gshard", example_inputs=(X, torch.tensor([1])), backend="eager"
        )


class _Adaptive(nn.Module):
    """torch's loss skips clusters without targets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(4, 12, [4, 8], div_value=2.0)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(x, target).loss


def test_the_adaptive_softmax_of_torch(mesh: DeviceMesh) -> None:
    model, plain = graphshard.compile(_Adaptive(), mesh, backend="eager"), _Adaptive()
    for target in ([0, 5, 11], [1, 6, 9], [0, 0, 7], [4, 2, 1], [2, 3, 0], [8, 9, 1]):
        ours, expected = (net(X * len(target), torch.tensor(target)) for net in (model, plain))
        assert torch.equal(ours, expected)
        ours.backward()
        expected.backward()
    for name, param in plain.named_parameters():
        assert torch.equal(model.get_parameter(name).grad.full_tensor(), param.grad), name


def test_values_with_dynamic_sizes(mesh: DeviceMesh) -> None:
    """One program for all sizes, for each value."""
    model, plain = graphshard.compile(Asking(_relu_if_any), mesh, backend="eager"), Asking(_relu_if_any)
    for rows, value in ((3, 1), (4, 1), (5, 0), (6, 1), (7, 0)):
        x, number = torch.randn(rows, 4), torch.full((rows,), value)
        for tensor in (x, number):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        assert torch.equal(model(x, number), plain(x, number))


def test_submodules_and_copies_read_their_values(mesh: DeviceMesh) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Asking(lambda net, y, number: y.relu() if net.count else y)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x)

    model = graphshard.compile(Outer(), mesh, backend="eager")
    twin, plain = copy.deepcopy(model), Outer()
    for other, count in ((model, 0), (twin, 1), (model, 1)):
        other.inner.count.fill_(count)
        plain.inner.count.fill_(count)
        assert torch.equal(other(X), plain(X))
        assert torch.equal(other.inner(X, X), plain(X))
