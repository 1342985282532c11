"""Parameters become shards along any dim, with any size, layout and dtype."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import graphshard
from graphshard.errors import ArgumentError
from tests.distributed.nets import Net, Placement, data_parallel, full, hashes_agree, largest_dim, rows, train
from tests.distributed.twins import assert_same, local, twins, world_mesh
from tests.ranks import Ranks

# --- any dim, any size --------------------------------------------------------------------------------------


def _shard_dims(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    torch.manual_seed(0)
    model = Net()
    ours, theirs = twins(model, mesh, shard_placement_fn=largest_dim)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.placements == b.placements
        assert a.placements[0].dim >= 0
        assert a.stride() == b.stride()
        assert local(a).stride() == local(b).stride()
    assert {p.placements[0].dim for p in ours.parameters()} == {0, 1}
    inputs = [rows(rank + 10 * step) for step in range(3)]
    assert_same(train(ours, inputs), train(theirs, inputs), "after three steps")
    for param in ours.parameters():
        assert local(param).is_contiguous()
        assert local(param.grad).is_contiguous()
        assert param.grad.placements == param.placements
    hashes_agree(ours)


def test_shard_dims_equal_fsdp2(ranks: Ranks) -> None:
    """Any dim, including negative ones; shards and gradients are contiguous."""
    ranks(2).run(_shard_dims)


def _uneven_dims(rank: int, world_size: int, backend: str) -> None:
    mesh = world_mesh()
    torch.manual_seed(0)
    model = Net(dim=3, hidden=5)  # dims smaller than the number of ranks, and empty shards
    reference = copy.deepcopy(model)
    originals = {name: p.detach().clone() for name, p in model.named_parameters()}
    ours = graphshard.compile(model, mesh, backend=backend, shard_placement_fn=largest_dim)
    for name, param in ours.named_parameters():
        chunk = originals[name].tensor_split(1)[0].chunk(world_size, param.placements[0].dim)
        expected = chunk[rank] if rank < len(chunk) else originals[name].narrow(param.placements[0].dim, 0, 0)
        assert torch.equal(local(param), expected)
        assert local(param).is_contiguous()
        assert torch.equal(param.full_tensor(), originals[name])
    batches = [[rows(r + 10 * step) for r in range(world_size)] for step in range(3)]
    got = full(train(ours, [inputs[rank] for inputs in batches]))
    expected = data_parallel(reference, batches)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    hashes_agree(ours)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.slow
def test_uneven_shards_on_any_dim(ranks: Ranks, world_size: int, backend: str) -> None:
    """Sizes that the number of ranks does not divide, and smaller sizes."""
    ranks(world_size).run(_uneven_dims, backend)


def _uneven_rows(rank: int, world_size: int) -> None:
    """FSDP2 supports uneven and empty shards on dim 0."""
    mesh = world_mesh()
    torch.manual_seed(0)
    model = Net(dim=3, hidden=5)
    ours, theirs = twins(model, mesh)
    inputs = [rows(rank + 10 * step) for step in range(3)]
    assert_same(train(ours, inputs), train(theirs, inputs), "after three steps")
    assert (local(ours.head.weight).numel() == 0) == (rank == 3)
    hashes_agree(ours)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.slow
def test_empty_shards_equal_fsdp2(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(_uneven_rows)


def _default_mesh(rank: int, world_size: int) -> None:
    model = graphshard.compile(Net(), backend="eager")
    assert model.stem.weight.device_mesh.shape == (world_size,)
    assert model.stem.weight.device_mesh.device_type == "cpu"
    assert model(rows(rank)).shape == (5, 3)


def test_all_ranks_without_a_mesh(ranks: Ranks) -> None:
    ranks(2).run(_default_mesh)
    with pytest.raises(ArgumentError, match=r"there is no process group. Call torch.distributed.init_proc"):
        graphshard.compile(Net())


# --- any layout ---------------------------------------------------------------------------------------------


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.mix = nn.Parameter(torch.randn(7, 5).t())  # transposed in memory
        self.spread = nn.Parameter(torch.randn(7, 2)[:, 0])  # strided in memory

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).mean((2, 3))
        return y @ self.mix * self.spread


def _channels_last(rank: int, world_size: int, dim: int) -> None:
    mesh = world_mesh()
    torch.manual_seed(0)
    model = Conv().to(memory_format=torch.channels_last)
    assert not model.conv.weight.is_contiguous()
    reference = copy.deepcopy(model)
    originals = {name: p.detach().clone() for name, p in model.named_parameters()}
    placement: Placement = lambda p: Shard(dim) if p.dim() > dim else None  # noqa: E731
    ours = graphshard.compile(model, mesh, backend="eager", shard_placement_fn=placement)
    batches = [[rows(r + 10 * step, 2, 3, 6, 6) for r in range(world_size)] for step in range(3)]
    for name, param in ours.named_parameters():
        assert torch.equal(param.full_tensor(), originals[name])
    got = full(train(ours, [inputs[rank] for inputs in batches]))
    expected = data_parallel(reference, batches)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    weight = ours.conv.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    if local(weight).numel():
        assert local(weight).is_contiguous(memory_format=torch.channels_last)
    assert local(weight.grad).stride() == local(weight).stride()
    assert ours.mix.stride() == reference.mix.stride()
    assert ours.spread.stride() == (1,)
    hashes_agree(ours)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.slow
def test_parameters_keep_their_memory_format(ranks: Ranks, world_size: int, dim: int) -> None:
    ranks(world_size).run(_channels_last, dim)


# --- any dtype ----------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Trainable parameters of four dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 6).to(torch.bfloat16)
        self.third = nn.Linear(6, 5).to(torch.float64)
        self.fourth = nn.Linear(5, 3).to(torch.float16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x)).bfloat16())
        return self.fourth(self.third(y.double()).half()).float()


def _dtypes(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    torch.manual_seed(0)
    model = Mixed()
    theirs = copy.deepcopy(model)
    for child in theirs.children():  # FSDP2 requires one dtype per group
        fully_shard(child, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    ours = graphshard.compile(model, mesh, backend="eager", units=[("first", "second", "third", "fourth")])
    inputs = [rows(rank + 10 * step) for step in range(3)]
    assert_same(train(ours, inputs), train(theirs, inputs), "after three steps")
    (program,) = graphshard.programs(ours)
    gathers = [b for b in program.plan.buckets if b.kind == "gather" and b.phase == "forward"]
    assert sorted(len(b.members) for b in gathers) == [2, 2, 2, 2]
    hashes_agree(ours)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.slow
def test_several_trainable_dtypes(ranks: Ranks, world_size: int) -> None:
    """One unit with a bucket for each dtype."""
    ranks(world_size).run(_dtypes)


class Frozen(nn.Module):
    """A frozen base stored in a dtype that cannot compute, under a trainable adapter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        base = torch.randn(7, 4) * 3
        if dtype == torch.bool:
            stored = base > 0
        elif dtype.is_complex:
            stored = torch.complex(base, base).to(dtype)
        else:
            stored = base.round().to(dtype)
        self.base = nn.Parameter(stored, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(7, 1), requires_grad=False)
        self.down = nn.Linear(4, 2, bias=False)
        self.up = nn.Linear(2, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base = self.base.real if self.base.is_complex() else self.base
        return F.linear(x, base.to(x.dtype) * self.scale) + self.up(self.down(x))


STORED = [
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.float64,
    torch.complex64,
]


def _stored(rank: int, world_size: int, backend: str, dtypes: list[torch.dtype]) -> None:
    mesh = world_mesh()
    for dtype in dtypes:
        model = Frozen(dtype)
        reference = copy.deepcopy(model)
        base = model.base.detach().clone()
        ours = graphshard.compile(model, mesh, backend=backend)
        assert local(ours.base).dtype == dtype
        before = local(ours.base).clone()
        batches = [[rows(r + 10 * step) for r in range(world_size)] for step in range(3)]
        got = train(ours, [inputs[rank] for inputs in batches])
        expected = data_parallel(reference, batches)
        for name in ("up.weight", "down.weight", "grad up.weight"):
            torch.testing.assert_close(got[name].full_tensor(), expected[name], rtol=1e-4, atol=1e-5)
        assert torch.equal(local(ours.base).view(torch.uint8), before.view(torch.uint8)), dtype
        assert ours.base.grad is None
        assert ours.scale.grad is None
        everyone = [torch.empty(0)] * world_size
        dist.all_gather_object(everyone, local(ours.base).view(torch.uint8))
        assert torch.equal(torch.cat(everyone), base.view(torch.uint8)), dtype
        (program,) = graphshard.programs(ours)
        reduced = [name for b in program.plan.buckets if b.kind == "reduce" for name in b.members]
        assert sorted(reduced) == ["down.weight", "up.weight"]
        gathered = next(b for b in program.plan.buckets if b.kind == "gather" and "base" in b.members)
        padded = -(-7 // world_size) * world_size
        others = [program.params[n].sent_bytes("gather") for n in gathered.members if n != "base"]
        assert gathered.num_bytes - sum(others) == padded * 4 * dtype.itemsize
        hashes_agree(ours)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.quick_cases("2")
def test_frozen_parameters_of_any_dtype(ranks: Ranks, world_size: int) -> None:
    """Stored, gathered and kept in their dtype; the adapter trains."""
    ranks(world_size).run(_stored, "eager", STORED)


@pytest.mark.slow
def test_frozen_parameters_with_inductor(ranks: Ranks) -> None:
    ranks(2).run(_stored, "inductor", [torch.int8, torch.float8_e4m3fn])
