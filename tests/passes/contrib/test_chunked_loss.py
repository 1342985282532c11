"""chunked-loss: computes the loss over a vocabulary, and its gradients, for some rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.export import Dim

from graphshard.codec.converter import decode_pass, encode_pass
from graphshard.errors import PassError
from graphshard.ir.graph import fake
from graphshard.ir.printer import print_phase
from graphshard.ir.program import Program
from graphshard.passes import ChunkedLoss
from graphshard.pipeline.pipeline import run_pass
from tests.helpers import calls, captured, step, through

BATCH, LENGTH, DIM, VOCAB = 2, 6, 8, 50
Loss = Callable[[Tensor, Tensor], Any]


class Language(nn.Module):
    """Tokens, a layer, a head and a loss."""

    def __init__(self, loss: Loss, *, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.loss = loss
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layer = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        return self.loss(self.head(self.layer(self.embed(tokens)).tanh()), targets)


def _mean(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _sum(logits: Tensor, targets: Tensor) -> Tensor:
    return 0.1 * F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), reduction="sum")


def _capped(logits: Tensor, targets: Tensor) -> Tensor:
    return _mean((logits / 3).tanh() * 3, targets)


def _in_part(logits: Tensor, targets: Tensor) -> Tensor:
    """Use the loss twice."""
    loss = _mean(logits, targets)
    return loss * loss


def _frozen(*names: str) -> Callable[[], Language]:
    def make() -> Language:
        model = Language(_mean, bias=True)
        for name in names:
            model.get_parameter(name).requires_grad_(False)
        return model

    return make


MODELS: dict[str, Callable[[], Language]] = {
    "mean": lambda: Language(_mean),
    "sum": lambda: Language(_sum),
    "bias": lambda: Language(_mean, bias=True),
    "tied": lambda: Language(_mean, tied=True),
    "capped": lambda: Language(_capped),
    "in part": lambda: Language(_in_part),
    "frozen head": _frozen("head.weight", "head.bias"),
    "frozen trunk": _frozen("embed.weight", "layer.weight", "layer.bias"),
}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _batches(*, ignored: int = 5) -> list[tuple[Tensor, Tensor]]:
    """Return batches of two ranks; the first targets are ignored."""
    batches = [(torch.randint(VOCAB, (BATCH, LENGTH)), torch.randint(VOCAB, (BATCH, LENGTH))) for _ in range(2)]
    for _, targets in batches:
        targets.view(-1)[:ignored] = -100
    return batches


def _program(model: nn.Module, rows: int | None, **options: Any) -> Program:
    program = captured(model, _batches()[0], **options)
    if rows is not None:
        run_pass(ChunkedLoss(rows), program)
    return program


class Bare(nn.Module):
    """Only a head and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(5, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, self.w), y)


def test_before_and_after() -> None:
    """The first of two chunks, and the combination of both."""
    program = captured(Bare(), (torch.ones(4, 3), torch.zeros(4, dtype=torch.long)))
    assert_expected_inline(
        print_phase(program.phases["joint"]),
        """\
  %0: f32[5, 3] = param:w
  %1: f32[4, 3] = input:0
  %2: i64[4] = input:1
  %3: f32[] = tangent:0  # (backward)
  %4: f32[3, 5] = t(%0)
  %5: f32[4, 5] = mm(%1, %4)
  %6: f32[4, 5] = _log_softmax(%5, 1, False)
  %7: f32[4, 5] = detach(%6)
  %8: (f32[], f32[]) = nll_loss_forward(%6, %2, None, 1, -100)
  %9: f32[] = getitem(%8, 0)
  %10: f32[] = getitem(%8, 1)
  %11: f32[4, 5] = nll_loss_backward(%3, %6, %2, None, 1, -100, %10)  # (backward)
  %12: f32[4, 5] = detach(%7)  # (backward)
  %13: f32[4, 5] = _log_softmax_backward_data(%11, %12, 1, f32)  # (backward)
  %14: f32[5, 4] = t(%13)  # (backward)
  %15: f32[5, 3] = mm(%14, %1)  # (backward)
  %16: f32[3, 5] = t(%15)  # (backward)
  %17: f32[5, 3] = t(%16)  # (backward)
  return %9 as output:0
  return %17 as grad:w
""",
    )
    run_pass(ChunkedLoss(2), program)
    lines = print_phase(program.phases["joint"]).splitlines()
    assert_expected_inline(
        "\n".join(lines[4:17]),
        """\
  %4: f32[3, 5] = t(%0)
  %5: f32[2, 3] = slice.Tensor(%1, 0, 0, 2)
  %6: i64[2] = slice.Tensor(%2, 0, 0, 2)
  %7: f32[2, 5] = mm(%5, %4)
  %8: f32[2, 5] = _log_softmax(%7, 1, False)
  %9: (f32[], f32[]) = nll_loss_forward(%8, %6, None, 2, -100)
  %10: f32[] = getitem(%9, 0)
  %11: f32[] = getitem(%9, 1)
  %12: f32[] = ones_like(%10)
  %13: f32[2, 5] = nll_loss_backward(%12, %8, %6, None, 2, -100, %11)
  %14: f32[2, 5] = _log_softmax_backward_data(%13, %8, 1, f32)
  %15: f32[5, 2] = t(%14)
  %16: f32[5, 3] = mm(%15, %5)""",
    )
    assert_expected_inline(
        "\n".join(lines[-11:]),
        """\
  %28: f32[2, 5] = _log_softmax_backward_data(%27, %20, 1, f32)
  %29: f32[5, 2] = t(%28)
  %30: f32[5, 3] = addmm(%16, %29, %17)
  %31: f32[] = div.Tensor(%24, %25)
  %32: f32[] = clamp_min(%25, 1)  # (backward)
  %33: f32[] = div.Tensor(%3, %32)  # (backward)
  %34: f32[5, 3] = mul.Tensor(%30, %33)  # (backward)
  %35: f32[3, 5] = t(%34)  # (backward)
  %36: f32[5, 3] = t(%35)  # (backward)
  return %31 as output:0
  return %36 as grad:w""",
    )


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_results_are_equal_up_to_rounding(name: str, policy: MixedPrecisionPolicy | None) -> None:
    """Losses and gradients, with a fully ignored chunk, and a shorter last chunk."""
    torch.manual_seed(0)
    model, batches = MODELS[name](), _batches()
    plain = through(_program(model, None, mp_policy=policy), "reorder")
    chunked = through(_program(model, 5, mp_policy=policy), "reorder")
    assert len(calls(chunked.phases["forward"], "_log_softmax")) == 3
    assert not calls(chunked.phases["backward"], "_log_softmax_backward_data")
    expected, found = (step(program, model, batches) for program in (plain, chunked))
    error = 1e-5 if policy is None else 2e-2
    for theirs, ours in zip(expected, found, strict=True):
        names = [name for name in theirs if name.startswith(("output", "grad"))]
        assert any(name.startswith("grad") for name in names)
        for each in names:
            largest = float(theirs[each].abs().max())
            torch.testing.assert_close(ours[each], theirs[each], rtol=error, atol=error * largest, msg=each)


