"""Checkpoints in the model and `activation=` of compile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from graphshard.codec.converter import decode_pass, encode_pass
from graphshard.codec.program_format import program_from_json, program_to_json
from graphshard.cost.kernels import num_bytes
from graphshard.errors import ArgumentError, CaptureError
from graphshard.ir.collective_regions import saved_values
from graphshard.ir.mesh import Mesh
from graphshard.ir.program import Program
from graphshard.options.options import Options
from graphshard.options.resolve import check_fit, with_activation
from graphshard.passes import ActivationCheckpointing
from graphshard.pipeline.instrumentation import saved_by_unit
from graphshard.pipeline.pipeline import Pipeline, run_pass
from tests.helpers import calls, captured, full_gradients, step, through

aten = torch.ops.aten


class _Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class _Net(nn.Module):
    """Two blocks, each called through `around`."""

    def __init__(self, around: Callable[..., Tensor]) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.layers = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(8, 3)
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.layers:
            x = self.around(block, x)
        return self.head(x).square().sum()


def _plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def _selective(block: nn.Module, x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, [aten.addmm.default])
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def _nested(block: nn.Module, x: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        return x * checkpoint(torch.sin, checkpoint(block, x, use_reentrant=False), use_reentrant=False)

    return checkpoint(body, x, use_reentrant=False)


def _autocast(block: nn.Module, x: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return block(x)

    return checkpoint(body, x, use_reentrant=False)


FULL = functools.partial(checkpoint, use_reentrant=False)
REENTRANT = functools.partial(checkpoint, use_reentrant=True)
AROUND = {"plain": _plain, "full": FULL, "reentrant": REENTRANT, "selective": _selective, "nested": _nested}
X = torch.arange(20.0).view(5, 4) / 20


def _partitioned(around: Callable[..., Tensor]) -> tuple[nn.Module, Program]:
    torch.manual_seed(0)
    model = _Net(around)
    program = through(captured(model, (X,)), "partition")
    program.saved = saved_by_unit(program)
    return model, program


def _eager_saved_bytes(model: nn.Module) -> int:
    """Return the bytes of distinct activations that eager autograd keeps from forward to backward."""
    kept: dict[int, Tensor] = {}
    outside = {t.untyped_storage().data_ptr() for t in (X, *model.parameters())}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in outside and tensor.numel():
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(X)
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    loss.backward()
    return size


@pytest.mark.parametrize("around", ["full", "reentrant", "nested"])
@pytest.mark.slow
def test_saved_bytes_match_eager_mode(around: str) -> None:
    """The inputs of the blocks and values outside of them, without random states, which eager mode stores elsewhere."""
    model, program = _partitioned(AROUND[around])
    values = saved_values(program.phases["forward"])
    assert sum("random_state" not in node.name for node in values) == len(values) - 2
    ours = sum(num_bytes(node) for node in values if "random_state" not in node.name)
    assert ours == _eager_saved_bytes(model)
    assert ours < _eager_saved_bytes(_partitioned(_plain)[0])


@pytest.mark.parametrize("around", ["full", "reentrant", "selective"])
@pytest.mark.slow
def test_recomputes_the_same_dropout_mask(around: str) -> None:
    found = []
    for name in ("plain", around):
        model, program = _partitioned(AROUND[name])
        torch.manual_seed(1)
        results = step(program, model, [(X,), (X + 1,)])
        found.append((results[1]["output:0"], full_gradients(program, results)))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_selective_checkpoint_of_the_user() -> None:
    """The listed operator is not recomputed, the others are."""
    _, program = _partitioned(_selective)
    for row in program.saved[1:]:
        assert row.saved["addmm"] in (1, 2)
        assert set(row.recomputed) == {"bernoulli", "div", "empty_like", "gelu"} & set(row.recomputed)
        assert "gelu" in row.recomputed


def test_policy_of_the_user_sees_every_operator_and_its_arguments() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> torch_checkpoint.CheckpointPolicy:
        assert not context.is_recompute
        if op == aten.addmm.default:
            seen.append((str(op), tuple(args[1].shape)))
        return torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    def around(block: nn.Module, x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    captured(_Net(around), (X,))
    blocks = [("aten.addmm.default", (5, 8)), ("aten.addmm.default", (5, 16))] * 2
    assert seen == blocks * 2, "AOTAutograd traces twice"


def test_checkpoint_around_autocast() -> None:
    """Operators traced within autocast belong to the surrounding region."""
    _, program = _partitioned(_autocast)
    assert len([n for n in calls(program.phases["backward"], "addmm") if n.meta.get("recomputed")]) == 4
    assert [row.unit for row in program.saved] == ["", "layers.0", "layers.1"]


def test_a_reentrant_checkpoint_without_input_gradients() -> None:
    """As in eager mode, which warns."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(checkpoint(self.inner, x, use_reentrant=True)).sum()

    program = captured(Frozen(), (X,))
    assert program.differentiated == {"outer.weight", "outer.bias"}
    model = Frozen()
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        loss = model(X)
    loss.backward()
    assert model.inner.weight.grad is None


