"""CPUOffloadPolicy on a GPU: shards, gradients and optimizer state on the host, with FSDP2's bits."""

import copy

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import graphshard
from tests.gpu.test_cuda import BF16, model, nccl, train  # noqa: F401

pytestmark = pytest.mark.gpu


def test_offloaded_training_equals_fsdp2(nccl):  # noqa: F811
    ours = model()
    theirs = copy.deepcopy(ours)
    for layer in theirs.layers:
        fully_shard(layer, mesh=nccl, mp_policy=BF16, offload_policy=CPUOffloadPolicy())
    fully_shard(theirs, mesh=nccl, mp_policy=BF16, offload_policy=CPUOffloadPolicy())
    graphshard.compile(ours, nccl, backend="eager", mp_policy=BF16, offload_policy=CPUOffloadPolicy())
    assert train(ours, 5) == train(theirs, 5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.device.type == "cpu"
        assert a.to_local().is_pinned()
        assert torch.equal(a.to_local(), b.to_local())
