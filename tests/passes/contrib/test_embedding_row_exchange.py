"""embedding-row-exchange: sends rows of embeddings instead of tables and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.codec.converter import decode_pass, encode_pass
from graphshard.cost.costs import Costs
from graphshard.errors import PassError
from graphshard.ir.graph import is_collective
from graphshard.ir.operators import NAMING_GROUPS
from graphshard.ir.printer import print_phase
from graphshard.ir.program import Program
from graphshard.passes import EmbeddingRowExchange
from graphshard.pipeline.pipeline import run_pass
from tests.helpers import Tied, calls, captured, step, target_name, through

DIM = 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Words(nn.Module):
    """An embedding of a number of words."""

    def __init__(self, vocab: int = 8, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, DIM, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens).sin().sum()


class Twice(Words):
    """Two lookups in one table."""

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.embed(tokens) * self.embed(tokens.flip(0))).sum()


class Read(Words):
    """A table that is also used without a lookup."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.embed.weight.square().mean()


def _tokens(vocab: int, num_ranks: int) -> list[tuple[Tensor]]:
    """Return tokens with repeated words, on one rank and across ranks."""
    return [(torch.randint(vocab, (2, 10)),) for _ in range(num_ranks)]


def _programs(model: nn.Module, num_ranks: int, **options: Any) -> tuple[Program, Program]:
    """Return the program without the pass, and with it."""
    made = []
    for exchanged in (False, True):
        program = captured(model, (torch.zeros(2, 10, dtype=torch.long),), world_size=num_ranks, **options)
        through(program, "partition")
        if exchanged:
            run_pass(EmbeddingRowExchange(), program)
        made.append(through(program, "reorder"))
    return made[0], made[1]


def _sent(program: Program, phase: str) -> list[str]:
    """Return the collectives of a phase, in order."""
    nodes = program.phases[phase].module.graph.nodes
    return [target_name(node) for node in nodes if is_collective(node) or node.target in NAMING_GROUPS]


def test_before_and_after() -> None:
    program = through(captured(Words(), (torch.zeros(2, dtype=torch.long),)), "partition")
    run_pass(EmbeddingRowExchange(), program)
    assert_expected_inline(
        print_phase(program.phases["forward"]),
        """\
  %0: f32[4, 3] = param:embed.weight
  %1: i64[2] = input:0
  %14: i64[2] = view(%1, [-1])  # embed
  %15: i64[2, 1] = new_full(%14, [2, 1], 4)  # embed
  %16: i64[2, 1] = cumsum(%15, 0)  # embed
  %17: i64[2, 1] = sub.Tensor(%16, 4)  # embed
  %18: i64[2, 2] = sub.Tensor(%14, %17)  # embed
  %19: i64[4] = view(%18, [-1])  # embed
  %20: i64[4] = all_to_all(%19, [2, 2], [2, 2], shard)  # embed
  %21: i64[4] = clamp(%20, 0, 3)  # embed
  %22: f32[4, 3] = embedding(%0, %21)  # embed
  %23: f32[4, 3] = all_to_all(%22, [2, 2], [2, 2], shard)  # embed
  %24: i64[2] = div.Tensor_mode(%14, 4, rounding_mode=floor)  # embed
  %25: i64[2] = ones_like(%24)  # embed
  %26: i64[2] = cumsum(%25, 0)  # embed
  %27: i64[2] = sub.Tensor(%26, 1)  # embed
  %28: i64[2] = mul.Tensor(%24, 2)  # embed
  %29: i64[2] = add.Tensor(%28, %27)  # embed
  %30: i64[2] = view(%29, [2])  # embed
  %31: f32[2, 3] = embedding(%23, %30)  # embed
  %6: f32[2, 3] = sin(%31)
  %7: f32[] = sum(%6)
  return %7 as output:0
  return %1 as input:0
  return %31 as saved  # embed
""",
    )
    assert_expected_inline(
        "\n".join(print_phase(program.phases["backward"]).splitlines()[12:]),
        """\
  %38: i64[4] = all_to_all(%37, [2, 2], [2, 2], shard)
  %39: f32[2, 3] = view(%10, [2, 3])
  %40: f32[4, 3] = all_gather(%39, 2, shard)
  %41: b8[4] = ge.Scalar(%38, 0)
  %42: b8[4] = lt.Scalar(%38, 4)
  %43: b8[4] = logical_and(%41, %42)
  %44: i64[4] = sub.Tensor(%38, 4)
  %45: i64[4] = mul.Tensor(%44, %43)
  %46: i64[4] = add.Tensor(%45, 4)
  %47: f32[2, 3] = slice.Tensor(%40, 0, 0, 2)
  %48: i64[2] = slice.Tensor(%46, 0, 0, 2)
  %49: f32[5, 3] = embedding_dense_backward(%47, %48, 5, 4, False)
  %50: f32[4, 3] = slice.Tensor(%49, 0, 0, 4)
  %51: f32[2, 3] = slice.Tensor(%40, 0, 2, 4)
  %52: i64[2] = slice.Tensor(%46, 0, 2, 4)
  %53: f32[5, 3] = embedding_dense_backward(%51, %52, 5, 4, False)
  %54: f32[4, 3] = slice.Tensor(%53, 0, 0, 4)
  %55: f32[4, 3] = add.Tensor(%50, %54)
  %56: f32[4, 3] = div.Tensor(%55, 2)
  return %56 as grad:embed.weight""",
    )


