"""drop-unused-tangents: removes the backward of outputs without a gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard.ir.collective_regions import collectives
from graphshard.ir.mesh import Mesh
from graphshard.ir.param_table import ParamTable
from graphshard.ir.printer import print_phase, print_program
from graphshard.ir.program import Phase, Program, Slot
from graphshard.passes import DropUnusedTangents
from graphshard.pipeline.pipeline import run_pass
from graphshard.torch_compat.torch_ops import pytree
from tests.helpers import Blocks, calls, captured, full_gradients, run_ranks, step, through

aten = torch.ops.aten
Gradient = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _program(gradient: Gradient) -> Program:
    """Build a program whose backward is `gradient(tangent 0, tangent 1, saved)`, all 2 by 4."""
    module = make_fx(lambda *args: (gradient(*args),), tracing_mode="fake")(*(torch.ones(2, 4) for _ in range(3)))
    inputs = (Slot("tangent", "0"), Slot("tangent", "1"), Slot("saved", "s"))
    phase = Phase(module, inputs, (Slot("grad", "0", "input"),))
    return Program({"backward": phase}, ParamTable(()), Mesh.of_shape(1), {}, pytree.tree_structure(()), ("0", "1"))


def _drop(program: Program, *used: str) -> int:
    run_pass(DropUnusedTangents(frozenset(used) if used else None), program)
    return program.history[-1].rewrites


def test_before_and_after() -> None:
    """A zero tangent vanishes from the sum, with the operators between them."""
    program = _program(lambda t, z, s: s.neg() * t + (z * s).view(4, 2).t().reshape(2, 4))
    assert_expected_inline(
        print_phase(program.phases["backward"]),
        """\
  %0: f32[2, 4] = tangent:0
  %1: f32[2, 4] = tangent:1
  %2: f32[2, 4] = saved
  %3: f32[2, 4] = neg(%2)
  %4: f32[2, 4] = mul.Tensor(%3, %0)
  %5: f32[2, 4] = mul.Tensor(%1, %2)
  %6: f32[4, 2] = view(%5, [4, 2])
  %7: f32[2, 4] = t(%6)
  %8: f32[2, 4] = view(%7, [2, 4])
  %9: f32[2, 4] = add.Tensor(%4, %8)
  return %9 as grad:0
""",
    )
    assert _drop(program, "0") == 1
    assert_expected_inline(
        print_phase(program.phases["backward"]),
        """\
  %0: f32[2, 4] = tangent:0
  %1: f32[2, 4] = saved
  %2: f32[2, 4] = neg(%1)
  %3: f32[2, 4] = mul.Tensor(%2, %0)
  return %3 as grad:0
