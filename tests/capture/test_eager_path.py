"""While it is traced, code does what it does in eager mode, though it asks whether it is traced."""

from __future__ import annotations

import contextlib
import logging
import queue
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling  # by name, as some libraries import it
from torch.export import Dim
from torch.fx import _symbolic_trace
from transformers import LlamaConfig, LlamaForCausalLM

from graphshard.ir.errors import CaptureError
from graphshard.ir.graph import fake
from graphshard.ir.program import Program
from tests.helpers import calls, captured

X = torch.ones(4)


class _Function(nn.Module):
    """A module with a parameter of ones, whose forward is `function(x * w)`."""

    def __init__(self, function: Callable[[Tensor], Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.function = function
        self.called = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.w)


def _ops(function: Callable[[Tensor], Tensor], *modules: nn.Module) -> set[str]:
    """Operators, besides `x * w`, that a forward is captured with; `modules` are those it calls."""
    return _names(_program(function, *modules)) - {"mul", "alias"}


def _program(function: Callable[[Tensor], Tensor], *modules: nn.Module) -> Program:
    return captured(_Function(function, *modules), (X,), grad=False, world_size=1)


def _names(program: Program) -> set[str]:
    nodes = program.phases["forward"].module.graph.nodes
    return {node.target.overloadpacket.__name__ for node in nodes if node.op == "call_function"}


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


def _imports_and_asks() -> bool:
    from torch._subclasses import FakeTensor

    return isinstance(torch.zeros(1), FakeTensor)


QUESTIONS: dict[str, Callable[[], bool]] = {
    "is_compiling": lambda: torch.compiler.is_compiling(),
    "is_exporting": lambda: torch.compiler.is_exporting(),
    "is_compiling, imported by name": is_compiling,
    "is_compiling, of Dynamo": lambda: torch._dynamo.external_utils.is_compiling(),
    "is_fx_tracing": lambda: _symbolic_trace.is_fx_tracing(),
    "is_fx_symbolic_tracing": lambda: _symbolic_trace.is_fx_symbolic_tracing(),
    "is_tracing": lambda: torch.jit.is_tracing(),
    "FakeTensor": lambda: _is_fake(torch.zeros(1)),
    "FakeTensor, imported": _imports_and_asks,
}


def _all() -> list[Any]:
    """Whatever is another while a forward is traced."""
    return [
        torch.compiler.is_compiling,
        torch.compiler.is_exporting,
        _symbolic_trace.is_fx_tracing,
        [ask() for ask in QUESTIONS.values()],
        torch._subclasses.FakeTensor,
        type(torch._subclasses),
        sorted(vars(torch._subclasses)),
        logging.getLogger("torch._subclasses.fake_tensor").disabled,
        torch.overrides._get_current_function_mode_stack(),
    ]


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_code_that_asks_is_captured_as_it_runs_in_eager_mode(ask: Callable[[], bool]) -> None:
    assert _ops(lambda x: torch.sin(x) if ask() else torch.cos(x)) == {"cos"}


@pytest.mark.parametrize("succeeds", [True, False])
def test_afterwards_the_questions_are_themselves_again(succeeds: bool) -> None:
    # A list would be as it was: what forward does to one happens at each call.
    before, inside = _all(), queue.SimpleQueue()

    def forward(x: Tensor) -> Tensor:
        inside.put(_all())
        return x if succeeds or x.sum() > 0 else -x

    with contextlib.nullcontext() if succeeds else pytest.raises(CaptureError):
        _ops(forward)
    assert _all() == before
    assert inside.get() != before
    assert torch._subclasses.FakeTensor is FakeTensor
    assert type(torch._subclasses) is types.ModuleType


def test_torch_itself_is_told_the_truth() -> None:
    """Or it would compile a function inside the trace of another."""
    seen = []

    def backend(module: nn.Module, inputs: list[Tensor]) -> nn.Module:
        seen.append(module)
        return module

    assert _ops(torch.compile(torch.cos, backend=backend)) == {"cos"}
    assert not seen


# Values


def test_a_function_that_reads_values_sees_that_it_is_traced(caplog: pytest.LogCaptureFixture) -> None:
    """It alone: others keep the path of eager mode."""

    def masked(x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and bool((x > 0).all()):
            return x
        return torch.sin(x)

    def asks(x: Tensor) -> Tensor:
        return torch.tan(x) if torch.compiler.is_compiling() else torch.cos(x)

    with caplog.at_level(logging.INFO, "graphshard"):
        assert _ops(lambda x: asks(masked(asks(x)))) == {"sin", "cos"}
    (record,) = caplog.records
    assert f"the one that masked ({__file__}:" in record.getMessage()


def test_the_function_that_asks_may_call_the_one_that_reads() -> None:
    def reads(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    def asks(x: Tensor) -> Tensor:
        return torch.sin(x) if torch.compiler.is_exporting() else reads(x)

    def asks_too(x: Tensor) -> Tensor:
        return torch.tan(asks(x)) if torch.compiler.is_exporting() else torch.cos(asks(x))

    assert _ops(asks_too) == {"sin", "cos"}


def test_the_function_that_asks_may_be_called_by_the_one_that_reads() -> None:
    def asks() -> bool:
        return torch.compiler.is_exporting()

    def reads(x: Tensor) -> Tensor:
        if asks():
            return torch.sin(x)
        return x if x.sum() > 0 else -x

    assert _ops(lambda x: torch.tan(reads(x)) if asks() else torch.cos(reads(x))) == {"sin", "cos"}


def test_modules_that_ask_and_read_may_be_siblings(caplog: pytest.LogCaptureFixture) -> None:
    """What calls both sees that it is traced, torch's own functions between them left out."""

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x) if torch.compiler.is_exporting() else torch.cos(x)

    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    asks, reads = Asks(), Reads()

    def both(x: Tensor) -> Tensor:
        return asks(x) if torch.compiler.is_compiling() else reads(asks(x))

    with caplog.at_level(logging.INFO, "graphshard"):
        assert _ops(both, asks, reads) == {"sin"}
    assert f"the one that both ({__file__}:" in caplog.text


@pytest.mark.parametrize("how", ["number", "size", "import"])
def test_at_last_everyone_sees_that_it_is_traced(how: str) -> None:
    """Where tracing fails too late, or nobody is known to have asked."""

    def forward(x: Tensor) -> Tensor:
        if is_compiling() if how == "import" else torch.compiler.is_compiling():
            return torch.sin(x)
        if how == "number":
            return x * max(x.sum().item(), 1.0)
        return torch.stack(list(x.nonzero())) if how == "size" else x if x.sum() > 0 else -x

    assert _ops(forward) == {"sin"}


def test_any_failure_makes_way(caplog: pytest.LogCaptureFixture) -> None:
    """And is no error to report."""
    assert _ops(lambda x: torch.sin(x) if torch.compiler.is_compiling() else x @ torch.ones(5, 5)) == {"sin"}
    assert not caplog.records


# Values that depend on no input


def _positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


DECISIONS: dict[str, Callable[[Tensor], bool]] = {
    "bool": lambda p: bool((p.diff() == 1).all()),
    "item": lambda p: p.max().item() == 3,
    "int": lambda p: int(p[1:].sum()) == 6,
    "float": lambda p: float(p[2]) == 2.0,
    "index": lambda p: [False, True][p[1]],
    "list": lambda p: p.tolist() == [0, 1, 2, 3],
    "contains": lambda p: 3 in p,
    "equal": lambda p: torch.equal(p, p.cumsum(0).diff(prepend=p[:1])),
    "equal, as a method": lambda p: p.equal(p + 0),
    "is_nonzero": lambda p: torch.is_nonzero(p[1]),
    "is_nonzero, as a method": lambda p: p[1].is_nonzero(),
    "one of two results": lambda p: bool(p.max(0).indices == 3),
    "no traced value": lambda p: bool(torch.tensor(2.5) > 2),
}


@pytest.mark.parametrize("decide", DECISIONS.values(), ids=DECISIONS.keys())
def test_code_may_read_values_that_depend_on_no_input(decide: Callable[[Tensor], bool]) -> None:
    def forward(x: Tensor) -> Tensor:
        return torch.cos(x) if decide(_positions(x)) and not torch.compiler.is_compiling() else torch.sin(x)

    assert _ops(forward) == {"cos"}


def test_values_are_known_wherever_the_model_is() -> None:
    """The device need not be here."""
    assert _ops(lambda x: x.cos() if (torch.arange(3, device="meta") < 3).all() else x) == {"cos"}


def _written(x: Tensor) -> Tensor:
    positions = _positions(x)
    positions.view(2, 2)[0].add_(x[:2].long())
    return positions


def _written_to_as_out(x: Tensor) -> Tensor:
    positions = _positions(x)
    torch.add(positions[:2], x[:2].long(), out=positions[:2])
    return positions


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "input": lambda x: x,
    "computed from an input": lambda x: _positions(x) + x.long(),
    "written to": _written,
    "written to as out": _written_to_as_out,
    "random": lambda x: torch.randint(0, 9, (4,)),
}
INEXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "inexact": lambda x: torch.linspace(0, 1, 4) > 0,
    "complex": lambda x: torch.ones(4, dtype=torch.complex64) == 1,
}


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_other_values_are_not_known(make: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match="The condition depends on the values of a tensor"):
        _ops(lambda x: x if make(x).sum() > 2 else -x)