MODELS: dict[str, tuple[type[Words], dict[str, Any]]] = {
    "even": (Words, {"vocab": 12}),
    "uneven": (Words, {"vocab": 13}),
    "fewer words than ranks": (Words, {"vocab": 1}),
    "padding": (Words, {"vocab": 13, "padding_idx": 2}),
}


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.quick_cases("even-2-bf16", "fewer words than ranks-3-bf16", "padding-3-fp32")
def test_results_are_equal_on_every_rank(name: str, num_ranks: int, policy: MixedPrecisionPolicy | None) -> None:
    """Bit for bit on two ranks; the table is never gathered, nor its gradient reduced."""
    torch.manual_seed(0)
    kind, options = MODELS[name]
    model = kind(**options)
    plain, exchanged = _programs(model, num_ranks, mp_policy=policy)
    assert _sent(exchanged, "forward") == ["all_to_all", "all_to_all"]
    assert _sent(exchanged, "backward") == ["all_to_all", "all_gather"]
    batches = _tokens(options["vocab"], num_ranks)
    tolerance = {"rtol": 0, "atol": 0} if num_ranks == 2 else {"rtol": 1e-2 if policy else 1e-5, "atol": 1e-6}
    for rank, (theirs, ours) in enumerate(zip(step(plain, model, batches), step(exchanged, model, batches))):
        assert torch.equal(theirs["output:0"], ours["output:0"])
        row = plain.params["embed.weight"]
        grads = (row.without_padding(each["grad:embed.weight"], rank) for each in (ours, theirs))
        torch.testing.assert_close(*grads, **tolerance)


def test_two_lookups() -> None:
    """Both are exchanged; the sum of their gradients is reduced as before."""
    model = Twice(13)
    plain, exchanged = _programs(model, 2)
    assert _sent(exchanged, "forward") == ["all_to_all"] * 4
    assert _sent(exchanged, "backward") == ["reduce_scatter_tensor"]
    batches = _tokens(13, 2)
    for theirs, ours in zip(step(plain, model, batches), step(exchanged, model, batches)):
        for name in ("output:0", "grad:embed.weight"):
            assert torch.equal(theirs[name], ours[name])


def test_gradients_by_frequency_are_reduced() -> None:
    """The frequency of a word on one rank is unknown on the others."""
    _, exchanged = _programs(Words(13, scale_grad_by_freq=True), 2)
    assert _sent(exchanged, "forward") == ["all_to_all"] * 2
    assert _sent(exchanged, "backward") == ["reduce_scatter_tensor"]


@pytest.mark.parametrize("model", [Tied(), Read()], ids=["tied", "read"])
def test_left_alone(model: nn.Module) -> None:
    program = through(captured(model, (torch.zeros(2, dtype=torch.long),)), "partition")
    before = print_phase(program.phases["forward"]), print_phase(program.phases["backward"])
    assert EmbeddingRowExchange().rewrite(program) == 0
    assert (print_phase(program.phases["forward"]), print_phase(program.phases["backward"])) == before


def test_rejects_an_invalid_word() -> None:
    """Also a word whose row would be in the padding of the last shard."""
    model = Words(13)
    _, exchanged = _programs(model, 2)
    for word in (-1, 13, 14):
        batches = _tokens(13, 2)
        batches[0][0][0, 0] = word
        with pytest.raises(IndexError, match="index out of range"):
            step(exchanged, model, batches)


def test_a_forward_alone() -> None:
    model, batches = Words(13), _tokens(13, 2)
    program = captured(model, batches[0], grad=False)
    run_pass(EmbeddingRowExchange(), through(program, "partition"))
    assert calls(program.phases["forward"], "all_to_all")
    for result, (tokens,) in zip(step(program, model, batches), batches):
        assert torch.equal(result["output:0"], model(tokens).detach())


def _large(tokens: int) -> Program:
    """Build the embedding of a Llama 8B on 8 ranks, in bf16."""
    with torch.device("meta"):
        model = nn.Embedding(128256, 4096)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    words = torch.zeros(1, tokens, dtype=torch.long)
    return through(captured(model, (words,), world_size=8, mp_policy=policy), "partition")


def test_applies_where_it_pays() -> None:
    """On H100s: both directions with 4,096 tokens on a rank; with 131,072 the rows exceed the table."""
    step = EmbeddingRowExchange(Costs(graphshard.profiling.load_profile("h100")))
    assert step.rewrite(_large(4096)) == 2
    assert step.rewrite(_large(2**17)) == 0


def test_twice() -> None:
    program = through(captured(Words(), _tokens(8, 1)[0]), "partition")
    run_pass(EmbeddingRowExchange(), program)
    assert EmbeddingRowExchange().rewrite(program) == 0


def test_wrong_use() -> None:
    with pytest.raises(
        PassError, match="embedding-row-exchange: insert this pass after 'partition' and before 'overlap-mode"
    ):
        run_pass(EmbeddingRowExchange(), captured(Words(), _tokens(8, 1)[0]))


def test_dumps_hold_it() -> None:
    """With its costs, so that `graphshard repro` can run it again."""
    step = EmbeddingRowExchange(Costs(graphshard.profiling.load_profile("h100")))
    assert decode_pass(encode_pass(step)).step == step
