"""Counterparts of test_fully_shard_compile.py: compiled steps have the losses of eager steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphshard
from tests.distributed.twins import CountLaunches, assert_same, example_llama, fsdp2, params_of, world_mesh
from tests.ranks import Ranks
from tests.upstream.lockstep import own_rows, squares

TRAINED = ("wq", "wv")  # trained weights of the attention in models whose rest is frozen


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight * self.gain).relu()


class _Again(nn.Module):
    """Run every layer twice, and then the whole twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(_Gated() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(layer(x))
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return squares(x)


def _case(name: str) -> tuple[nn.Module, Any]:
    """Return a model and a function that returns the inputs of a step."""
    if name == "again":
        return _Again(), lambda step: {"x": own_rows(step)}
    if name == "one unit":
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        return model, lambda step: {"input": own_rows(step)}
    model, batch = example_llama(layers=2)
    for name_of, param in model.named_parameters():
        param.requires_grad_(name == "transformer" or any(part in name_of for part in TRAINED))

    def inputs(step: int) -> dict[str, Tensor]:
        torch.manual_seed(10 * step + torch.distributed.get_rank())
        return batch()

    return model, inputs


def _steps(rank: int, world_size: int, name: str, backend: str) -> None:
    model, inputs = _case(name)
    units = [] if name == "one unit" else ["layers.*"]
    theirs = fsdp2(copy.deepcopy(model), world_mesh(), units=units)
    ours = graphshard.compile(model, world_mesh(), units=units, backend=backend)
    optims = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in (ours, theirs)]
    for step in range(3):
        losses = []
        for each, optim in zip((ours, theirs), optims):
            loss = each(**inputs(step))
            loss = loss if loss.dim() == 0 else squares(loss)
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append({"loss": loss.detach()})
        if backend == "eager":
            assert_same(*losses, f"step {step}")
            assert_same(params_of(ours), params_of(theirs), f"parameters after step {step}")
        else:
            torch.testing.assert_close(*losses)
    assert len(graphshard.programs(ours)) == 1
    if name == "again":
        with CountLaunches() as count:
            ours(**inputs(0)).backward()
        assert (count.of("gather"), count.of("scatter")) == (6, 3)  # once in forward and once in backward


CASES = ["one unit", "again", "transformer", "frozen transformer"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick_cases("one unit")
def test_eager_backend(ranks: Ranks, name: str) -> None:
    """`TestFullyShardCompile.test_simple_mlp_fullgraph_backend_aot_eager`,
    `TestFullyShardCompile.test_simple_mlp_fullgraph_backend_aot_eager_decomp_partition`,
    `TestFullyShardCompile.test_nested_fully_shard_backend_aot_eager`,
    `TestFullyShardCompile.test_nested_fully_shard_backend_aot_eager_decomp_partition`,
    `TestFullyShardCompile.test_transformer_backend_aot_eager` and
    `TestFullyShardCompile.test_transformer_backend_aot_eager_decomp_partition`."""
    ranks(2).run(_steps, name, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_inductor_backend(ranks: Ranks, name: str) -> None:
    """`TestFullyShardCompile.test_simple_mlp_fullgraph_backend_inductor`,
    `TestFullyShardCompile.test_nested_fully_shard_backend_inductor_fullgraph_True`,
    `TestFullyShardCompile.test_nested_fully_shard_backend_inductor_fullgraph_True_graph_partition`,
    `TestFullyShardCompile.test_transformer_backend_inductor_fullgraph_True` and
    `TestFullyShardCompile.test_transformer_backend_inductor_fullgraph_True_graph_partition`."""
    ranks(2).run(_steps, name, "inductor")
