"""Coalesced collectives of the model have the bits of separate ones, on any number of ranks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import graphshard
from graphshard.ir.operators import ALL_GATHER, ALL_REDUCE, COALESCED_FORMS, REDUCE_SCATTER
from tests.distributed.context_parallel import ATTENTIONS, Decoder, own, sequences
from tests.distributed.context_parallel import mesh_of as mesh_of_sequences
from tests.distributed.tensor_parallel import llama, mesh_of, tokens
from tests.distributed.twins import assert_same, grads_of
from tests.ranks import Ranks

ALONE = graphshard.Pipeline().disable("coalesce-model-collectives")
ARGUMENTS = {ALL_REDUCE: ("sum",), ALL_GATHER: (4,), REDUCE_SCATTER: ("sum", 4)}


def _operators(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    world = dist.group.WORLD
    assert world is not None
    values = [torch.randn(4 * length, 3).t().contiguous().t() for length in (1, 7, 1000)]
    for alone, arguments in ARGUMENTS.items():
        given = [value if alone is ALL_GATHER else value.contiguous() for value in values]
        together = COALESCED_FORMS[alone](given, *arguments, world.group_name)
        for value, result in zip(given, together, strict=True):
            assert torch.equal(result, alone(value, *arguments, world.group_name))


def test_operators(ranks: Ranks) -> None:
    """Gloo adds four ranks' values in an order that depends on the tensor."""
    ranks(4).run(_operators)


def _sums_of_norms(rank: int, world_size: int) -> tuple[Counter[str], Counter[str]]:
    mesh = mesh_of(2, 2)
    pair = [graphshard.compile(llama(mesh["tp"]), mesh, backend="eager", passes=p) for p in (None, ALONE)]
    results: list[dict[str, Tensor]] = []
    for model in pair:
        torch.manual_seed(rank // 2)
        loss = model(*tokens())
        loss.backward()
        results.append({"loss": loss.detach(), **grads_of(model)})
    assert_same(*results, "losses and gradients")
    joined, single = (Counter(graphshard.programs(model)[0].communication) for model in pair)
    return joined, single


@pytest.mark.slow
def test_gradients_of_norms_are_coalesced(ranks: Ranks) -> None:
    """Both norms of a block are reduced together, without waiting for norms of another block."""
    for joined, single in ranks(4).run(_sums_of_norms):
        assert single["backward: all_reduce over tp"] == 5
        assert (joined["backward: all_reduce_coalesced over tp"], joined["backward: all_reduce over tp"]) == (2, 1)


def _keys_and_values(rank: int, world_size: int) -> list[str]:
    mesh = mesh_of_sequences(2, 2)
    results: list[dict[str, Tensor]] = []
    for passes in (ALONE, None):
        model = Decoder(ATTENTIONS["gathered"], mesh["cp"])
        graphshard.compile(model, mesh, backend="eager", passes=passes)
        loss = model(*(own(sequence, mesh["cp"]) for sequence in sequences(0, mesh)))
        loss.backward()
        results.append({"loss": loss.detach(), **grads_of(model)})
    assert_same(*results, "losses and gradients")
    return graphshard.programs(model)[0].communication


@pytest.mark.slow
def test_gathers_of_keys_and_values_are_coalesced(ranks: Ranks) -> None:
    for lines in ranks(4).run(_keys_and_values):
        assert lines.count("forward: all_gather_coalesced over dp_shard_cp/2") == 2
        assert "forward: all_gather over dp_shard_cp/2" not in lines
