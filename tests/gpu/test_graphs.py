"""CUDA graphs of runs of regions on a GPU: the bits of training without them."""

import copy
import pkgutil

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

import graphshard
from tests.distributed.test_replays import Net, _evaluated, _flat, _microbatches, _moved, _two_sizes
from tests.distributed.twins import assert_same
from tests.gpu.test_cuda import BF16, model, nccl, train  # noqa: F401

pytestmark = pytest.mark.gpu


def graphs_of(net):
    return [run.graphs for run in net._graphshard.replaying.runs]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_matches_training_without_graphs(nccl, backend, monkeypatch):  # noqa: F811
    """Compiled twice, so Inductor must not autotune, which would change the order of sums."""
    monkeypatch.setattr(pkgutil.resolve_name("torch._inductor.config"), "deterministic", True)
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


def scripted(mesh, device, script, **options):
    """Train with and without graphs, using a script of the recorder's tests."""
    replayed = Net().to(device)
    plain = copy.deepcopy(replayed)
    graphshard.compile(replayed, mesh, backend="eager", cuda_graphs=True, max_captures=16, **options)
    graphshard.compile(plain, mesh, backend="eager", max_captures=16, **options)
    seen = [], []
    for net, found in zip((replayed, plain), seen):
        script(net, torch.optim.AdamW(net.parameters(), lr=1e-2), found)
    assert_same(*({str(i): value for i, value in enumerate(_flat(found))} for found in seen), "what was seen")
    assert any(graphs_of(replayed))


@pytest.mark.parametrize("script", [_microbatches, _moved, _evaluated], ids=["microbatches", "moved", "evaluated"])
def test_scripts(nccl, script):  # noqa: F811
    scripted(nccl, "cuda", script, mp_policy=BF16)


def test_dynamic_sizes(nccl):  # noqa: F811
    scripted(nccl, "cuda", _two_sizes, dynamic_shapes={"tokens": {0: torch.export.Dim("batch", max=64)}})


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
