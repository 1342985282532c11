"""vocab-sharded-loss: computes the loss over a vocabulary for some words at a time, from pieces of the head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.export import Dim

from graphshard.codec.converter import decode_pass, encode_pass
from graphshard.errors import PassError
from graphshard.ir.graph import aten, fake
from graphshard.ir.printer import print_phase
from graphshard.ir.program import Program
from graphshard.passes import ChunkedReduceScatter, VocabShardedLoss
from graphshard.pipeline.pipeline import run_pass
from tests.helpers import calls, captured, step, through
from tests.passes.contrib.test_chunked_loss import (
    BATCH,
    BF16,
    DIM,
    LENGTH,
    MODELS,
    VOCAB,
    Bare,
    Language,
    _batches,
    _mean,
)

CUT = ["mean", "sum", "capped", "in part", "frozen head", "frozen trunk", "tied", "bias"]


def _program(model: nn.Module, pieces: int | None, batch: tuple[Tensor, ...] | None = None, **options: Any) -> Program:
    program = through(captured(model, batch or _batches()[0], **options), "mixed-precision")
    if pieces is not None:
        run_pass(VocabShardedLoss(pieces), program)
        run_pass(ChunkedReduceScatter(), through(program, "partition"))
    return through(program, "reorder")


def test_before_and_after() -> None:
    """Pieces of two rows, and of one, of each rank; the last word is padding."""
    program = through(captured(Bare(), (torch.ones(4, 3), torch.zeros(4, dtype=torch.long))), "mixed-precision")
    run_pass(VocabShardedLoss(2), program)
    lines = print_phase(program.phases["joint"]).splitlines()
    assert_expected_inline(
        "\n".join(line for line in lines if _is_shown(line)),
        """\
  %25: f32[4, 3] = start_all_gather(%24, 2, shard)
  %34: f32[2, 3] = start_all_gather(%33, 2, shard)
  %35: f32[4, 3] = wait(%25)
  %37: f32[4, 4] = mm(%1, %36)
  %56: f32[2, 3] = wait(%34)
  %64: f32[2, 3] = masked_fill.Scalar(%56, %63, 0)
  %66: f32[4, 2] = mm(%1, %65)
  %75: f32[4, 2] = masked_fill.Scalar(%66, %74, -inf)
  %121: f32[4, 3] = start_all_gather(%120, 2, shard)  # (backward)
  %123: f32[4, 2] = mm(%1, %122)  # (backward)
  %132: f32[4, 2] = masked_fill.Scalar(%123, %131, -inf)  # (backward)
  %150: f32[2, 3] = mm(%149, %1)  # (backward)
  %151: f32[4, 3] = wait(%121)  # (backward)
  %153: f32[4, 4] = mm(%1, %152)  # (backward)
  %171: f32[4, 3] = mm(%170, %1)  # (backward)
  %174: f32[2, 3, 3] = cat([%172, %173], 1)  # (backward)
  return %106 as output:0
  return %23 as grad:w""",
    )


def _is_shown(line: str) -> bool:
    """Return whether the golden shows the line: gathers, matmuls and results."""
    return any(
        word in line for word in ("start_all_gather", " wait(", " mm(", "addmm(", "masked_fill", "cat(", "return")
    )


def _model(name: str) -> Language:
    torch.manual_seed(0)
    model = MODELS[name]()
    if name.startswith("frozen"):
        model.head = nn.Linear(DIM, VOCAB, bias=False).requires_grad_(name != "frozen head")
    return model


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in CUT), ("mean", 3), ("bias", 3)])
@pytest.mark.quick_cases("mean-3-bf16")
def test_results_are_equal_up_to_rounding(name: str, ranks: int, policy: MixedPrecisionPolicy | None) -> None:
    """Losses and gradients; shards of three ranks are uneven, with NaN padding."""
    model, batches = _model(name), [*_batches(), *_batches()][:ranks]
    plain, pieced = (_program(model, pieces, mp_policy=policy, world_size=ranks) for pieces in (None, 4))
    assert _count(pieced, "start_all_gather") == (4, 3)
    assert _count(pieced, "reduce_scatter", "start_reduce_scatter") == (
        0,
        4 * (name != "frozen head") + (name == "tied"),
    )
    assert _count(pieced, "_log_softmax") == (0, 0)
    expected, found = (step(program, model, batches) for program in (plain, pieced))
    error = 1e-5 if policy is None else 2e-2
    for rank, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        names = [name for name in theirs if name.startswith(("output", "grad"))]
        assert any(name.startswith("grad") for name in names)
        for each in names:
            own, their = ours[each], theirs[each]
            if each.startswith("grad"):
                row = plain.params[each.removeprefix("grad:")]
                own, their = (row.without_padding(value, rank) for value in (own, their))
            largest = float(their.abs().max())
            torch.testing.assert_close(own, their, rtol=error, atol=error * largest, msg=each)


def _count(program: Program, *names: str) -> tuple[int, ...]:
    """Count the calls of operators in each phase."""
    return tuple(sum(len(calls(phase, name)) for name in names) for phase in program.phases.values())


@pytest.mark.slow
def test_never_holds_the_whole_head_or_logits() -> None:
    """No value has a row or a column for each word, and the head is never gathered or reduced whole."""
    program = _program(Language(_mean), 4)
    nodes = [node for phase in program.phases.values() for node in phase.module.graph.nodes if node.op != "placeholder"]
    tensors = [fake(node) for node in nodes if isinstance(node.meta.get("val"), Tensor)]
    assert max(t.numel() for t in tensors if DIM not in t.shape) <= 14 * BATCH * LENGTH  # seven words of two ranks
    of_head = [bucket for bucket in program.plan.buckets if "head.weight" in bucket.members] if program.plan else None
    assert of_head == []


def test_gathers_overlap_matmuls() -> None:
    """The first piece overlaps the layers before the head, each other piece overlaps the previous piece's matmul."""
    program = _program(Language(_mean), 4)
    for phase in program.phases.values():
        nodes = list(phase.module.graph.nodes)
        for begun in calls(phase, "start_all_gather"):
            (settled,) = begun.users
            between = nodes[nodes.index(begun) : nodes.index(settled)]
            assert any(node.target in (aten.mm.default, aten.addmm.default) for node in between)


