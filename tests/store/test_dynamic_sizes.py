"""Programs with dynamic sizes in the cache: a later launch with variable lengths compiles nothing."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard
from graphshard.frontend import capture
from graphshard.module import tracer
from tests.distributed.twins import assert_same, fsdp2, grads_of, world_mesh
from tests.ranks import Ranks

DIM, VOCAB = 16, 32


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).view(*x.shape[:2], 6, 8).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.out(F.gelu(found))


class _Net(nn.Module):
    def __init__(self, longest: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Embedding(longest, DIM)
        self.layers = nn.ModuleList(_Block() for _ in range(3))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _train(rank: int, world_size: int, cache: str, backend: str, lengths: list[int]) -> tuple[int, int, list[str]]:
    """Train on lengths, with FSDP2's bits in eager mode; return counts of traces and compilations, and messages."""
    torch.manual_seed(0)
    model, said = _Net(), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("graphshard.cache")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with (
            mock.patch.object(tracer, "run_pipeline", wraps=tracer.run_pipeline) as passes,
            mock.patch.object(capture, "trace_call", wraps=capture.trace_call) as traces,
        ):
            reference = fsdp2(copy.deepcopy(model), world_mesh())
            graphshard.compile(model, world_mesh(), backend=backend, cache=cache)
            for step, length in enumerate(lengths):
                tokens = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(step + 99 * rank))
                losses = []
                for each in (model, reference):
                    each.zero_grad()
                    losses.append(each(tokens))
                    losses[-1].backward()
                if backend == "eager":
                    assert torch.equal(*losses)
                    assert_same(grads_of(model), grads_of(reference), f"step {step}")
                else:
                    torch.testing.assert_close(*losses)
                    torch.testing.assert_close(grads_of(model), grads_of(reference))
    finally:
        logger.removeHandler(handler)
    return traces.call_count, passes.call_count, said


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.quick_cases("eager")
def test_variable_lengths(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    """The first length has its program, the second makes one for all."""
    cache, lengths = str(tmp_path / "cache"), [13, 21, 40, 9, 13, 64]
    first = ranks(2).run(_train, cache, backend, lengths)
    assert [each[1] for each in first] == [2, 2], first
    assert len(list(Path(cache).glob("*.gscache"))) == 2, first
    second = ranks(2).run(_train, cache, backend, lengths)
    assert [each[1] for each in second] == [0, 0], second
