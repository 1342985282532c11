"""Training with regions compiled by Inductor matches FSDP2's losses and gradients up to rounding."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard
import graphshard.lower.inductor
from tests.distributed.twins import fsdp2, grads_of, local, world_mesh
from tests.ranks import Ranks

pytestmark = pytest.mark.slow

# About the differences of torch.compile in float32.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


class _Attention(nn.Module):
    """Causal attention with a residual."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(heads.transpose(1, 2).flatten(2))


class _BatchNorm(nn.Module):
    """Batch norm and dropout, of odd width, so shards are uneven."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.norm(self.linear(x))), 0.2, self.training)


def _train_side_by_side(model: nn.Module, batches: list[dict[str, Tensor]]) -> nn.Module:
    """Train with graphshard and FSDP2; return the model compiled by graphshard."""
    mesh = world_mesh()
    # As set by torchrun: ranks then start with different regions.
    os.environ |= {"LOCAL_RANK": str(mesh.get_rank()), "LOCAL_WORLD_SIZE": str(mesh.size())}
    twin = fsdp2(copy.deepcopy(model), mesh)
    pair = graphshard.compile(model, mesh), twin
    optims = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair]
    for step, batch in enumerate(batches):
        losses = []
        for model, optim in zip(pair, optims):
            torch.manual_seed(step)  # for dropout
            loss = model(**batch).float().square().mean()
            optim.zero_grad()
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, **TOLERANCE, msg=f"losses of step {step}: {losses}")
        ours, theirs = map(grads_of, pair)
        for name, grad in ours.items():
            torch.testing.assert_close(local(grad), local(theirs[name]), **TOLERANCE)
        for optim in optims:
            optim.step()
    return pair[0]


def _transformer(rank: int, world_size: int) -> tuple[int, int]:
    model = nn.Sequential(*(_Attention() for _ in range(3)))
    torch.manual_seed(rank)
    model = _train_side_by_side(model, [{"input": torch.randn(2, 6, 8)} for _ in range(3)])
    (program,) = graphshard.programs(model)
    return program.num_regions, program.num_distinct_regions


def test_transformer_matches_fsdp2(ranks: Ranks) -> None:
    (num_regions, num_distinct), _ = ranks(2).run(_transformer)
    assert num_distinct < num_regions  # equal blocks are compiled once


def _batch_norm(rank: int, world_size: int) -> None:
    model = nn.Sequential(_BatchNorm(), _BatchNorm())
    torch.manual_seed(rank)
    model = _train_side_by_side(model, [{"input": torch.randn(5, 7)} for _ in range(3)])
    assert int(model[0].norm.num_batches_tracked) == 3


def test_batch_norm_and_dropout_match_fsdp2(ranks: Ranks) -> None:
    """Uneven shards, running statistics, and eager mode's random numbers."""
    ranks(2).run(_batch_norm)


def _with_failing_regions(rank: int, world_size: int) -> list[str]:
    compile_region = graphshard.lower.inductor.compile_fx_inner

    def fail_on_tanh(module: Any, *args: Any) -> Any:
        if any("tanh" in str(node.target) for node in module.graph.nodes):
            raise NotImplementedError("no kernel for tanh")
        return compile_region(module, *args)

    with (
        mock.patch("graphshard.lower.inductor.compile_fx_inner", fail_on_tanh),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        _batch_norm(rank, world_size)
    return [str(warning.message) for warning in caught if "Inductor cannot compile" in str(warning.message)]


def test_region_that_inductor_cannot_compile_runs_as_operators(ranks: Ranks) -> None:
    messages = ranks(2).run(_with_failing_regions)[0]
    assert messages
    for message in messages:
        assert message.startswith("Inductor cannot compile region_")
        assert message.endswith("; it runs as plain ATen operators. NotImplementedError: no kernel for tanh")
