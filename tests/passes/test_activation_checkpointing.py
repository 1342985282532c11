"""activation-checkpointing: values that units save for backward or recompute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from graphshard.errors import PassError
from graphshard.ir.printer import print_program
from graphshard.ir.program import Program
from graphshard.passes import ActivationCheckpointing
from graphshard.pipeline.instrumentation import saved_by_unit
from graphshard.pipeline.pipeline import run_pass
from graphshard.pipeline.rules import verify
from tests.helpers import Blocks, calls, captured, full_gradients, step, through

aten = torch.ops.aten


class _Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class _Net(nn.Module):
    """Blocks that end with a sum of views, between an embedding and a loss."""

    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.layers = nn.ModuleList(_Block(width) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return x.square().sum()


class _Rrelu(nn.Module):
    """A random operator with several results, and a block that returns two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Two(), _Two()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            a, b = layer(x)
            x = a * b
        return x.sum()


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, _ = (F.rrelu(x @ self.w, training=True)).sort(dim=-1)
        return values.t(), values.exp()


TOKENS = torch.tensor([[0, 1, 2], [3, 4, 0]])
FULL, NONE = ActivationCheckpointing("full"), ActivationCheckpointing(1)
POLICIES = {
    "full": FULL,
    "mm": ActivationCheckpointing((aten.mm.default,)),
    "quarter": ActivationCheckpointing(0.25),
    "most": ActivationCheckpointing(0.75),
    "none": NONE,
}


def _scheduled(model: nn.Module, args: tuple[Any, ...], policy: ActivationCheckpointing | None) -> Program:
    program = captured(model, args)
    if policy is not None:
        run_pass(policy, program)
    through(program, "partition")
    verify(program, "test")
    program.saved = saved_by_unit(program)
    return program


def _saved_bytes(program: Program) -> int:
    return sum(row.saved_bytes for row in program.saved)


def test_before_and_after() -> None:
    program = captured(Blocks(2), (torch.ones(3, 4),))
    run_pass(FULL, program)
    forward = print_program(program).split("expand")[0]
    assert_expected_inline(
        forward,
        """\
joint:
  %0: f32[4, 4] = param:layers.0.weight
  %1: f32[4, 4] = param:layers.1.weight
  %2: f32[3, 4] = input:0
  %3: f32[] = tangent:0  # (backward)
  %4: f32[4, 4] = t(%0)  # layers.0 (recompute)
  %5: f32[3, 4] = mm(%2, %4)  # layers.0 (save)
  %6: f32[3, 4] = relu(%5)
  %7: f32[3, 4] = detach(%6)
  %8: f32[4, 4] = t(%1)  # layers.1 (recompute)
  %9: f32[3, 4] = mm(%6, %8)  # layers.1 (save)
  %10: f32[3, 4] = relu(%9)
  %11: f32[3, 4] = detach(%10)
  %12: f32[] = sum(%10)
  %13: f32[3, 4] = """,
    )


def test_table() -> None:
    """Blocks save their inputs and, for dropout, the random state."""
    assert_expected_inline(
        _scheduled(_Net(2), (TOKENS,), FULL).saved_table(),
        """\
unit      saved                  bytes  computed again in backward
(root)    embedding 1, mul 1       384
layers.0  add 1, random state 1   5248  _unsafe_view 2, bernoulli 1, empty_like 1, gelu 1, mm 2, native_layer_norm 1
layers.1  random state 1          5056  _unsafe_view 2, bernoulli 1, empty_like 1, gelu 1, mm 2, native_layer_norm 1
total                            10688""",
    )


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.slow
def test_numerics(name: str) -> None:
    """The same bits as without, including recomputed dropout."""
    torch.manual_seed(0)
    model = _Net()
    gradients = []
    for policy in (None, POLICIES[name]):
        program = _scheduled(model, (TOKENS,), policy)
        torch.manual_seed(1)
        results = step(program, model, [(TOKENS,), (TOKENS.flip(0),)])
        gradients.append((torch.get_rng_state(), results[0]["output:0"], full_gradients(program, results)))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_idempotent() -> None:
    for policy in POLICIES.values():
        program = captured(_Net(2), (TOKENS,))
        run_pass(policy, program)
        before = print_program(program)
        assert policy.rewrite(program) == 0
        assert print_program(program) == before


