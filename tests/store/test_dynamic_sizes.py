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
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.frontend import capture
from graphshard.module import tracer
from tests.distributed.twins import assert_same, fsdp2, grads_of, world_mesh
from tests.ranks import FakeWorld, Ranks

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
    """The first length has its program, the second makes one for all. A later launch may begin with any length."""
    cache, lengths = str(tmp_path / "cache"), [13, 21, 40, 9, 13, 64]
    first = ranks(2).run(_train, cache, backend, lengths)
    assert max(each[1] for each in first) == 2, first  # a late rank may find the program of a fast one
    assert len(list(Path(cache).glob("*.gscache"))) == 2, first
    for later in (lengths, [64, 13, 5]):
        found = ranks(2).run(_train, cache, backend, later)
        assert [each[:2] for each in found] == [(0, 0), (0, 0)], found
    # A guard of the trace says at least 3.
    found = ranks(2).run(_train, cache, backend, [2, 9])
    assert [each[:2] for each in found] == [(1, 1), (1, 1)], found


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.lin(x), self.lin(y)
        return x.sum() * y.std() if x.shape[0] > 40 else x.sum() * y.sum()


def _launch(cache: Path, pairs: list[tuple[Tensor, Tensor]]) -> int:
    """Compare losses with Python's; return the number of traces."""
    torch.manual_seed(0)
    model = _Two()
    expected = [copy.deepcopy(model)(*pair) for pair in pairs]
    with mock.patch.object(capture, "trace_call", wraps=capture.trace_call) as traces:
        graphshard.compile(model, init_device_mesh("cpu", (1,)), backend="eager", cache=cache)
        for pair, loss in zip(pairs, expected):
            assert torch.equal(model(*pair), loss)
    return traces.call_count


def _pair(first: int, second: int) -> tuple[Tensor, Tensor]:
    return torch.arange(4.0 * first).view(first, 4).clone(), torch.arange(4.0 * second).view(second, 4).clone()


@pytest.mark.parametrize(
    ("pair", "traces"),
    [
        (_pair(8, 8), 0),
        (_pair(8, 9), 0),
        (_pair(41, 41), 1),
        ((torch.ones(4, 8).t(), torch.ones(8, 4)), 1),
        ((torch.ones(8, 4, requires_grad=True), torch.ones(8, 4)), 1),
        ((torch.ones(8, 4), torch.arange(32.0).view(8, 4)), 0),
    ],
    ids=["alike", "lengths differ", "another branch", "strides", "requires_grad", "a view"],
)
def test_other_inputs_are_traced(
    fake_world: FakeWorld, tmp_path: Path, pair: tuple[Tensor, Tensor], traces: int
) -> None:
    """A record of a trace serves only the inputs that its guards hold for."""
    fake_world(1)
    assert _launch(tmp_path, [_pair(5, 5), _pair(7, 7)]) == 2
    assert _launch(tmp_path, [_pair(7, 7), _pair(6, 6)]) == 0
    assert _launch(tmp_path, [pair]) == traces
    assert _launch(tmp_path, [_pair(6, 6), pair, _pair(7, 7)]) == 0