""",
    )


VANISHING: dict[str, Gradient] = {
    "add": lambda t, z, s: t + z,
    "add, first": lambda t, z, s: z + t,
    "add twice": lambda t, z, s: (t + z) + z,
    "mul": lambda t, z, s: t + s * z,
    "mul, first": lambda t, z, s: t + z * 3,
    "div": lambda t, z, s: t + z / s,
    "neg": lambda t, z, s: t + -z,
    "mm": lambda t, z, s: t + s @ (z.t() @ s),
    "sum": lambda t, z, s: t + z.sum(0, keepdim=True).expand(2, 4),
    "view": lambda t, z, s: t + z.view(8).view(2, 4),
    "transpose": lambda t, z, s: t + z.t().contiguous().view(2, 4),
    "cast": lambda t, z, s: t + z.bfloat16().float(),
    "cat": lambda t, z, s: t + torch.cat([z, -z])[:2],
    "split": lambda t, z, s: t + torch.cat([*z.split(1)]),
    "slice_backward": lambda t, z, s: t + aten.slice_backward(z, [2, 8], 1, 0, 8, 2)[:, :4],
    "pad": lambda t, z, s: t + torch.constant_pad_nd(z, [0, 1])[:, 1:],
    "threshold_backward": lambda t, z, s: t + aten.threshold_backward(z, s, 0),
    "_softmax_backward_data": lambda t, z, s: t + aten._softmax_backward_data(z, s, -1, torch.float32),
    "native_layer_norm_backward": lambda t, z, s: (
        t + aten.native_layer_norm_backward(z, s, [4], s[:, :1], s[:, :1], None, None, [True, False, False])[0]
    ),
}
STAYING: dict[str, Gradient] = {
    "sub": lambda t, z, s: t - z,
    "add of a number": lambda t, z, s: t + (z + 1),
    "add, scaled": lambda t, z, s: torch.add(t, z, alpha=2),
    "add, broadcast": lambda t, z, s: t[0] + z,
    "add of another dtype": lambda t, z, s: t.bfloat16() + z,
    "cat of some": lambda t, z, s: torch.cat([t, z]),
    "unknown operator": lambda t, z, s: z.cos(),
    "power": lambda t, z, s: z**0,
    "denominator": lambda t, z, s: s / z,
    "where": lambda t, z, s: torch.where(s > 0, z, t),
    "second argument of a backward": lambda t, z, s: aten.threshold_backward(t, z, -1),
    "same zero twice": lambda t, z, s: torch.atan2(z, z) + t,
}


def _inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, 4, generator=generator) for _ in range(2))


@pytest.mark.parametrize("gradient", VANISHING.values(), ids=VANISHING.keys())
def test_zero_vanishes(gradient: Gradient) -> None:
    """tangent 0 plus an expression that is zero becomes tangent 0."""
    program = _program(gradient)
    _drop(program, "0")
    phase = program.phases["backward"]
    assert [str(slot) for slot in phase.inputs] == ["tangent:0"]  # the saved value of the other one is dropped
    assert not calls(phase, "full")
    assert phase.results == [phase.placeholders[0]]
    t, s = _inputs()
    torch.testing.assert_close(gradient(t, torch.zeros_like(t), s), t, rtol=0, atol=0)


@pytest.mark.parametrize("gradient", STAYING.values(), ids=STAYING.keys())
def test_zero_is_materialized_for_unknown_operators(gradient: Gradient) -> None:
    program = _program(gradient)
    _drop(program, "0")
    phase = program.phases["backward"]
    assert {str(slot) for slot in phase.inputs} <= {"tangent:0", "saved:s"}
    assert calls(phase, "full")
    t, s = _inputs()
    given = {"tangent:0": t, "saved:s": s}
    (results,) = run_ranks(phase, [{slot: given[str(slot)] for slot in phase.inputs}])
    (found,) = results.values()
    torch.testing.assert_close(found, gradient(t, torch.zeros_like(t), s), rtol=0, atol=0)


def test_zeros_allocate_nothing() -> None:
    """A materialized zero has a fake value, like every other value of the graph."""
    program = _program(STAYING["unknown operator"])
    _drop(program, "0")
    (full,) = calls(program.phases["backward"], "full")
    assert hasattr(full.meta["val"], "fake_mode")


def test_a_gradient_of_zero_is_none() -> None:
    """As in autograd: an input on which the used outputs do not depend has no gradient."""
    program = _program(lambda t, z, s: z * s)
    _drop(program, "0")
    assert program.phases["backward"].results == [None]


def test_used_tangents_are_left_alone() -> None:
    program = _program(VANISHING["mul"])
    before = print_program(program)
    assert (_drop(program, "0", "1"), print_program(program)) == (0, before)


def test_a_second_run_changes_nothing() -> None:
    program = _program(STAYING["cat of some"])
    assert _drop(program, "0") == 1
    before = print_program(program)
    assert (_drop(program, "0"), print_program(program)) == (0, before)


def test_inference_is_left_alone() -> None:
    program = captured(Blocks(1), (torch.ones(2, 4),), grad=False)
    before = print_program(program)
    assert (_drop(program), print_program(program)) == (0, before)


class _Model(nn.Module):
    """Loss and logits; only the logits use `extra`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)
        self.extra = nn.Parameter(torch.ones(5))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.norm(self.embed(tokens)).relu())
        return nn.functional.cross_entropy(logits, targets), logits.softmax(-1) * self.extra


TOKENS = (torch.tensor([1, 2, 3]), torch.tensor([0, 4, 1]))


@pytest.mark.parametrize("used", [None, "0", "1"])
@pytest.mark.quick_cases("None", "1")
def test_gradients_match_autograd(used: str | None) -> None:
    torch.manual_seed(0)
    model = _Model()
    program = through(captured(model, TOKENS, world_size=1), "partition")
    assert _drop(program, *filter(None, [used])) == 1
    index = int(used or 0)
    outputs = model(*TOKENS)
    tangent = torch.randn(outputs[index].shape)
    params = dict(model.named_parameters())
    expected = torch.autograd.grad(outputs[index], list(params.values()), tangent, allow_unused=True)
    found = full_gradients(program, step(program, model, [TOKENS], {str(index): tangent}))
    torch.testing.assert_close(found, dict(zip(params, expected)))


