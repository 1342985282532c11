"""From a module's forward to a joint graph whose inputs and outputs have a meaning."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import CausalLMOutput

from graphshard.ir.errors import CaptureError
from graphshard.ir.graph import fake
from graphshard.ir.printer import print_program
from graphshard.ir.program import Program, Slot
from tests.helpers import Blocks, Scale, Tied, calls, captured, result, step, through

X = torch.ones(4)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)


class _Function(nn.Module):
    """A module with a parameter `w` of ones, whose forward is `function(self, *args, **kwargs)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def _captured(function: Callable[..., Any], *args: Any, grad: bool = True, **kwargs: Any) -> Program:
    return captured(_Function(function), args or (X,), kwargs, world_size=1, grad=grad)


def _labels(program: Program) -> tuple[list[str], list[str]]:
    (phase,) = program.phases.values()
    return list(map(str, phase.inputs)), list(map(str, phase.outputs))


def test_joint_graph() -> None:
    program = captured(Blocks(1), (torch.ones(3, 4),))
    assert_expected_inline(
        print_program(program),
        """\
joint:
  %0: f32[4, 4] = param:layers.0.weight
  %1: f32[3, 4] = input:0
  %2: f32[] = tangent:0  # (backward)
  %3: f32[4, 4] = t(%0)  # layers.0
  %4: f32[3, 4] = mm(%1, %3)  # layers.0
  %5: f32[3, 4] = relu(%4)
  %6: f32[3, 4] = detach(%5)
  %7: f32[] = sum(%5)
  %8: f32[3, 4] = expand(%2, [3, 4])  # (backward)
  %9: f32[3, 4] = detach(%6)  # (backward)
  %10: f32[3, 4] = threshold_backward(%8, %9, 0)  # (backward)
  %11: f32[4, 3] = t(%10)  # layers.0 (backward)
  %12: f32[4, 4] = mm(%11, %1)  # layers.0 (backward)
  %13: f32[4, 4] = t(%12)  # layers.0 (backward)
  %14: f32[4, 4] = t(%13)  # layers.0 (backward)
  return %7 as output:0
  return %14 as grad:layers.0.weight
""",
    )
    assert program.tangents == ("0",)


def test_without_gradients_there_is_one_phase() -> None:
    program = captured(Blocks(1), (torch.ones(3, 4),), grad=False)
    assert list(program.phases) == ["forward"]
    assert _labels(program) == (["param:layers.0.weight", "input:0"], ["output:0"])
    assert program.backward is None
    assert program.tangents == ()


@pytest.mark.parametrize("what", ["frozen", "integers"])
def test_nothing_to_differentiate_is_one_phase(what: str) -> None:
    model = _Function(lambda self, x: (x * self.w).argmax() if what == "integers" else x * self.w)
    model.requires_grad_(what == "integers")
    assert list(captured(model, (X,)).phases) == ["forward"]


def test_inputs_that_need_a_gradient() -> None:
    program = captured(Scale(4).requires_grad_(False), (torch.ones(4, requires_grad=True),))
    assert _labels(program) == (["param:w", "input:0", "tangent:0"], ["output:0", "grad:0"])
    assert program.phases["joint"].outputs[1] == Slot("grad", "0", "input")


# Structured inputs and outputs


@dataclass
class _Pair:
    first: torch.Tensor
    second: Any


pytree.register_dataclass(_Pair)
STRUCTURES: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, y + 1),
    "dict": lambda y: {"b": y, "a": [y + 1, {"c": y + 2}]},
    "dataclass": lambda y: _Pair(y, (y + 1,)),
    "ModelOutput": lambda y: CausalLMOutput(loss=y.sum(), logits=y),
    "constants": lambda y: {"y": y, "none": None, "number": 3, "text": "a"},
}


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES.keys())
def test_structured_outputs(make: Callable[[torch.Tensor], Any]) -> None:
    """What the step returns, flat and in order, becomes what the module returns."""
    model = _Function(lambda self, x: make(x * self.w))
    program = through(captured(model, (X,), world_size=1), "partition")
    (results,) = step(program, model, [(X,)])
    flat = [value for label, value in results.items() if label.startswith("output:")]
    found, expected = pytree.tree_unflatten(flat, program.out_spec), model(X)
    assert type(found) is type(expected)
    assert pytree.tree_structure(found) == pytree.tree_structure(expected)
    for a, b in zip(flat, pytree.tree_leaves(expected), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_keywords_are_inputs_in_the_order_of_the_call() -> None:
    program = _captured(lambda self, a, *, b, c=2: a * self.w - b["b"] * c, X, c=3, b={"b": torch.ones(2, 1)})
    joint = program.phases["joint"]
    shapes = {str(slot): tuple(fake(node).shape) for node, slot in joint.slot_of().items()}
    assert shapes == {"param:w": (4,), "input:0": (4,), "input:1": (2, 1), "tangent:0": (2, 4)}
    assert calls(joint, "mul")[1].args[1] == 3


class _Keywords(Scale):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return super().forward(a) - 2 * b.sum()


def test_keywords_in_another_order_than_the_signature() -> None:
    """Inputs are numbered as the call gives them, whatever order the signature has."""
    model, a, b = _Keywords(4), torch.randn(4), torch.randn(2)
    program = through(captured(model, (), {"b": b, "a": a}, world_size=1), "partition")
    (results,) = step(program, model, [(b, a)])
    torch.testing.assert_close(results["output:0"], model(a, b))


def test_a_tensor_passed_twice_is_two_inputs() -> None:
    program = _captured(lambda self, x, y: x * self.w + y, X, X)
    assert _labels(program)[0] == ["param:w", "input:0", "input:1", "tangent:0"]


def test_dataclass_inputs() -> None:
    program = _captured(lambda self, pair: pair.first * self.w + pair.second["z"], _Pair(X, {"z": X}))
    assert _labels(program)[0] == ["param:w", "input:0", "input:1", "tangent:0"]


# State


def test_constants_become_inputs() -> None:
    """Tensors held as plain attributes (behind those of the call), buffers, and tensors made in forward."""

    class Model(Scale):
        def __init__(self) -> None:
            super().__init__(4)
            self.plain = torch.arange(4.0)
            self.inner = nn.Module()
            self.inner.plain = torch.full((4,), 2.0)
            self.register_buffer("unsaved", torch.full((4,), 3.0), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.plain + self.inner.plain * self.unsaved + torch.tensor([1.0, 2, 3, 4])

    model = Model()
    program = captured(model, (X,), world_size=1)
    assert [name.startswith("lifted") for name in program.constants] == [True]
    assert [str(place) for (place,) in program.state.inputs] == ["plain", "inner.plain"]
    assert {"input:0", "input:1", "input:2", "buffer:unsaved"} < set(_labels(program)[0])
    (results,) = step(through(program, "partition"), model, [(X, model.plain, model.inner.plain)])
    assert torch.equal(results["output:0"], model(X))


def test_buffers_are_mutated_by_name() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    program = captured(model, (torch.randn(3, 4),), world_size=1)
    names = ["0.running_mean", "0.running_var", "0.num_batches_tracked"]
    outputs = program.phases["joint"].outputs
    assert outputs[:3] == tuple(Slot("mutation", name, "buffer") for name in names)
    x = torch.randn(3, 4)
    (results,) = step(through(program, "partition"), model, [(x,)])
    model(x)
    for name in names:
        torch.testing.assert_close(results[f"mutation:{name}"], model.get_buffer(name))


def test_evaluation_mutates_nothing() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4)).eval()
    _, outputs = _labels(captured(model, (torch.randn(3, 4),), grad=False))
    assert outputs == ["output:0"]


def test_inputs_may_be_mutated() -> None:
    program = _captured(lambda self, x: (x.add_(1) * self.w).sum())
    assert program.phases["joint"].outputs[0] == Slot("mutation", "0", "input")


@pytest.mark.parametrize("dims", [(0, 1), (1, 0)], ids=["contiguous", "transposed"])
def test_dropout_is_that_of_eager_mode(dims: tuple[int, int]) -> None:
    """The same random numbers and the same rounding."""
    model = _Function(lambda self, x: nn.functional.dropout(x.permute(dims) * self.w, 0.3).bfloat16())
    x = torch.randn(4, 4)
    program = through(captured(model, (x,), world_size=1), "partition")
    torch.manual_seed(0)
    (results,) = step(program, model, [(x,)])
    torch.manual_seed(0)
    output = model(x)
    output.sum().backward()
    assert torch.equal(results["output:0"], output)
    assert torch.equal(results["grad:w"], model.w.grad)


def test_tied_weights_are_one_parameter() -> None:
    inputs, outputs = _labels(captured(Tied(), (torch.tensor([1, 2]),)))
    assert inputs == ["param:embed.weight", "input:0", "tangent:0"]
    assert outputs == ["output:0", "grad:embed.weight"]


# Aliases


ALIASES: dict[str, tuple[Callable[..., Any], int]] = {
    "an input": (lambda self, x: (x, x * self.w), 1),
    "a view of an input": (lambda self, x: (x[:2], x * self.w), 1),
    "a parameter": (lambda self, x: (self.w, x * self.w), 1),
    "the same twice": (lambda self, x: (y := x * self.w, y), 1),
    "a view of another output": (lambda self, x: (y := x * self.w, y.view(2, 2)), 1),
    "two views": (lambda self, x: (x * self.w).chunk(2), 1),
    "fresh tensors": (lambda self, x: (y := x * self.w, y + 1), 0),
}


@pytest.mark.parametrize(("function", "copies"), ALIASES.values(), ids=ALIASES.keys())
def test_outputs_share_no_memory(function: Callable[..., Any], copies: int) -> None:
    program = _captured(function)
    assert len(calls(program.phases["joint"], "clone")) == copies
    model, x = _Function(function), torch.randn(4)
    (results,) = step(through(program, "partition"), model, [(x,)])
    outputs = [results["output:0"], results["output:1"]]
    pointers = {t.untyped_storage().data_ptr() for t in [*outputs, x]}
    assert len(pointers) == 3
    for found, expected in zip(outputs, model(x)):
        assert torch.equal(found, expected)


def test_outputs_share_no_memory_after_an_operation_in_place() -> None:
    """`v` is a view of `y`, which is then changed in place: both are outputs with gradients of their own."""

    def function(self: _Function, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * self.w
        v = y.view(2, 2)
        y.mul_(2)
        return y, v

    program = _captured(function)
    assert program.tangents == ("0", "1")
    model, x = _Function(function), torch.randn(4)
    (results,) = step(through(program, "partition"), model, [(x,)])
    assert torch.equal(results["output:1"], (2 * x).view(2, 2))
    torch.testing.assert_close(results["grad:w"], 4 * x)


# The module stays as it was


def _state(model: nn.Module) -> list[object]:
    """Everything about a module by identity; tensors with their values, too."""
    state: list[object] = []
    for module in model.modules():
        state.append(type(module))
        for name, value in module.__dict__.items():
            items = value.items() if isinstance(value, dict) else [("", value)]
            state += [(name, key, id(item)) for key, item in items]
            state += [(name, key, item.tolist()) for key, item in items if isinstance(item, torch.Tensor)]
    return state


class _Stateful(nn.Module):
    """Hooks, buffers, a constant, and a forward that cannot be captured for a number other than 0."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scale(4), Scale(4)])
        self.norm = nn.BatchNorm1d(4)
        self.constant = torch.ones(4)
        self.register_forward_pre_hook(lambda *_: calls.append("pre"))
        self.register_forward_hook(lambda *_: calls.append("post"))
        self.layers[0].register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        if number and x.sum() > 0:
            return x
        return self.norm(x * self.constant)


@pytest.mark.parametrize("policy", [None, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("number", [0, 1], ids=["success", "failure"])
def test_the_module_is_left_as_it_was(number: int, policy: MixedPrecisionPolicy | None) -> None:
    """Classes, parameters, buffers, hooks: the same objects with the same values. Hooks of the root do not run."""
    called: list[str] = []
    model = _Stateful(called)
    before = _state(model)
    with pytest.raises(CaptureError) if number else contextlib.nullcontext():
        captured(model, (torch.ones(3, 4), number), mp_policy=policy)
    assert _state(model) == before
    assert called == []


@pytest.mark.parametrize("number", [0, 1], ids=["success", "failure"])
def test_attributes_are_left_as_they_were(number: int) -> None:
    """What forward assigns is undone, fake tensors above all; a list stays the same list."""

    class Model(Scale):
        def __init__(self) -> None:
            super().__init__(4)
            self.count = 0
            self.sizes = [1, 2]

        def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
            self.count += 1
            y = super().forward(x)
            if number:
                self.cache = y
                return y if y.sum() > 0 else x
            return y

    model = Model()
    before = _state(model)
    with pytest.raises(CaptureError) if number else contextlib.nullcontext():
        captured(model, (X, number))
    assert _state(model) == before


def test_constants_are_left_as_they_were() -> None:
    """A tensor held as a plain attribute and changed in place: capture changes nothing, each step once."""

    def function(self: _Function, x: torch.Tensor) -> torch.Tensor:
        self.counter.add_(1)
        return x * self.w * self.counter

    model = _Function(function)
    model.counter = torch.zeros(4)
    program = captured(model, (X,), world_size=1)
    assert model.counter.tolist() == [0, 0, 0, 0]
    assert Slot("mutation", "1", "input") in program.phases["joint"].outputs


def test_hooks_of_the_root_run_outside() -> None:
    """Those of submodules are part of the graph."""
    model = nn.Sequential(Scale(4))
    model.register_forward_hook(lambda module, args, output: output + 1)
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    joint = captured(model, (X,)).phases["joint"]
    assert len(calls(joint, "add")) == 0
    assert [node.args[1] for node in calls(joint, "mul")[1:2]] == [2]


def test_the_device_does_not_matter() -> None:
    """A module on the meta device gives the graph of the module on the CPU."""
    inputs = (torch.ones(3, 4),)
    with torch.device("meta"):
        model = nn.Sequential(Blocks(2), nn.Flatten(0))
    expected = print_program(captured(nn.Sequential(Blocks(2), nn.Flatten(0)), inputs))
    program = captured(model, inputs)
    assert print_program(program) == expected
    assert {fake(node).device.type for node in program.phases["joint"].placeholders} == {"cpu"}


# Precision


def test_units_cast_their_inputs_and_outputs() -> None:
    """As FSDP2's units do: floating inputs to `param_dtype`, outputs to `output_dtype`."""
    program = captured(nn.ModuleList([Scale(4)])[0], (X,), mp_policy=BF16)
    joint = program.phases["joint"]
    casts = [node.kwargs["dtype"] for node in calls(joint, "_to_copy")]
    assert casts[:2] == [torch.bfloat16, torch.float32]
    assert fake(result(joint, "output:0")).dtype == torch.float32
    assert fake(calls(joint, "mul")[0]).dtype == torch.bfloat16


def test_inputs_are_cast_unless_told_otherwise() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    joint = captured(Scale(4), (X,), mp_policy=policy).phases["joint"]
    assert fake(result(joint, "output:0")).dtype == torch.float32  # a float32 input times a bfloat16 parameter


def test_integer_inputs_are_not_cast() -> None:
    joint = captured(Tied(), (torch.tensor([1]),), mp_policy=BF16).phases["joint"]
    dtypes = {str(slot): fake(node).dtype for node, slot in joint.slot_of().items()}
    assert dtypes["input:0"] == torch.int64


def test_gradient_mode_inside_the_module() -> None:
    """`torch.no_grad` and autocast in forward are part of the graph, not regions of their own."""

    def function(self: _Function, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.w.sum()
        with torch.autocast("cpu", torch.bfloat16):
            y = x[None] @ self.w[:, None]
        return y * scale

    program = _captured(function)
    assert fake(calls(program.phases["joint"], "mm")[0]).dtype == torch.bfloat16
    model, x = _Function(function), torch.randn(4)
    (results,) = step(through(program, "partition"), model, [(x,)])
    expected = torch.autograd.grad(model(x).sum(), model.w)[0]
    torch.testing.assert_close(results["grad:w"], expected)


def test_a_copy_of_the_model_is_captured_alike() -> None:
    model = Blocks(2)
    inputs = (torch.ones(3, 4),)
    assert print_program(captured(copy.deepcopy(model), inputs)) == print_program(captured(model, inputs))


scale = 2.0


def test_globals_are_told_from_attributes_of_the_same_name() -> None:
    model = _Function(lambda self, x: x * self.w * self.scale)
    model.scale = 3.0
    reads = {str(read.place): read.text for read in captured(model, (X,)).state.reads}
    assert reads["scale"] == "3.0"
    assert "2.0" not in reads.values()


class _InstallsHooks(nn.Module):
    """Collects what its layer returns with a hook that it installs at the first call, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "collected"):
            self.collected: list[torch.Tensor] = []
            self.layer.register_forward_hook(lambda module, args, output: self.collected.append(output))
        self.collected.clear()
        self.layer(x)
        (only,) = self.collected
        return only * 2


def test_hooks_that_forward_installs_are_undone() -> None:
    """Forward is called more than once while it is traced."""
    model = _InstallsHooks()
    captured(model, (torch.ones(2, 3),))
    assert not model.layer._forward_hooks
    assert not hasattr(model, "collected")