def test_other_contexts_cannot_be_traced() -> None:
    def around(block: nn.Module, x: Tensor) -> Tensor:
        contexts = lambda: (contextlib.suppress(ValueError), contextlib.nullcontext())  # noqa: E731
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    with pytest.raises(CaptureError, match=r"checkpoint not implemented for .* context_fn"):
        captured(_Net(around), (X,))


def test_capture_restores_checkpoint() -> None:
    before = dict(vars(torch_checkpoint)), dict(vars(torch_checkpoint.CheckpointFunction))
    captured(_Net(FULL), (X,))
    assert (dict(vars(torch_checkpoint)), dict(vars(torch_checkpoint.CheckpointFunction))) == before
    model = _Net(FULL)
    model(X).backward()
    assert model.stem.weight.grad is not None


def test_policy_adds_to_the_users_regions() -> None:
    """A block that the user checkpointed does not change; the other one gets the policy."""

    class Half(_Net):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.layers[0], self.stem(x), use_reentrant=False)
            return self.head(self.layers[1](x)).sum()

    program = captured(Half(_plain), (X,))
    run_pass(ActivationCheckpointing((aten.addmm.default,)), program)
    rows = {row.unit: row for row in saved_by_unit(through(program, "partition"))}
    assert rows["layers.0"].recomputed["addmm"] == 2
    assert "addmm" not in rows["layers.1"].recomputed


def test_wrapped_blocks_are_units() -> None:
    model = _Net(_plain)
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    program = through(captured(model, (X,)), "partition")
    assert program.params.units == ("", "layers.0", "layers.1")


def test_stages_with_random_states_are_stored() -> None:
    _, program = _partitioned(FULL)
    text = program_to_json(program)
    assert program_to_json(program_from_json(text)) == text
    assert saved_by_unit(program_from_json(text)) == program.saved


@pytest.mark.parametrize("policy", ["full", (aten.mm.default, aten.addmm.default), 0.5])
def test_pass_is_stored_with_its_policy(policy: Any) -> None:
    step = ActivationCheckpointing(policy)
    assert decode_pass(encode_pass(step)).step == step


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ful", "activation must be None, 'full', 'auto', a list of operators to save, or .* got 'ful'"),
        (True, "got True"),
        (1.5, "share of memory from 0 to 1 that activations may take, got 1.5"),
        ([aten.mm], "Choose one of its overloads: torch.ops.aten.mm.default, torch.ops.aten.mm.out"),
        (["mm"], "such as torch.ops.aten.mm.default, got 'mm'"),
    ],
)
def test_wrong_activation(value: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Options(activation=value)


def test_activation_and_passes() -> None:
    assert with_activation(Pipeline(), None) == Pipeline()
    both = with_activation(Pipeline(), 0.5)
    assert next(iter(both)) == ActivationCheckpointing(0.5)
    with pytest.raises(ArgumentError, match="activation: passes has 'activation-checkpointing' already"):
        Options(activation="full", passes=both)
    with pytest.raises(ArgumentError, match="activation='full' is about the units of Linear, and none were found"):
        check_fit(Options(activation="full"), nn.Linear(2, 2), (), Mesh.of_shape(2))
