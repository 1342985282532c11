"""Exchanging embedding rows instead of gathering the table, as FSDP2 does: equal bits on two shards."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.passes import EmbeddingRowExchange
from tests.distributed.twins import POLICIES, example_llama, fsdp2, grads_of, local, train_side_by_side
from tests.ranks import Ranks

ALL_TO_ALL = graphshard.Pipeline().insert(EmbeddingRowExchange(), before="overlap-model-collectives")


def _pair(shape: Sequence[int], policy: str, **options: object) -> tuple[torch.nn.Module, torch.nn.Module]:
    names = ("replicate", "shard")[2 - len(shape) :]
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
    torch.manual_seed(0)
    model, _ = example_llama()
    twin = fsdp2(copy.deepcopy(model), mesh, mp_policy=POLICIES[policy])
    options = {"backend": "eager", **options}
    ours = graphshard.compile(model, mesh, mp_policy=POLICIES[policy], passes=ALL_TO_ALL, **options)
    return ours, twin


def _train(rank: int, world_size: int, shape: Sequence[int], policy: str) -> list[str]:
    pair = _pair(shape, policy)
    train_side_by_side(pair, example_llama()[1], steps=5)
    return graphshard.programs(pair[0])[0].communication


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["fsdp", "hsdp"])
@pytest.mark.quick_cases("fsdp-bf16")
def test_matches_fsdp2(ranks: Ranks, shape: tuple[int, ...], policy: str) -> None:
    """Losses, gradients, norms and parameters of AdamW, bit for bit; with replicas only forward exchanges rows."""
    for lines in ranks(2 * len(shape)).run(_train, shape, policy):
        assert lines.count("forward: all_to_all over shard") == 2
        assert lines.count("backward: all_gather over shard") == (len(shape) == 1)


def _close(rank: int, world_size: int) -> None:
    pair = _pair((world_size,), "fp32")
    _, batch = example_llama()
    for accumulate in (1, 2):
        for model in pair:
            for microbatch in range(accumulate):
                torch.manual_seed(10 * microbatch + rank)
                model.set_requires_gradient_sync(microbatch == accumulate - 1)
                model(**batch()).backward()
        grads, expected = map(grads_of, pair)
        for name, grad in expected.items():
            torch.testing.assert_close(local(grads[name]), local(grad), rtol=1e-5, atol=1e-6, msg=name)
        for model in pair:
            model.zero_grad()


@pytest.mark.slow
def test_on_four_ranks(ranks: Ranks) -> None:
    """Up to rounding; the last of two microbatches reduces the sum."""
    ranks(4).run(_close)


def _whole_step(rank: int, world_size: int) -> None:
    pair = _pair((2,), "fp32")
    _, batch = example_llama()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in pair]
    step = graphshard.compile_step(pair[0], optimizers[0])
    for number in range(4):
        torch.manual_seed(10 * number + rank)
        given = batch()
        loss = step(**given)
        expected = pair[1](**given)
        expected.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert torch.equal(loss, expected.detach())
        for (name, ours), theirs in zip(pair[0].named_parameters(), pair[1].parameters()):
            assert torch.equal(local(ours), local(theirs)), name
    assert step.updated_in_backward


def test_the_whole_step(ranks: Ranks) -> None:
    """Updates run when the sum of the rows is ready."""
    ranks(2).run(_whole_step)


def _with_inductor(rank: int, world_size: int) -> None:
    pair = _pair((2,), "fp32", backend="inductor")
    _, batch = example_llama()
    for number in range(2):
        losses = []
        for model in pair:
            torch.manual_seed(10 * number + rank)
            losses.append(model(**batch()))
            losses[-1].backward()
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    grads, expected = map(grads_of, pair)
    for name, grad in expected.items():
        torch.testing.assert_close(local(grads[name]), local(grad), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_with_inductor(ranks: Ranks) -> None:
    ranks(2).run(_with_inductor)