def test_without_a_scalar_all_outputs_are_used() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * self.w, x + self.w

    program = through(captured(Pair(), (torch.ones(4),)), "partition")
    assert _drop(program) == 0


def test_collectives_that_carry_zeros_are_dropped() -> None:
    """`extra` has no gradient from the loss: backward contains neither its reduction nor a gather for it."""
    program = through(captured(_Model(), TOKENS, reshard_after_forward=True), "partition")
    backward = program.phases["backward"]
    assert {c.kind for c in collectives(backward) if "extra" in c.params} == {"gather", "reduce"}
    _drop(program)
    assert not [c for c in collectives(backward) if "extra" in c.params]


class _Strided(nn.Module):
    """The gradient of `h` from the loss is an expanded tensor, unlike its sum with the other gradient.

    %e: stride (3, 1, 0) = expand(...)        %e: stride (3, 1, 0) = expand(...)
    %a: stride (12, 4, 1) = add(%e, %t)       %v = view(%e, [24])   is impossible
    %v = view(%a, [24])
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(24))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = (self.w * x).view(2, 3, 4)
        return h.sum(-1).pow(2).sum(), h


def test_views_stay_possible() -> None:
    model, batch = _Strided(), (torch.randn(24),)
    program = through(captured(model, batch, world_size=1), "partition")
    _drop(program)
    found = full_gradients(program, step(program, model, [batch]))
    (expected,) = torch.autograd.grad(model(*batch)[0], [model.w])
    torch.testing.assert_close(found["w"], expected)


def _transposed(t: torch.Tensor, z: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Compute a sum with its first argument's strides; the remaining argument has different ones."""
    total = s * z + (s * t).t().contiguous().t()
    return total.view(8).neg().view(2, 4) + s


def test_later_operators_use_the_strides_of_the_remaining_argument() -> None:
    """As in eager mode, which does not add; an impossible view becomes a copy."""
    program = _program(_transposed)
    _drop(program, "0")
    phase = program.phases["backward"]
    assert not calls(phase, "full")
    assert_expected_inline(
        print_phase(phase),
        """\
  %0: f32[2, 4] = tangent:0
  %1: f32[2, 4] = saved
  %2: f32[2, 4] = mul.Tensor(%1, %0)
  %3: f32[4, 2] = t(%2)
  %4: f32[4, 2] = clone(%3, memory_format=torch.contiguous_format)
  %5: f32[2, 4] = t(%4)
  %6: f32[8] = reshape(%5, [8])
  %7: f32[8] = neg(%6)
  %8: f32[2, 4] = view(%7, [2, 4])
  %9: f32[2, 4] = add.Tensor(%8, %1)
  return %9 as grad:0
""",
    )
    t, s = _inputs()
    (results,) = run_ranks(phase, [{slot: {"tangent:0": t, "saved:s": s}[str(slot)] for slot in phase.inputs}])
    (found,) = results.values()
    assert torch.equal(found, _transposed(t, torch.zeros_like(t), s))


def _named_strides(t: torch.Tensor, z: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    total = z + (s * t).t().contiguous().t()
    return torch.as_strided(total, (4, 2), (1, 4)).neg()


def test_explicit_strides_are_kept() -> None:
    program = _program(_named_strides)
    _drop(program, "0")
    phase = program.phases["backward"]
    assert not calls(phase, "full")
    (named,) = calls(phase, "as_strided")
    (source,) = named.all_input_nodes
    assert source.meta["val"].stride() == (4, 1)
    t, s = _inputs()
    (results,) = run_ranks(phase, [{slot: {"tangent:0": t, "saved:s": s}[str(slot)] for slot in phase.inputs}])
    (found,) = results.values()
    assert torch.equal(found, _named_strides(t, torch.zeros_like(t), s))


def test_results_keep_their_strides() -> None:
    program = _program(lambda t, z, s: s * z + (s * t).t().contiguous().t())
    _drop(program, "0")
    (result,) = program.phases["backward"].results
    assert result.meta["val"].stride() == (4, 1)
