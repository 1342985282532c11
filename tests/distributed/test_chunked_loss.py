"""The chunked loss matches FSDP2 with an unchunked loss up to rounding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.passes import ChunkedLoss
from tests.distributed.twins import POLICIES, example_llama, fsdp2, grads_of, local, world_mesh
from tests.ranks import Ranks

# The example has 16 rows on a rank, so there are three chunks; the last one is shorter.
CHUNKED = graphshard.Pipeline().insert(ChunkedLoss(rows=6), before="insert-collectives")


def _compare_with_fsdp2(
    rank: int, world_size: int, backend: str, policy: MixedPrecisionPolicy, accumulate: int
) -> list[str]:
    torch.manual_seed(0)
    model, batch = example_llama()
    twin = fsdp2(copy.deepcopy(model), world_mesh(), mp_policy=policy)
    ours = graphshard.compile(model, world_mesh(), backend=backend, mp_policy=policy, passes=CHUNKED)
    error = 1e-4 if policy.param_dtype is None else 5e-2
    pair = (ours, twin)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in pair]
    for step in range(3):
        losses = []
        for each in pair:
            for microbatch in range(accumulate):
                torch.manual_seed(100 * step + 10 * microbatch + rank)
                each.set_requires_gradient_sync(microbatch == accumulate - 1)
                loss = each(**batch()) / accumulate
                loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=error, atol=0)
        grads, expected = (grads_of(each) for each in pair)
        for name, grad in expected.items():
            largest = local(grad).abs().max().item()
            torch.testing.assert_close(
                local(grads[name]), local(grad), rtol=error, atol=error * largest, msg=f"{name} in step {step}"
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return graphshard.programs(ours)[0].communication


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.quick_cases("bf16-2")
def test_matches_fsdp2(ranks: Ranks, num_ranks: int, policy: str) -> None:
    """Losses and gradients of three steps with two microbatches."""
    ranks(num_ranks).run(_compare_with_fsdp2, "eager", POLICIES[policy], 2)


@pytest.mark.slow
def test_with_inductor(ranks: Ranks) -> None:
    ranks(2).run(_compare_with_fsdp2, "inductor", POLICIES["fp32"], 1)
