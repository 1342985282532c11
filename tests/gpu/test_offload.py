"""CPUOffloadPolicy on a GPU: shards, gradients and optimizer state on the host, with FSDP2's bits."""

import copy

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import graphshard
from graphshard.passes import OffloadActivations
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


def test_memory_is_bounded_while_the_host_is_far_ahead(nccl):  # noqa: F811
    """Shards and saved values come and go in the order of compute: `_sleep` delays it until all is launched."""
    net = model(layers=12)
    passes = graphshard.Pipeline().insert(OffloadActivations(least=1), before="plan")
    options = {"backend": "eager", "mp_policy": BF16, "offload_policy": CPUOffloadPolicy(), "passes": passes}
    graphshard.compile(net, nccl, **options)
    tokens = torch.randint(0, 256, (16, 64), device="cuda")
    peaks = []
    for cycles in (0, 0, 10**9):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        if cycles:
            torch.cuda._sleep(cycles)
        net(tokens, tokens.roll(-1, 1)).backward()
        net.zero_grad()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.memory_stats()["active_bytes.all.peak"])
    assert peaks[2] < 1.1 * peaks[1], peaks