def test_nothing_to_do() -> None:
    """A forward without a backward; units that are not in the graph."""
    inference = captured(_Net(1), (TOKENS,), grad=False)
    assert FULL.rewrite(inference) == 0
    whole = captured(nn.Linear(4, 4), (torch.ones(2, 4),))
    assert FULL.rewrite(whole) == 0


@pytest.mark.slow
def test_share_of_memory() -> None:
    """A larger share saves more and recomputes less; 0 equals "full" and 1 is the partitioner's choice."""
    model, tokens = _Net(4, width=512), torch.zeros(16, 64, dtype=torch.int64)
    found = [_scheduled(model, (tokens,), ActivationCheckpointing(b / 8)) for b in range(9)]
    sizes = list(map(_saved_bytes, found))
    products = [sum(row.recomputed.get("mm", 0) for row in program.saved) for program in found]
    again = [sum(sum(row.recomputed.values()) for row in program.saved) for program in found]
    assert sizes == sorted(sizes)
    assert again == sorted(again, reverse=True)
    assert len(set(sizes)) > 4
    assert products[4] <= products[0] / 2, "what is expensive is saved first"
    assert found[0].saved == _scheduled(model, (tokens,), FULL).saved
    assert found[8].saved == _scheduled(model, (tokens,), None).saved
    for share, size in enumerate(sizes):
        assert size <= sizes[0] + (sizes[8] - sizes[0]) * share / 8


def test_listed_operators_are_saved() -> None:
    program = _scheduled(_Net(2), (TOKENS,), POLICIES["mm"])
    for row in program.saved:
        assert "mm" not in row.recomputed
        assert ("gelu" in row.recomputed) == bool(row.unit)


@pytest.mark.slow
def test_operators_with_several_results() -> None:
    """Parts of a random operator are recomputed; views and parts that leave a region are saved with their producer."""
    torch.manual_seed(0)
    model, x = _Rrelu(), torch.randn(4, 4)
    found = []
    for policy in (None, FULL, ActivationCheckpointing((aten.sort.default,)), ActivationCheckpointing(0.5)):
        program = _scheduled(model, (x,), policy)
        through(program, "reorder")
        torch.manual_seed(1)
        found.append(full_gradients(program, step(program, model, [(x,), (x + 1,)])))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=0, atol=0)


def test_a_unit_called_twice_is_two_regions() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([_Two()])

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.layers[0](x)[0]
            return x.sum()

    program = captured(Twice(), (torch.randn(4, 4),))
    run_pass(FULL, program)
    regions = {n.meta.get("ac_graph_id") for n in program.phases["joint"].module.graph.nodes}
    assert regions == {None, 0, 1, 2}


@pytest.mark.slow
def test_kept_parameters_are_not_gathered_again() -> None:
    model = _Net(2)
    for reshard in (True, False):
        program = captured(model, (TOKENS,), reshard_after_forward=reshard)
        run_pass(FULL, program)
        through(program, "partition")
        assert len(calls(program.phases["forward"], "all_gather_into_tensor")) == 9
        assert len(calls(program.phases["backward"], "all_gather_into_tensor")) == (8 if reshard else 0)


def test_rejects_running_after_collectives() -> None:
    program = through(captured(_Net(1), (TOKENS,)), "insert-collectives")
    with pytest.raises(PassError, match="already has collectives; run this pass before they are inserted"):
        run_pass(FULL, program)
    through(program, "partition")
    with pytest.raises(PassError, match="already partitioned; run this pass before 'partition'"):
        run_pass(FULL, replace(program))
