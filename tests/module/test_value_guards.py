"""Programs that hold while values of inputs and buffers are what they were: others, files, and what texts say."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.ir.errors import ArtifactError
from graphshard.module.value_checks import ValueChecks

X = torch.ones(3, 4)


class Asking(nn.Module):
    """Its forward is a function."""

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


def _as_index(net: Any, y: Tensor, number: Tensor) -> Tensor:
    return y[int(number)]


def test_each_value_has_a_program_and_the_log_says_why(mesh: DeviceMesh) -> None:
    model, plain = graphshard.compile(Asking(_relu_if_any), mesh, backend="eager"), Asking(_relu_if_any)
    for value in (1, 0, 1, 0, 5):
        assert torch.equal(model(X, torch.tensor([value])), plain(X, torch.tensor([value])))
    first, second = graphshard.programs(model)
    assert first.reason == "first call"
    assert re.fullmatch(
        rf"Asking: a value was True and is False \({re.escape(__file__)}:\d+: "
        r"return y\.relu\(\) if number\.any\(\) else y\)",
        second.reason,
    )


def test_inductor_makes_them_too(mesh: DeviceMesh) -> None:
    model, plain = graphshard.compile(Asking(_relu_if_any), mesh), Asking(_relu_if_any)
    for value in (1, 0, 1):
        torch.testing.assert_close(model(X, torch.tensor([value])), plain(X, torch.tensor([value])))


def test_a_value_that_is_another_at_each_call_meets_the_limit(mesh: DeviceMesh) -> None:
    model = graphshard.compile(Asking(_as_index), mesh, backend="eager", max_captures=2)
    model(X, torch.tensor(0))
    model(X, torch.tensor(1))
    with pytest.raises(graphshard.CaptureLimitError) as caught:
        model(X, torch.tensor(2))
    assert re.search(
        r"because of Asking: a value was 1 and is 2 \(.*return y\[int\(number\)\]\)\. Compute with tensors what "
        r"depends on values: torch\.where, a mask, index_copy or gather, or raise max_captures in graphshard\.compile"
        r"\.$",
        str(caught.value),
    )
    assert torch.equal(model(X, torch.tensor(1)), Asking(_as_index)(X, torch.tensor(1)))


def test_numbers_that_are_only_computed_with_need_no_program_of_their_own(mesh: DeviceMesh) -> None:
    """What is read is asked for only if there is no other way to trace the forward."""
    model = graphshard.compile(Asking(lambda net, y, number: (y, number.item())), mesh, backend="eager")
    assert [model(X, torch.tensor(value))[1] for value in (1, 2, 3)] == [1, 2, 3]
    (program,) = graphshard.programs(model)
    assert program.decided is None


def test_numbers_are_asked_for_only_where_deciding_is_not_enough(mesh: DeviceMesh) -> None:
    model = graphshard.compile(
        Asking(lambda net, y, number: (y.relu() if number > 3 else y, number.item())), mesh, backend="eager"
    )
    assert [model(X, torch.tensor(value))[1] for value in (1, 2, 3)] == [1, 2, 3]
    (program,) = graphshard.programs(model)
    assert program.decided is not None
    assert [guard.expected for guard in program.decided.guards] == ["False"]


def _asks_of_a_float(net: Any, y: Tensor, number: Tensor) -> Tensor:
    """Of a symbol all of this is known; of nan, infinity and rounded numbers it is not."""
    v = number.item()
    sums = (v + 0.1) + 0.2 == v + (0.1 + 0.2)
    truths = (v != v, v == v, v - v == 0, v * 0 == 0, v < float("inf"), 0 < v < 2, sums)
    return y * sum(2**i for i, truth in enumerate(truths) if truth)


def _absolute(net: Any, y: Tensor, number: Tensor) -> Tensor:
    return y.relu() if abs(number.item()) > 1 else y


def _asks_of_integers(net: Any, y: Tensor, number: Tensor) -> Tensor:
    v = int(number)
    truths = (abs(v) > 1, v / 2 == 0.5, v % 3 == 2, v * 0.1 * 3 > 0.9, 6 // v > 1)
    return y * sum(2**i for i, truth in enumerate(truths) if truth)


def _asks_what_it_is(net: Any, y: Tensor, number: Tensor) -> Tensor:
    return y * (2 if isinstance(number.item(), int) else 3) * (5 if type(number.item()) is float else 7)


def _is_true(net: Any, y: Tensor, number: Tensor) -> Tensor:
    return y.relu() if number.any().item() is True else y


def _equal_numbers(net: Any, y: Tensor, number: Tensor) -> Tensor:
    """There may be more or fewer than these."""
    return y.relu() if torch.equal(number[number > 0], torch.tensor([5, 5])) else y


ASKED: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], list[Any]]] = {
    "floats": (_asks_of_a_float, [1.0, float("nan"), float("inf"), 0.3, 1.0]),
    "integers": (_asks_of_integers, [1, -2, 2, 3, 1]),
    "absolute": (_absolute, [1, -2, 2, -1, 0]),
    "classes": (_asks_what_it_is, [1, 2, 0.5, 1]),
    "is True": (_is_true, [1, 0, 1]),
    "equal of several sizes": (_equal_numbers, [[5, 0, 0], [5, 5, 0], [5, 5, 5], [0, 0, 0]]),
}


@pytest.mark.parametrize("name", ASKED)
def test_numbers_are_those_of_python(mesh: DeviceMesh, name: str) -> None:
    forward, values = ASKED[name]
    model, plain = graphshard.compile(Asking(forward), mesh, backend="eager"), Asking(forward)
    for value in values:
        number = torch.tensor(value)
        assert torch.equal(model(X, number).nan_to_num(), plain(X, number).nan_to_num()), value


def test_numbers_beside_those_that_are_followed(mesh: DeviceMesh) -> None:
    """What forward sets at each call is followed, and compared with a number of the next."""

    def forward(net: Any, y: Tensor, number: Tensor) -> Tensor:
        last, net.last = getattr(net, "last", None), number.item()
        return y.relu() if last == net.last else y

    model, plain = graphshard.compile(Asking(forward), mesh, backend="eager"), Asking(forward)
    for value in (1, 2, 2, 1, 1):
        assert torch.equal(model(X, torch.tensor(value)), plain(X, torch.tensor(value)))


def test_a_guard_against_nan(mesh: DeviceMesh) -> None:
    """It is checked after the call, of a number that depends on parameters, too."""

    def forward(net: Any, y: Tensor, number: Tensor) -> Tensor:
        total = y.sum().item()
        if total != total:
            raise ValueError("nan")
        return y

    model = graphshard.compile(Asking(forward), mesh, backend="eager")
    assert torch.equal(model(X, X), Asking(forward)(X, X))
    with pytest.raises(graphshard.InputError, match=r"raises an exception for these inputs at .*if total != total"):
        model(X * float("nan"), X)


UNKNOWN: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "parameter": lambda net, y, number: y if net.linear.weight.sum() > 0 else -y,
    "computed from a parameter": lambda net, y, number: y if (y.sum() + number).sum() > 0 else -y,
    "nan of a parameter": lambda net, y, number: _unless_nan(y),
    "random": lambda net, y, number: y if torch.rand_like(number).sum() > 0.5 else -y,
    # It writes to its statistics without saying so.
    "statistics after batch norm": lambda net, y, number: _after_norm(net, y, number),
    "written by what a parameter made": lambda net, y, number: y if number.clone().add_(y.sum()) > 0 else -y,
    "a view was written": lambda net, y, number: y if _written(number, y).sum() > 0 else -y,
}


def _unless_nan(y: Tensor) -> Tensor:
    total = y.sum().item()
    return y if total == total else -y


def _after_norm(net: Any, y: Tensor, number: Tensor) -> Tensor:
    y = net.norm(y)
    return y if net.norm.running_mean[0] > 0 else -y


def _written(number: Tensor, y: Tensor) -> Tensor:
    copy = number.clone()
    copy.view(-1)[0] = y.sum()
    return copy


@pytest.mark.parametrize("name", UNKNOWN)
def test_values_that_depend_on_more_are_errors(mesh: DeviceMesh, name: str) -> None:
    model = graphshard.compile(Asking(UNKNOWN[name]), mesh, backend="eager")
    with pytest.raises(graphshard.CaptureError, match="condition depends on"):
        model(X, torch.ones(1))


def test_what_was_written_before_is_computed(mesh: DeviceMesh) -> None:
    """In place, to a copy of the input and to a buffer; an argument twice."""

    def forward(net: Any, y: Tensor, number: Tensor) -> Tensor:
        net.count += 1
        total = number.clone()
        total.add_(total).sub_(net.count)
        values, places = total.sort()
        return y.relu() if places[0] == 1 and values[1] == 3 else y

    model, plain = graphshard.compile(Asking(forward), mesh, backend="eager"), Asking(forward)
    for number in ([2, 1], [2, 3], [3, 1], [2, 1]):
        assert torch.equal(model(X, torch.tensor(number)), plain(X, torch.tensor(number)))
    assert len(graphshard.programs(model)) == 3  # the last call reads the second value and finds another


def test_what_cannot_be_computed_of_other_values_raises_what_forward_raises(mesh: DeviceMesh) -> None:
    def forward(net: Any, y: Tensor, number: Tensor) -> Tensor:
        return y.relu() if torch.arange(3)[number].sum() > 1 else y

    model = graphshard.compile(Asking(forward), mesh, backend="eager")
    model(X, torch.tensor([1]))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        model(X, torch.tensor([7]))
    assert torch.equal(model(X, torch.tensor([2])), Asking(forward)(X, torch.tensor([2])))


def test_without_values_it_is_an_error(mesh: DeviceMesh) -> None:
    with pytest.raises(graphshard.CaptureError, match="condition depends on the values of a tensor"):
        graphshard.explain(Asking(_relu_if_any), (1,), example_inputs=(X, torch.ones(1, device="meta")))


def test_programs_show_what_they_hold_for(mesh: DeviceMesh) -> None:
    model = graphshard.compile(Asking(_relu_if_any), mesh, backend="eager")
    model(X, torch.tensor([1]))
    (program,) = graphshard.programs(model)
    text = program.history[-1].text
    _, _, shown = text.partition("holds while:\n")
    assert "= input:1" in shown
    assert "any(%0)" in shown
    assert shown.rstrip().endswith("True")


# --- files -------------------------------------------------------------------------------------------------------


def _exported(folder: Path, *values: int) -> Path:
    calls = [graphshard.Call((X, torch.tensor([value]))) for value in values]
    model = Asking(_relu_if_any)
    return graphshard.export(model, (1,), folder / "net.gshard", calls=calls, backend="eager")


def test_a_file_has_a_program_for_each_value_that_calls_have(mesh: DeviceMesh, tmp_path: Path) -> None:
    plain = Asking(_relu_if_any)
    model = graphshard.load(_exported(tmp_path, 1, 0), Asking(_relu_if_any), mesh)
    for value in (0, 1, 2):
        assert torch.equal(model(X, torch.tensor([value])), plain(X, torch.tensor([value])))


def test_a_file_asks_for_conditions_on_sizes(mesh: DeviceMesh, tmp_path: Path) -> None:
    calls = [graphshard.Call((X, torch.tensor(number))) for number in ([1, 3, 3], [0, 0, 0])]
    path = graphshard.export(Asking(_detection_loss), (1,), tmp_path / "net.gshard", calls=calls, backend="eager")
    model, plain = graphshard.load(path, Asking(_detection_loss), mesh), Asking(_detection_loss)
    for number in ([3, 4, 0], [0, -1, 0], [5, 5, 5]):
        assert torch.equal(model(X, torch.tensor(number)), plain(X, torch.tensor(number)))
    with pytest.raises(ArtifactError, match=r"a value was True and is False \(.*count > 0"):
        model(X, torch.tensor([1, 1, 1]))


def test_a_file_without_the_value_says_so(mesh: DeviceMesh, tmp_path: Path) -> None:
    model = graphshard.load(_exported(tmp_path, 1), Asking(_relu_if_any), mesh)
    with pytest.raises(ArtifactError, match=r"a value was True and is False \(.*number\.any.*Export it with calls="):
        model(X, torch.tensor([0]))


def _detection_loss(net: Any, y: Tensor, number: Tensor) -> Tensor:
    """Without targets there is no loss of boxes: a size decides, and a number, which are not the same at two calls."""
    places = (number > 0).nonzero()[:, 0]
    count = (number > 2).sum().item()
    loss = y.sum() * 0 if places.numel() == 0 else y[places].square().mean()
    return loss / count if count > 0 else loss


def test_conditions_on_sizes_and_numbers_have_two_programs(mesh: DeviceMesh) -> None:
    model, plain = graphshard.compile(Asking(_detection_loss), mesh, backend="eager"), Asking(_detection_loss)
    for number in ([1, 3, 3], [0, 0, 0], [5, 3, 3], [1, 0, 3], [1, 1, 0], [2, 2, 2]):
        assert torch.equal(model(X, torch.tensor(number)), plain(X, torch.tensor(number)))
    found = [[guard.expected for guard in program.decided.guards] for program in graphshard.programs(model)]
    assert found == [["False", "True"], ["True", "False"], ["False", "False"]]


def _squeezed(net: Any, y: Tensor, number: Tensor) -> Tensor:
    """With one place there is no dim left."""
    return (y[number.nonzero().squeeze()] * 2).squeeze() + 1


def test_squeezing_what_may_be_one(mesh: DeviceMesh) -> None:
    model, plain = graphshard.compile(Asking(_squeezed), mesh, backend="eager"), Asking(_squeezed)
    for number in ([1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 1]):
        ours, expected = model(X, torch.tensor(number)), plain(X, torch.tensor(number))
        assert torch.equal(ours, expected)
        ours.sum().backward()
        expected.sum().backward()
    assert torch.equal(model.linear.weight.grad.full_tensor(), plain.linear.weight.grad)
    assert len(graphshard.programs(model)) == 3  # of none, one, and several


class _Adaptive(nn.Module):
    """Torch's loss skips clusters that no target is in."""

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
    assert len(graphshard.programs(model)) == 4


