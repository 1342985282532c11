"""CUDA graphs of runs of regions on a GPU: the bits of training without them."""

import copy

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

import graphshard
from tests.distributed.test_replays import Net
from tests.gpu.test_cuda import BF16, model, nccl, train  # noqa: F401

pytestmark = pytest.mark.gpu


def graphs_of(net):
    return [run.graphs for run in net._graphshard.replaying.runs]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_bits_of_training_without(nccl, backend):  # noqa: F811
    replayed = model().cuda()
    plain = copy.deepcopy(replayed)
    graphshard.compile(replayed, nccl, mp_policy=BF16, backend=backend, cuda_graphs=True)
    graphshard.compile(plain, nccl, mp_policy=BF16, backend=backend)
    assert train(replayed, 10) == train(plain, 10)
    for a, b in zip(replayed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())
    assert graphs_of(replayed)
    assert all(count == 1 for count in graphs_of(replayed))


def test_offloaded(nccl):  # noqa: F811
    replayed = model()
    plain = copy.deepcopy(replayed)
    options = {"mp_policy": BF16, "backend": "eager", "offload_policy": CPUOffloadPolicy()}
    graphshard.compile(replayed, nccl, cuda_graphs=True, **options)
    graphshard.compile(plain, nccl, **options)
    assert train(replayed, 6) == train(plain, 6)
    assert any(graphs_of(replayed))


def test_dropout_two_sizes_and_several_forwards(nccl):  # noqa: F811
    replayed = Net(dropout=0.5).cuda()
    plain = copy.deepcopy(replayed)
    graphshard.compile(replayed, nccl, backend="eager", cuda_graphs=True)
    graphshard.compile(plain, nccl, backend="eager")
    seen = []
    for net in (replayed, plain):
        optim = torch.optim.AdamW(net.parameters(), lr=1e-2)
        torch.manual_seed(0)
        losses = []
        for step in range(10):
            tokens = torch.arange(10 + 5 * (step % 2), device="cuda").reshape(-1, 5) % 13
            both = [net(tokens)[0], net(tokens.flip(0))[0]]
            for loss in both:
                loss.backward()
            optim.step()
            optim.zero_grad()
            losses += both
        seen.append(torch.stack(losses).tolist() + torch.cuda.get_rng_state().tolist())
    assert seen[0] == seen[1]
    assert any(graphs_of(replayed))