def test_all_rows_ignored() -> None:
    """As in torch, the loss is NaN and the gradients are zero."""
    model, batches = Language(_mean), _batches(ignored=BATCH * LENGTH)
    for result in step(through(_program(model, 5), "reorder"), model, batches):
        assert result["output:0"].isnan()
        assert not result["grad:head.weight"].any()
        assert not result["grad:embed.weight"].any()


def test_never_holds_all_logits() -> None:
    """No value has the size of all logits; forward saves gradients, and backward does not gather the head."""
    program = through(_program(Language(_mean), 5), "reorder")
    nodes = [node for phase in program.phases.values() for node in phase.module.graph.nodes]
    tensors = [node for node in nodes if isinstance(node.meta.get("val"), Tensor)]
    assert (
        max(fake(node).numel() for node in tensors if VOCAB in fake(node).shape) == VOCAB * DIM < BATCH * LENGTH * VOCAB
    )
    saved = {str(slot) for slot in program.phases["backward"].inputs}
    assert "saved:head.weight" not in saved
    assert "param:head.weight" not in saved


def test_a_forward_alone() -> None:
    model, batches = Language(_mean), _batches()
    chunked = through(_program(model, 5, grad=False), "reorder")
    assert len(calls(chunked.phases["forward"], "mm")) == 3
    for result, batch in zip(step(chunked, model, batches), batches):
        torch.testing.assert_close(result["output:0"], model(*batch).detach())


class Clipped(torch.autograd.Function):
    """An operation that is not linear in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1e-3, 1e-3)


LEFT: dict[str, Loss] = {
    "returned": lambda logits, targets: (_mean(logits, targets), logits),
    "read elsewhere": lambda logits, targets: _mean(logits, targets) + logits.logsumexp(-1).mean(),
    "cut": lambda logits, targets: _mean(logits[:, :-1], targets[:, 1:]),
    "smoothed": lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "weighted": lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten(), weight=torch.ones(VOCAB)),
    "of each row": lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").sum(),
    "clipped": lambda logits, targets: _mean(Clipped.apply(logits), targets),
    "by words": lambda logits, targets: _mean(logits * torch.arange(VOCAB), targets),
    "along another dim": lambda logits, y: F.nll_loss(logits.flatten(0, 1).log_softmax(0), y.flatten()),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    program = _program(Language(LEFT[name]), None)
    before = print_phase(program.phases["joint"])
    assert ChunkedLoss(5).rewrite(program) == 0
    assert print_phase(program.phases["joint"]) == before


def test_left_alone_by_its_sizes() -> None:
    """Float16, no more rows than one chunk, and an unknown number of rows."""
    half = MixedPrecisionPolicy(param_dtype=torch.float16)
    assert ChunkedLoss(5).rewrite(_program(Language(_mean), None, mp_policy=half)) == 0
    assert ChunkedLoss(BATCH * LENGTH).rewrite(_program(Language(_mean), None)) == 0
    dynamic = {0: Dim("batch", min=2, max=64)}
    assert ChunkedLoss(5).rewrite(_program(Language(_mean), None, dynamic_shapes=(dynamic, dynamic))) == 0


def test_rejects_a_second_run() -> None:
    program = _program(Language(_mean), 5)
    assert ChunkedLoss(5).rewrite(program) == 0


def test_rejects_wrong_options() -> None:
    program = through(_program(Language(_mean), None), "partition")
    with pytest.raises(PassError, match="chunked-loss: the program is already partitioned; run this pass before 'par"):
        run_pass(ChunkedLoss(), program)
    with pytest.raises(PassError, match="chunked-loss: rows must be a number from 1 on, got 0"):
        run_pass(ChunkedLoss(0), _program(Language(_mean), None))


def test_dumps_hold_it() -> None:
    """With its option, so that `graphshard repro` can run it again."""
    assert decode_pass(encode_pass(ChunkedLoss(64))).step == ChunkedLoss(64)
