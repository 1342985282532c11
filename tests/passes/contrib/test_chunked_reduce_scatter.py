"""chunked-reduce-scatter: reduces the gradient of a head piece by piece, as `vocab-sharded-loss` computes it."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from graphshard.codec.converter import decode_pass, encode_pass
from graphshard.errors import PassError
from graphshard.ir.printer import print_phase
from graphshard.passes import ChunkedReduceScatter, EmbeddingRowExchange, VocabShardedLoss
from graphshard.pipeline.pipeline import run_pass
from tests.helpers import captured, step, through
from tests.passes.contrib.test_chunked_loss import MODELS, Bare, Language, _batches, _mean
from tests.passes.contrib.test_vocab_sharded_loss import _count, _program


def test_before_and_after() -> None:
    """Pieces of two rows, and of one, of each rank; the last piece to arrive is the first part of the shard."""
    program = through(captured(Bare(), (torch.ones(4, 3), torch.zeros(4, dtype=torch.long))), "mixed-precision")
    run_pass(VocabShardedLoss(2), program)
    run_pass(ChunkedReduceScatter(), through(program, "partition"))
    assert_expected_inline(
        "\n".join(print_phase(program.phases["backward"]).splitlines()[-9:]),
        """\
  %166: f32[4, 1] = unsqueeze(%165, 1)
  %167: f32[4, 1] = neg(%166)
  %168: f32[4, 4] = scatter_add(%155, 1, %164, %167)
  %169: f32[4, 4] = mul.Tensor(%168, %118)
  %170: f32[4, 4] = t(%169)
  %171: f32[4, 3] = mm(%170, %1)
  %178: f32[2, 3] = reduce_scatter(%171, avg, 2, shard)
  %179: f32[3, 3] = cat([%178, %177])
  return %179 as grad:w""",
    )


@pytest.mark.slow
def test_reduced_as_a_whole() -> None:
    """Without `chunked-reduce-scatter`, with the same bits on two ranks."""
    model, batches = Language(_mean), _batches()
    whole = through(captured(model, batches[0]), "mixed-precision")
    run_pass(VocabShardedLoss(4), whole)
    through(whole, "reorder")
    assert _count(whole, "reduce_scatter", "start_reduce_scatter") == (0, 0)
    for theirs, ours in zip(*(step(program, model, batches) for program in (whole, _program(model, 4)))):
        assert torch.equal(theirs["grad:head.weight"], ours["grad:head.weight"])


@pytest.mark.slow
def test_a_tied_table_is_never_gathered_or_reduced_whole() -> None:
    """Its pieces are reduced as they are computed, and the gradient of the lookup is sent as rows."""
    torch.manual_seed(0)
    model, batches = MODELS["tied"](), _batches()
    plain = _program(model, None)
    program = through(captured(model, batches[0]), "mixed-precision")
    run_pass(VocabShardedLoss(4), program)
    through(program, "partition")
    run_pass(ChunkedReduceScatter(), program)
    run_pass(EmbeddingRowExchange(), program)
    through(program, "reorder")
    assert program.plan is not None
    assert all("embed.weight" not in bucket.members for bucket in program.plan.buckets)
    assert _count(program, "start_reduce_scatter", "reduce_scatter") == (0, 4)
    assert _count(program, "start_all_to_all", "all_to_all") == (2, 1)
    for theirs, ours in zip(*(step(each, model, batches) for each in (plain, program)), strict=True):
        for name in ("output:0", "grad:embed.weight", "grad:layer.weight"):
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6, msg=name)


def test_rejects_a_second_run() -> None:
    program = through(captured(Language(_mean), _batches()[0]), "mixed-precision")
    run_pass(VocabShardedLoss(4), program)
    through(program, "partition")
    assert ChunkedReduceScatter().rewrite(program) == 1
    assert ChunkedReduceScatter().rewrite(program) == 0
    assert EmbeddingRowExchange().rewrite(program) > 0  # can follow


def test_rejects_wrong_options() -> None:
    program = captured(Language(_mean), _batches()[0])
    with pytest.raises(
        PassError, match="chunked-reduce-scatter: insert this pass after 'partition' and before 'overlap-"
    ):
        run_pass(ChunkedReduceScatter(), program)


def test_dumps_hold_it() -> None:
    assert decode_pass(encode_pass(ChunkedReduceScatter())).step == ChunkedReduceScatter()
