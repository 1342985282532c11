"""reshard-after-forward: selects what backward gathers again and what forward keeps for it."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard.errors import PassError
from graphshard.ir.collective_regions import collectives
from graphshard.ir.graph import base_of, fake
from graphshard.ir.printer import print_program
from graphshard.ir.program import Program
from graphshard.passes import ReshardAfterForward
from graphshard.pipeline.pipeline import run_pass
from tests.helpers import Blocks, Scale, assert_gradients, captured, full_gradients, step, target_name, through

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class _Rooted(nn.Module):
    """Two units between two matrices of the root. All parameters are 4 by 4, no activation is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.blocks = Blocks(2)
        self.last = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).sin()
        for layer in self.blocks.layers:
            x = layer(x).sin()
        return self.last(x).sin().sum()


INPUT = (torch.randn(3, 4),)


def _marks(program: Program) -> str:
    nodes = program.phases["joint"].module.graph.nodes
    return "".join(f"{target_name(n)}: {n.meta['recompute'].name}\n" for n in nodes if "recompute" in n.meta)


def _saved(program: Program) -> dict[str, tuple[int, ...]]:
    """Return the shapes that forward saves for backward, by label."""
    forward = program.phases["forward"]
    pairs = zip(forward.outputs, forward.results, strict=True)
    return {str(slot): tuple(fake(n).shape) for slot, n in pairs if slot.kind not in ("output", "mutation")}


def _gathered_in_backward(program: Program) -> list[str]:
    return [name for c in collectives(program.phases["backward"]) if c.kind == "gather" for name in c.params]


def test_resharding_marks_the_operators_up_to_the_full_parameter() -> None:
    """shard -> cast -> gather -> wait -> cut: backward repeats all of it."""
    program = captured(Scale(4), (torch.ones(4),), world_size=3, mp_policy=BF16, reshard_after_forward=True)
    before = print_program(through(program, "mixed-precision"))
    run_pass(ReshardAfterForward(), program)
    assert_expected_inline(
        _marks(program),
        """\
_to_copy: MUST_RECOMPUTE
all_gather_into_tensor: MUST_RECOMPUTE
wait_tensor: MUST_RECOMPUTE
slice: MUST_RECOMPUTE
""",
    )
    after = print_program(program)
    assert (program.history[-1].rewrites, after.replace("  # (recompute)", "")) == (4, before)
    assert after.count("(recompute)") == 4


def test_keeping_marks_the_full_parameter() -> None:
    program = captured(Scale(4), (torch.ones(4),), world_size=3, mp_policy=BF16, reshard_after_forward=False)
    run_pass(ReshardAfterForward(), through(program, "mixed-precision"))
    assert_expected_inline(
        _marks(program),
        """\
slice: MUST_SAVE
""",
    )
    assert program.history[-1].rewrites == 1


@pytest.mark.parametrize("policy", [None, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_true_saves_no_full_parameter(world_size: int, policy: MixedPrecisionPolicy | None) -> None:
    program = captured(_Rooted(), INPUT, world_size=world_size, mp_policy=policy, reshard_after_forward=True)
    saved = _saved(through(program, "partition"))
    assert (4, 4) not in saved.values()
    assert {name for name in saved if name.startswith("param:")} >= {
        "param:last.weight",
        "param:blocks.layers.0.weight",
    }
    assert _gathered_in_backward(program) == ["last.weight", "blocks.layers.1.weight", "blocks.layers.0.weight"]


@pytest.mark.parametrize("policy", [None, BF16], ids=["f32", "bf16"])
def test_false_saves_every_full_parameter(policy: MixedPrecisionPolicy | None) -> None:
    program = captured(_Rooted(), INPUT, mp_policy=policy, reshard_after_forward=False)
    saved = _saved(through(program, "partition"))
    assert not _gathered_in_backward(program)
    # Backward needs all except first.weight, through which no input gradient passes.
    assert list(saved.values()).count((4, 4)) >= 3
    assert not any(name.startswith("param:") for name in saved)


class _Unbound(nn.Module):
    """Uses views of its parameters, also of one that does not divide by 2 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Parameter(torch.ones(2, 4))
        self.matrix = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, shift = self.pair.unbind(0)
        return ((x.sin() * scale * shift) @ self.matrix.t()).sin().sum()


@pytest.mark.parametrize("reshard", [True, False])
def test_no_view_of_a_gathered_parameter_is_saved(reshard: bool) -> None:
    """A view would keep the whole parameter, with its old value."""
    program = through(captured(_Unbound(), INPUT, reshard_after_forward=reshard), "partition")
    forward = program.phases["forward"]
    gathered = {wait for c in collectives(forward) if c.kind == "gather" for wait in c.waits}
    kept = [slot for node, slot in zip(forward.results, forward.outputs, strict=True) if base_of(node) in gathered]
    assert sorted(slot.name for slot in kept) == ([] if reshard else ["matrix", "pair"])
    assert all(slot.is_full for slot in kept)


def test_none_keeps_the_root() -> None:
    program = through(captured(_Rooted(), INPUT), "partition")
    assert _gathered_in_backward(program) == ["blocks.layers.1.weight", "blocks.layers.0.weight"]
    assert "param:last.weight" not in _saved(program)


def test_frozen_parameters_are_gathered_again() -> None:
    model = _Rooted()
    model.blocks.requires_grad_(False)
    program = through(captured(model, INPUT, reshard_after_forward=True), "partition")
    assert (4, 4) not in _saved(program).values()
    assert _gathered_in_backward(program) == ["last.weight", "blocks.layers.1.weight", "blocks.layers.0.weight"]


def test_a_second_run_changes_nothing() -> None:
    program = through(captured(_Rooted(), INPUT), "reshard-after-forward")
    marks = _marks(program)
    run_pass(ReshardAfterForward(), program)
    assert (program.history[-1].rewrites, _marks(program)) == (0, marks)


@pytest.mark.parametrize("reshard", [True, False])
def test_one_rank_has_nothing_to_gather(reshard: bool) -> None:
    program = captured(_Rooted(), INPUT, world_size=1, reshard_after_forward=reshard)
    run_pass(ReshardAfterForward(), program)
    assert (program.history[-1].rewrites, _marks(program)) == (0, "")


def test_inference_is_left_alone() -> None:
    program = through(captured(_Rooted(), INPUT, grad=False), "mixed-precision")
    before = print_program(program)
    run_pass(ReshardAfterForward(), program)
    assert (program.history[-1].rewrites, print_program(program)) == (0, before)


def test_it_runs_before_partition() -> None:
    program = through(captured(Scale(4), (torch.ones(4),)), "partition")
    with pytest.raises(PassError, match="reshard-after-forward: the program is already partitioned; run this pass"):
        run_pass(ReshardAfterForward(), program)


def test_gradients_do_not_depend_on_it() -> None:
    torch.manual_seed(0)
    model, batches = _Rooted(), [(torch.randn(3, 4),) for _ in range(3)]
    found = []
    for reshard in (False, True, None):
        program = captured(model, batches[0], world_size=3, reshard_after_forward=reshard)
        assert_gradients(through(program, "partition"), model, batches)
        found.append(full_gradients(program, step(program, model, batches)))
    for grads in found[1:]:
        torch.testing.assert_close(grads, found[0], rtol=0, atol=0)