def test_all_rows_ignored() -> None:
    """As in torch, the loss is NaN and the gradients are zero."""
    model, batches = Language(_mean), _batches(ignored=BATCH * LENGTH)
    for result in step(_program(model, 4), model, batches):
        assert result["output:0"].isnan()
        assert not result["grad:head.weight"].any()
        assert not result["grad:embed.weight"].any()


@pytest.mark.parametrize("word", [-1, VOCAB, VOCAB + 1])
@pytest.mark.quick_cases("-1")
def test_rejects_an_invalid_word(word: int) -> None:
    """Also a word whose row would be in the padding of the last shard."""
    model = Language(_mean)
    program = _program(model, 4, world_size=3)
    batches = [*_batches(), *_batches()][:3]
    batches[0][1].view(-1)[-1] = word
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        step(program, model, batches)


def test_a_forward_alone() -> None:
    model, batches = Language(_mean), _batches()
    pieced = _program(model, 4, grad=False)
    assert _count(pieced, "start_all_gather") == (4,)
    for result, batch in zip(step(pieced, model, batches), batches):
        torch.testing.assert_close(result["output:0"], model(*batch).detach())


class _ReadTwice(Language):
    """A tied head that is also used without a lookup."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return super().forward(tokens, targets) + self.head.weight.square().mean()


def test_left_alone() -> None:
    """A head with another use."""
    program = through(captured(_ReadTwice(_mean, tied=True), _batches()[0]), "mixed-precision")
    before = print_phase(program.phases["joint"])
    assert VocabShardedLoss(4).rewrite(program) == 0
    assert print_phase(program.phases["joint"]) == before


def test_left_alone_by_its_dtype_and_its_sizes() -> None:
    half = MixedPrecisionPolicy(param_dtype=torch.float16)
    dynamic = {0: Dim("batch", min=2, max=64)}
    for options in ({"mp_policy": half}, {"dynamic_shapes": (dynamic, dynamic)}, {"world_size": 1}):
        program = through(captured(Language(_mean), _batches()[0], **options), "mixed-precision")
        assert VocabShardedLoss(4).rewrite(program) == 0


def test_twice() -> None:
    program = through(captured(Language(_mean), _batches()[0]), "mixed-precision")
    assert VocabShardedLoss(4).rewrite(program) == 1
    assert VocabShardedLoss(4).rewrite(program) == 0


def test_wrong_use() -> None:
    program = captured(Language(_mean), _batches()[0])
    with pytest.raises(
        PassError, match="vocab-sharded-loss: insert this pass after 'mixed-precision' and before 'partition'"
    ):
        run_pass(VocabShardedLoss(), program)
    with pytest.raises(PassError, match="vocab-sharded-loss: pieces must be a number from 2 on, got 1"):
        run_pass(VocabShardedLoss(1), through(program, "mixed-precision"))
    with pytest.raises(PassError, match="vocab-sharded-loss: insert this pass after 'mixed-precision'"):
        run_pass(VocabShardedLoss(), through(program, "partition"))


def test_dumps_hold_it() -> None:
    """With its option, so that `graphshard repro` can run it again."""
    assert decode_pass(encode_pass(VocabShardedLoss(8))).step == VocabShardedLoss(8)