def test_many_numbers_are_no_constants(mesh: DeviceMesh) -> None:
    """Of a mask of thousands of elements the places may not become a part of the program."""

    def forward(net: Any, y: Tensor, number: Tensor) -> Tensor:
        return y.sum() * sum(place for place in number.nonzero()[:, 0])

    model = graphshard.compile(Asking(forward), mesh, backend="eager")
    assert torch.equal(model(X, torch.ones(30)), Asking(forward)(X, torch.ones(30)))
    with pytest.raises(graphshard.CaptureError, match="number of rounds depends on the values of a tensor"):
        model(X, torch.ones(5000))


def test_arrays_are_only_read(mesh: DeviceMesh) -> None:
    """What is written to one would not be in the tensor, as it is in eager mode."""

    def forward(net: Any, y: Tensor, number: Tensor) -> Any:
        array = number.numpy()
        array[0] = 5
        return y * number

    number = torch.ones(1)
    model = graphshard.compile(Asking(forward), mesh, backend="eager")
    with pytest.raises(graphshard.CaptureError, match=r"array\[0\] = 5\n[^\n]*\n.*read-only"):
        model(X, number)
    assert number.item() == 1


def test_values_beside_dynamic_sizes(mesh: DeviceMesh) -> None:
    """One program for all sizes, for each value."""
    model, plain = graphshard.compile(Asking(_relu_if_any), mesh, backend="eager"), Asking(_relu_if_any)
    for rows, value in ((3, 1), (4, 1), (5, 0), (6, 1), (7, 0)):
        x, number = torch.randn(rows, 4), torch.full((rows,), value)
        for tensor in (x, number):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        assert torch.equal(model(x, number), plain(x, number))
    assert len(graphshard.programs(model)) == 2


def test_submodules_and_copies_ask_for_their_own(mesh: DeviceMesh) -> None:
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


def test_what_only_the_device_determines_stays_wrong(mesh: DeviceMesh) -> None:
    """It is computed once, and a program that does not fit there fits at no later call."""

    def forward(net: Any, y: Tensor, number: Tensor) -> Tensor:
        return y.relu() if torch.linspace(0, 1, 4).sum() > 1 else y

    model = graphshard.compile(Asking(forward), mesh, backend="eager")
    model(X, torch.ones(1))
    (program,) = graphshard.programs(model)
    decided = program.decided
    assert decided is not None
    assert (decided.inputs, decided.buffers) == ((), ())
    assert [ValueChecks(decided, model, "Net").change(()) for _ in range(2)] == ["", ""]
    elsewhere = replace(decided, guards=(replace(decided.guards[0], expected="False"),))
    checks = ValueChecks(elsewhere, model, "Net")
    assert all("a value was False and is True" in checks.change(()) for _ in range(2))
