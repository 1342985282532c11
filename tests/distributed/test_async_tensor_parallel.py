"""Asynchronous tensor parallelism: matmuls in pieces overlap collectives; results agree up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import graphshard
from graphshard.passes import AsyncTensorParallel
from tests.distributed.tensor_parallel import llama, mesh_of, tokens
from tests.distributed.twins import grads_of, local
from tests.ranks import Ranks

CUT = graphshard.Pipeline().insert(AsyncTensorParallel(pieces=(2,)), before="overlap-model-collectives")


def _losses(model: torch.nn.Module, rank: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of three steps, and the gradients of the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + rank // 2)  # the same along the tensor axis
        optimizer.zero_grad()
        loss = model(*tokens())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, {name: local(grad) for name, grad in grads_of(model).items()}


def _with_and_without(rank: int, world_size: int, options: dict[str, Any]) -> list[str]:
    mesh = mesh_of(2, 2)
    plain = graphshard.compile(llama(mesh["tp"]), mesh, **options)
    cut = graphshard.compile(llama(mesh["tp"]), mesh, passes=CUT, **options)
    (losses, grads), (expected, expected_grads) = _losses(cut, rank), _losses(plain, rank)
    assert expected[0] != expected[1]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-3, atol=1e-6, msg=name)
    return graphshard.programs(cut)[0].communication


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.slow
def test_a_llama_with_sequence_parallelism(ranks: Ranks, backend: str) -> None:
    """Gathers along the sequence before three, two and one matmuls, and reduce-scatters after one."""
    for lines in ranks(4).run(_with_and_without, {"backend": backend}):
        counted = {line: lines.count(line) for line in lines}
        # Two layers and the head: half of each gather overlaps the matmul of the other half.
        assert counted["forward: start_all_gather over tp"] == 5
        assert counted["forward: start_reduce_scatter over tp"] == 4
        assert counted["backward: start_all_gather over tp"] == 4
