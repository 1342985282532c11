"""Attention over packed sequences by `varlen_attn`: two programs for all lengths, also for GPUs that are not here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphshard
from tests.field.trials import assert_equal, full, gradients, on_fsdp2, on_graphshard, on_plain_torch
from tests.ranks import Ranks

varlen = pytest.importorskip("torch.nn.attention.varlen")


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, offsets: Tensor, longest: int) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(1)
        mixed = varlen.varlen_attn(q, k, v, offsets, offsets, longest, longest)
        return x + self.out(mixed.flatten(1))


class _Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Attention(width) for _ in range(2))

    def forward(self, x: Tensor, offsets: Tensor, longest: int) -> Tensor:
        for layer in self.layers:
            x = layer(x, offsets, longest)
        return x.float().square().mean()


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(1, 2) / q.shape[-1] ** 0.5


def _sequences(offsets: Tensor, *tensors: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield the place of each sequence, and its part of tensors by heads."""
    for start, end in itertools.pairwise(offsets.tolist()):
        yield slice(start, end), [tensor[start:end].transpose(0, 1) for tensor in tensors]


def _forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, sums = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for place, (qs, ks, vs) in _sequences(offsets, q, k, v):
        scores = _scores(qs, ks)
        out[place], sums[:, place] = (scores.softmax(-1) @ vs).transpose(0, 1), scores.logsumexp(-1)
    return out, sums, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, offsets: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(each) for each in (q, k, v))
    for place, (qs, ks, vs, grads) in _sequences(offsets, q, k, v, grad):
        weights = _scores(qs, ks).softmax(-1)
        of_weights = grads @ vs.transpose(1, 2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
        dq[place], dk[place] = (of_scores @ ks).transpose(0, 1), (of_scores.transpose(1, 2) @ qs).transpose(0, 1)
        dv[place] = (weights.transpose(1, 2) @ grads).transpose(0, 1)
    return dq, dk, dv


def _train(model: nn.Module) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for ends in ([5, 20], [3, 9, 12], [7, 30], [2, 4], [1, 2, 3, 16]):
        offsets = torch.tensor([0, *ends], dtype=torch.int32)
        loss = model(torch.randn(ends[-1], 8), offsets, int(offsets.diff().max()))
        loss.backward()
        found += [loss, *(grad if grad is None else full(grad) for grad in gradients(model))]
    return found


def _trial(rank: int, world_size: int) -> int:
    # Torch has kernels for GPUs only.
    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)
    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(_Net())
        return made[-1]

    expected = on_plain_torch(build, _train)
    assert_equal(on_fsdp2(build, _train), expected)
    assert_equal(on_graphshard(build, _train), expected)
    return len(graphshard.programs(made[-1]))


def test_packed_sequences(ranks: Ranks) -> None:
    assert ranks(2).run(_trial) == [2, 2]


@pytest.mark.slow
def test_packed_sequences_on_absent_gpus(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    example = (torch.zeros(20, 64).bfloat16(), torch.tensor([0, 5, 20], dtype=torch.int32), 15)
    found = graphshard.explain(_Net(64).bfloat16(), (2,), example_inputs=example, device="cuda")
    assert found.flop > 0
    path = tmp_path / "model.gshard"
    given: dict[str, Any] = {"example_inputs": example, "device": "cuda", "capability": (9, 0)}
    graphshard.export(_Net(64).bfloat16(), (2,), path, **given)
    assert path.stat().st_size
