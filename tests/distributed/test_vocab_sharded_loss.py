"""The vocabulary-sharded loss matches FSDP2, which gathers the head, up to rounding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.passes import ChunkedReduceScatter, EmbeddingRowExchange, VocabShardedLoss
from tests.distributed.twins import POLICIES, example_llama, fsdp2, grads_of, local
from tests.ranks import Ranks

PIECED = (
    graphshard.Pipeline()
    .insert(VocabShardedLoss(3), after="mixed-precision")
    .insert(ChunkedReduceScatter(), before="overlap-model-collectives")
    .insert(EmbeddingRowExchange(), before="overlap-model-collectives")
)


def _compare_with_fsdp2(
    rank: int,
    world_size: int,
    backend: str,
    shape: tuple[int, ...],
    policy: MixedPrecisionPolicy,
    accumulate: int,
    tied: bool = False,
) -> list[str]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model, batch = example_llama()
    if tied:
        model.head.weight = model.embed.weight
    twin = fsdp2(copy.deepcopy(model), mesh, mp_policy=policy)
    ours = graphshard.compile(model, mesh, backend=backend, mp_policy=policy, passes=PIECED)
    error = 1e-4 if policy.param_dtype is None else 5e-2
    pair = (ours, twin)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in pair]
    step = graphshard.compile_step(ours, optimizers[0], accumulate=accumulate, gather_ahead=True)
    for number in range(3):
        calls = []
        for microbatch in range(accumulate):
            torch.manual_seed(100 * number + 10 * microbatch + rank)
            calls.append(batch())
        losses = step(*calls) if accumulate > 1 else step(**calls[0])[None]
        expected = []
        for microbatch, call in enumerate(calls):
            twin.set_requires_gradient_sync(microbatch == accumulate - 1)
            expected.append(twin(**call))
            expected[-1].backward()
        torch.testing.assert_close(losses, torch.stack(expected).detach(), rtol=error, atol=0)
        largest = {name: local(grad).abs().max().item() for name, grad in grads_of(twin).items()}
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert step.updated_in_backward
        for (name, param), theirs in zip(ours.named_parameters(), twin.parameters(), strict=True):
            tolerance = 0.1 * (number + 1) * error * largest[name] + 1e-7
            torch.testing.assert_close(local(param), local(theirs), rtol=error, atol=tolerance, msg=name)
    return graphshard.programs(ours)[0].communication


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("shape", "accumulate"), [((2,), 1), ((2,), 2), ((2, 2), 1), ((4,), 1)], ids=str)
@pytest.mark.slow
def test_matches_fsdp2(ranks: Ranks, shape: tuple[int, ...], accumulate: int, policy: str) -> None:
    """Losses and parameters of three steps; 101 words, so shards have padding."""
    num_ranks = shape[0] * shape[-1] if len(shape) > 1 else shape[0]
    for lines in ranks(num_ranks).run(_compare_with_fsdp2, "eager", shape, POLICIES[policy], accumulate):
        assert sum("start_all_gather over shard" in line for line in lines) == 5
        assert any("head" in line for line in lines) == (len(shape) == 2)  # gradients of replicas are reduced whole


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("shape", "accumulate"), [((2,), 1), ((2,), 2), pytest.param((4,), 1, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.quick_cases("(2,)-1-bf16")
def test_a_head_tied_to_the_embedding(ranks: Ranks, shape: tuple[int, ...], accumulate: int, policy: str) -> None:
    """The table is never gathered or reduced whole, except for gradients of several microbatches."""
    for lines in ranks(shape[0]).run(_compare_with_fsdp2, "eager", shape, POLICIES[policy], accumulate, True):
        assert sum("start_all_gather over shard" in line for line in lines) == 5
        assert not any("embed" in line for line in lines if accumulate == 1 or "gather" in line)


@pytest.mark.slow
def test_with_inductor(ranks: Ranks) -> None:
    ranks(2).run(_compare_with_fsdp2, "inductor", (2,), POLICIES["fp32"], 1)
