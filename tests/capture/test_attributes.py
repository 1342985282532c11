"""What a forward reads and leaves on modules, as a program says it, and what it may not leave there."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.torch_version import TorchVersion

import graphshard
from graphshard.ir.errors import CaptureError
from graphshard.ir.state import Computed, Counted, ModuleState, Number, Place
from graphshard.module.guard import Guard
from tests.helpers import captured
from tests.ranks import FakeWorld

X = torch.ones(4)
STEP = Place("", (("attribute", "step"),))


class _Net(nn.Module):
    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x * self.w)


def _counts(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.step += 1
    return x if net.step % 10 else x * 2


def test_a_counter_is_followed_and_asked_only_for_the_outcome() -> None:
    model = _Net(_counts, step=4)
    state = captured(model, (X,)).state
    following = Computed("add", (Number(STEP), 1))
    (write,) = state.writes
    (condition,) = state.conditions
    assert (write.place, write.terms) == (STEP, (Counted(following),))
    assert (condition.expression, condition.value) == (Computed("ne", (Computed("mod", (following, 10)), 0)), True)
    assert condition.line.startswith(f"{__file__}:")
    assert model.step == 4


def test_a_number_that_operators_are_given_is_an_input() -> None:
    def function(net: Any, x: torch.Tensor) -> torch.Tensor:
        net.step += 1
        return x * net.step + net.step / 8

    program = captured(_Net(function, step=4), (X,))
    step = Computed("add", (Number(STEP), 1))
    assert program.state.numbers == (step, Computed("truediv", (step, 8)))
    assert program.state.conditions == ()
    assert [str(slot) for slot in program.phases["joint"].inputs if slot.kind == "input"] == [
        "input:0",
        "input:1",
        "input:2",
    ]


@pytest.mark.parametrize(
    "compute",
    [
        pytest.param(
            lambda x, step: x**step,  # its derivative asks whether the step is 0
            marks=pytest.mark.skipif(TorchVersion(torch.__version__) >= "2.14", reason="it does not ask any more"),
        ),
        lambda x, step: x * float(step),
        lambda x, step: x * sum(range(step)),
    ],
)
def test_a_number_that_must_be_known_is_fixed(compute: Callable[..., torch.Tensor]) -> None:
    def function(net: Any, x: torch.Tensor) -> torch.Tensor:
        net.step += 1
        return compute(x, net.step)

    state = captured(_Net(function, step=4), (X,)).state
    assert state.numbers == ()
    (condition,) = state.conditions or [None]
    if condition is None:  # forward could not run with what follows the number
        assert [read.text for read in state.reads if read.place == STEP] == ["4"]
    else:
        assert (condition.expression, condition.value) == (Computed("add", (Number(STEP), 1)), 5)


def test_a_list_that_is_looked_at_is_fixed() -> None:
    def function(net: Any, x: torch.Tensor) -> torch.Tensor:
        net.step.append(len(net.step))
        return x

    state = captured(_Net(function, step=[1]), (X,)).state
    assert [read.text for read in state.reads if read.place == STEP] == ["[1]"]
    assert [write.kind for write in state.writes] == ["extend"]


def _object(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.found = re.compile("a").finditer("a")
    return x


def _parameter(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.kept = [net.w]
    return x


def _module(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.late = nn.Identity()
    return net.late(x)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (_object, "what it sets found to is a callable_iterator. Keep tensors and numbers there"),
        (_parameter, "what it sets kept to is a parameter"),
        (_module, "what it sets late to is a parameter or a module. Make and exchange it outside"),
    ],
)
def test_what_cannot_be_made_again_is_an_error_with_its_line(function: Any, what: str) -> None:
    model = _Net(function)
    line = f"_Net.forward at {__file__}:{function.__code__.co_firstlineno + 1}: {what}"
    with pytest.raises(CaptureError, match=re.escape(f"graphshard cannot capture {line}")):
        captured(model, (X,))
    assert not {"found", "kept", "late"} & {*vars(model), *model._parameters, *model._modules}


class _Hooks(nn.Sequential):
    """Registers a hook that keeps what it sees in a list of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[Any] = []
        self[0].register_forward_hook(lambda module, args, out: seen.append(out))
        return self[0](x)


def test_a_hook_that_keeps_what_forward_made_is_an_error_that_names_it() -> None:
    """Each call would give it another list, or the traced one for ever."""
    model = _Hooks(nn.Linear(4, 4))
    text = r"registers a hook of 0, _Hooks\.forward.*<lambda>, that keeps seen, which forward has made\. Register"
    with pytest.raises(CaptureError, match=text):
        captured(model, (X,))
    assert not model[0]._forward_hooks


class _Converted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super(_Converted, self.to(torch.float32)).forward(x)


def test_a_conversion_to_what_a_module_is_does_nothing() -> None:
    """It goes through all gradients of parameters, which forward may not ask for."""
    program = captured(_Converted(4, 4), (X,), world_size=1)
    assert program.differentiated == {"weight", "bias"}
    assert program.state.writes == ()


def test_nothing_of_a_class_is_left_exchanged() -> None:
    before = dict(vars(nn.Module))
    captured(_Net(_counts, step=1), (X,))
    assert dict(vars(nn.Module)) == before


@pytest.mark.parametrize("parametrization", [weight_norm, spectral_norm, orthogonal])
def test_tensors_that_a_property_computes_are_no_attributes(parametrization: Callable[[nn.Module], nn.Module]) -> None:
    """A parametrized weight is another tensor at each reading; taken for state, it would be learned anew for ever."""
    program = captured(parametrization(nn.Linear(4, 4)), (torch.ones(2, 4),), world_size=1)
    assert not program.state.inputs
    assert program.differentiated >= {"bias"}


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_what_recurrent_modules_keep_of_their_parameters_is_no_state(cls: type[nn.RNNBase]) -> None:
    model = cls(4, 5)
    kept = list(model._flat_weights)
    program = captured(model, (torch.ones(2, 4),), world_size=1)
    assert program.state.writes == ()
    assert program.differentiated == set(dict(model.named_parameters()))
    assert all(a is b for a, b in zip(model._flat_weights, kept, strict=True))


def test_a_tensor_that_nothing_differentiates_through_is_not_connected(fake_world: FakeWorld) -> None:
    """Its graph is freed after the step that made it; backward through it a second time would be an error."""

    def function(net: Any, x: torch.Tensor) -> torch.Tensor:
        y = x if net.last is None else x + net.last.detach()
        net.last = y * 2
        return y

    fake_world(1)
    plain = _Net(function, last=None)
    ours = graphshard.compile(copy.deepcopy(plain), init_device_mesh("cpu", (1,)), backend="eager")
    for _ in range(3):
        for model in (ours, plain):
            model(X).sum().backward()
    assert torch.equal(ours.w.grad.full_tensor(), plain.w.grad)
    assert torch.equal(ours.last, plain.last)
    assert ours.last.requires_grad


def test_a_program_of_another_model_is_not_run() -> None:
    """What was just captured must fit the model; that it does not is said, rather than failing at the first look."""
    with pytest.raises(CaptureError, match=r"Net is another model after its capture than before: .*gone"):
        Guard(ModuleState(modules=(("gone", "Linear"),)), nn.ReLU(), "Net")
