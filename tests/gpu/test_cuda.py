"""The CUDA path: one NCCL rank for numerics, a fake process group for graphs of several ranks.

Run with `pytest -m gpu`; skipped without a GPU.
"""

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphshard
from tests.distributed.twins import assert_same, fsdp2, grads_of

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama import Llama, LlamaConfig

pytestmark = pytest.mark.gpu

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP32 = MixedPrecisionPolicy()


@pytest.fixture
def nccl():
    """Create a world of one NCCL rank."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, store=store)  # for norms of host tensors
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def model(layers: int = 2) -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig(layers=layers, dim=128, heads=2, seq=64))


def train(net: torch.nn.Module, steps: int) -> list[float]:
    """Train with each token once per batch: compiled kernels sum an embedding's gradients in no fixed order."""
    optim = torch.optim.AdamW(net.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        tokens = torch.randperm(256, device="cuda").view(4, 64)
        loss = net(tokens, tokens.roll(-1, 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("policy", [FP32, BF16], ids=["fp32", "bf16"])
def test_eager_equals_fsdp2(nccl, policy):
    """One rank, 20 AdamW steps: losses and parameters bit for bit."""
    ours = model().cuda()
    theirs = copy.deepcopy(ours)
    graphshard.compile(ours, nccl, mp_policy=policy, backend="eager")
    for layer in theirs.layers:
        fully_shard(layer, mesh=nccl, mp_policy=policy)
    fully_shard(theirs, mesh=nccl, mp_policy=policy)
    assert train(ours, 20) == train(theirs, 20)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local()), name


@pytest.mark.parametrize("policy", [FP32, BF16], ids=["fp32", "bf16"])
def test_inductor_follows_eager(nccl, policy):
    """Compiled regions train like the eager program, up to the rounding of fused kernels."""
    compiled, eager = model().cuda(), model().cuda()
    graphshard.compile(compiled, nccl, mp_policy=policy)
    graphshard.compile(eager, nccl, mp_policy=policy, backend="eager")
    torch.testing.assert_close(train(compiled, 10), train(eager, 10), rtol=2e-2 if policy == BF16 else 1e-3, atol=1e-3)


class Deciding(nn.Module):
    """Branches on values: a mask, which `nn.TransformerEncoder` checks for causality, a buffer and an input."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.core = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(8), persistent=False)
        self.register_buffer("queue", torch.zeros(8, 32))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.core(x, mask=self.mask)
        start = int(self.pointer)
        scores = y.mean(1) @ self.queue.to(y.dtype, copy=True).T
        with torch.no_grad():
            self.queue[start : start + 4] = y[:, 0]
            self.pointer.copy_((self.pointer + 4) % 8)
        return scores.relu() if (x.sum() > 0) and x.isfinite().all() else scores


@pytest.mark.parametrize("policy", [FP32, BF16], ids=["fp32", "bf16"])
def test_forward_decides_by_values(nccl, policy):
    """The module is split; gradients and the queue have FSDP2's bits."""
    torch.manual_seed(0)
    ours = Deciding().cuda()
    theirs = fsdp2(copy.deepcopy(ours), nccl, mp_policy=policy)
    graphshard.compile(ours, nccl, mp_policy=policy, backend="eager")
    found = []
    for net in (ours, theirs):
        torch.manual_seed(1)
        for _ in range(6):
            scores = net(torch.randn(4, 8, 32, device="cuda"))
            scores.float().square().mean().backward()
        found.append({"scores": scores.detach(), "queue": net.queue, **grads_of(net)})
    assert_same(*found, "six steps")


def test_cpu_model_moves_to_the_mesh(nccl):
    """A CPU model gets shards and buffers on the device; CPU inputs follow."""
    net = graphshard.compile(model(), nccl, backend="eager")
    assert {p.to_local().device.type for p in net.parameters()} == {"cuda"}
    assert {b.device.type for b in net.buffers()} == {"cuda"}
    tokens = torch.randint(0, 256, (2, 64))
    assert net(tokens, tokens).device.type == "cuda"


def test_graph_of_eight_ranks(fake_world):
    """Large parameters are sent directly, small ones packed, in one launch per unit."""
    fake_world(8)
    tokens = torch.randint(0, 256, (2, 64), device="cuda")
    net = Llama(LlamaConfig(layers=3, dim=1024, heads=8, seq=64)).cuda()
    graphshard.compile(net, init_device_mesh("cuda", (8,)), backend="eager", example_inputs=(tokens, tokens))
    (program,) = graphshard.programs(net)
    buckets = [b for b in program.plan.buckets if b.kind == "gather" and b.phase == "forward"]
    assert len(buckets) == 4
    assert all(b.params for b in buckets)
    assert all(len(b.packed) >= 2 for b in buckets if "layers" in b.name)
    assert "all_gather_into_tensor_coalesced" in program.forward.code


def test_compiled_regions_of_a_rank_of_eight(fake_world):
    """Each region gets inputs as compiled for; the fake group's collectives keep values."""
    fake_world(8)
    net = Llama(LlamaConfig(layers=3, dim=1024, heads=8, seq=64)).cuda()
    graphshard.compile(net, init_device_mesh("cuda", (8,)), mp_policy=BF16)
    tokens = torch.randint(0, 256, (8, 64), device="cuda")
    net(tokens, tokens).backward()
    assert all(p.grad.shape == p.shape for p in net.parameters())


def test_only_shards_are_moved(fake_world):
    """Compiling a CPU model for eight ranks allocates an eighth of it on the device."""
    fake_world(8)
    net = Llama(LlamaConfig(layers=3, dim=1024, heads=8, seq=64))
    full = sum(p.numel() * p.element_size() for p in net.parameters())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    graphshard.compile(net, init_device_mesh("cuda", (8,)), backend="eager")
    assert torch.cuda.max_memory_allocated() - before < 1.1 * full / 8