@pytest.mark.parametrize("make", INEXACT.values(), ids=INEXACT.keys())
def test_what_may_be_rounded_otherwise_elsewhere_is_asked_again(make: Callable[[Tensor], Tensor]) -> None:
    """Where the program runs, before its first call there."""
    program = _program(lambda x: x.cos() if make(x).sum() > 2 else -x)
    assert program.decided is not None
    assert (program.decided.inputs, program.decided.buffers) == ((), ())
    assert [guard.expected for guard in program.decided.guards] == ["True"]


def test_values_of_a_tensor_that_nobody_changes_are_read_as_before() -> None:
    """One that a closure holds is an input of the program."""
    flag = torch.tensor(True)
    program = _program(lambda x: x.cos() if flag else -x)
    assert program.decided is not None
    assert program.decided.inputs == (1,)


def test_values_of_a_dynamic_size_are_not_known() -> None:
    with pytest.raises(CaptureError, match="The condition depends on the values of a tensor"):
        captured(
            nn.Sequential(nn.Linear(3, 3), _Rows()), (torch.ones(4, 3),), dynamic_shapes=({0: Dim("rows", min=2)},)
        )


class _Rows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if _positions(x).max() == 3 else -x


# Hugging Face


def _llama(**inputs: Tensor) -> Program:
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    text = torch.randint(0, 11, (2, 8))
    return captured(LlamaForCausalLM(config), (), {"input_ids": text, "labels": text, **inputs})


def _mask(program: Program) -> Any:
    (attention,) = calls(program.phases["joint"], "_scaled_dot_product_flash_attention_for_cpu")
    is_causal = attention.args[4] if len(attention.args) > 4 else False
    mask = attention.kwargs.get("attn_mask")
    return "causal" if is_causal and mask is None else fake(mask).shape


def test_hugging_face_attention_is_causal_and_without_a_mask() -> None:
    """As in eager mode, where there is no attention mask: nothing that is padded, nothing that is packed."""
    assert _mask(_llama()) == "causal"


@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
def test_hugging_face_attention_has_a_mask_where_values_decide(name: str) -> None:
    """Eager mode reads whether anything is padded or packed. A graph serves all values."""
    assert _mask(_llama(**{name: torch.ones(2, 8, dtype=torch.long)})) == (2, 1, 8, 8)


def test_parameters_require_gradients_without_grad_mode() -> None:
    """Code may ask, and torch does: a product with what requires none is computed in another way."""
    module = _Function(lambda x: torch.sin(x) if module.w.requires_grad else torch.cos(x))
    program = captured(module, (X,), grad=False, world_size=1)
    assert "sin" in _names(program)
