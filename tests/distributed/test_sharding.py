"""How parameters become shards: any dim, size, layout and dtype; which parameters, and which travel together."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import graphshard
from graphshard.plan import Plan
from tests.distributed.twins import assert_same, fsdp2, grads_of, local, params_of, world_mesh
from tests.ranks import RankError, Ranks

Placement = Callable[[nn.Parameter], Shard | None]


def largest_dim(param: nn.Parameter) -> Shard:
    """Shard along the largest dim, counted from behind."""
    sizes = list(param.shape)
    return Shard(sizes.index(max(sizes)) - len(sizes))


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, dim: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.stem = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(2))
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rows(rank: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (5, 4)), generator=torch.Generator().manual_seed(rank))


def train(model: nn.Module, inputs: list[Tensor], lr: float = 0.1) -> dict[str, Any]:
    """Steps of SGD on this rank's inputs; losses, and gradients and parameters at the end."""
    optim = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    losses = []
    for x in inputs:
        optim.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optim.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **params_of(model), **{f"grad {n}": g for n, g in grads_of(model).items()}}


def full(values: dict[str, Any]) -> dict[str, Any]:
    return {n: v.full_tensor().detach() if isinstance(v, DTensor) else v for n, v in values.items()}


def data_parallel(model: nn.Module, step_inputs: list[list[Tensor]], lr: float = 0.1) -> dict[str, Any]:
    """The same steps without sharding: the gradient is the mean over the ranks' inputs."""
    optim = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    for inputs in step_inputs:
        optim.zero_grad()
        for x in inputs:
            (model(x).float().square().mean() / len(inputs)).backward()
        optim.step()
    return {**params_of(model), **{f"grad {n}": g for n, g in grads_of(model).items()}}


def hashes_agree(model: nn.Module) -> None:
    """Every rank made the same plan of the same graph."""
    plans = [p.plan.hash for p in graphshard.programs(model) if isinstance(p.plan, Plan)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, plans)
    assert plans
    assert all(other == plans for other in everyone)


# --- any dim, any size --------------------------------------------------------------------------------------


def _shard_dims(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    torch.manual_seed(0)
    model = Net()
    theirs = fsdp2(copy.deepcopy(model), mesh, shard_placement_fn=largest_dim)
    ours = graphshard.compile(model, mesh, backend="eager", shard_placement_fn=largest_dim)
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


def test_rows_16_17_shard_dims_equal_fsdp2(ranks: Ranks) -> None:
    """Rows 16, 17: any dim, negative ones too; shards and gradients are contiguous."""
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
        mine = chunk[rank] if rank < len(chunk) else originals[name].narrow(param.placements[0].dim, 0, 0)
        assert torch.equal(local(param), mine)
        assert local(param).is_contiguous()
        assert torch.equal(param.full_tensor(), originals[name])
    batches = [[rows(r + 10 * step) for r in range(world_size)] for step in range(3)]
    got = full(train(ours, [inputs[rank] for inputs in batches]))
    expected = data_parallel(reference, batches)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    hashes_agree(ours)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_row_115_uneven_shards_on_any_dim(ranks: Ranks, world_size: int, backend: str) -> None:
    """Rows 15, 115."""
    ranks(world_size).run(_uneven_dims, backend)


def _uneven_rows(rank: int, world_size: int) -> None:
    """FSDP2 can do uneven shards on dim 0, with empty ones."""
    mesh = world_mesh()
    torch.manual_seed(0)
    model = Net(dim=3, hidden=5)
    theirs = fsdp2(copy.deepcopy(model), mesh)
    ours = graphshard.compile(model, mesh, backend="eager")
    inputs = [rows(rank + 10 * step) for step in range(3)]
    assert_same(train(ours, inputs), train(theirs, inputs), "after three steps")
    assert (local(ours.head.weight).numel() == 0) == (rank == 3)
    hashes_agree(ours)


@pytest.mark.parametrize("world_size", [2, 4])
def test_row_15_empty_shards(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(_uneven_rows)


def _default_mesh(rank: int, world_size: int) -> None:
    model = graphshard.compile(Net(), backend="eager")
    assert model.stem.weight.device_mesh.shape == (world_size,)
    assert model.stem.weight.device_mesh.device_type == "cpu"
    assert model(rows(rank)).shape == (5, 3)


def test_row_4_all_ranks_without_a_mesh(ranks: Ranks) -> None:
    ranks(2).run(_default_mesh)
    with pytest.raises(graphshard.ArgumentError, match=r"there is no process group. Call torch.distributed.init_proc"):
        graphshard.compile(Net())


# --- any layout ---------------------------------------------------------------------------------------------


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.mix = nn.Parameter(torch.randn(7, 5).t())  # transposed in memory
        self.spread = nn.Parameter(torch.randn(7, 2)[:, 0])  # with gaps in memory

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
def test_row_11_parameters_keep_their_memory_format(ranks: Ranks, world_size: int, dim: int) -> None:
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
    for child in theirs.children():  # FSDP2 wants one dtype in a group
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
def test_row_28_several_trainable_dtypes(ranks: Ranks, world_size: int) -> None:
    """One unit, a bucket for each dtype."""
    ranks(world_size).run(_dtypes)


class Frozen(nn.Module):
    """A frozen base of a dtype that is stored, not computed in, under a trainable adapter."""

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
def test_rows_27_113_frozen_parameters_of_any_dtype(ranks: Ranks, world_size: int) -> None:
    """Rows 27, 87, 113: stored, gathered and kept in their own dtype; the adapter trains."""
    ranks(world_size).run(_stored, "eager", STORED)


@pytest.mark.slow
def test_row_113_frozen_parameters_with_inductor(ranks: Ranks) -> None:
    ranks(2).run(_stored, "inductor", [torch.int8, torch.float8_e4m3fn])


# --- which parameters ---------------------------------------------------------------------------------------


def _ignored(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    torch.manual_seed(0)
    model = Net()
    model.scale = nn.Parameter(torch.tensor(2.0))  # a scalar may be ignored
    model.register_forward_hook(lambda m, a, out: out)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    theirs = copy.deepcopy(model)
    options = {"mesh": mesh, "mp_policy": policy}
    left = {theirs.head.weight, theirs.scale}
    for block in theirs.blocks:
        fully_shard(block, **options)
    fully_shard(theirs, **options, ignored_params=left)
    for each in (model, theirs):  # an ignored parameter stays float32
        each.head.forward = lambda x, head=each.head: F.linear(x.float(), head.weight, head.bias.float())
    weight = model.head.weight
    ours = graphshard.compile(
        model, mesh, backend="eager", mp_policy=policy, ignored_params=[model.head.weight, model.scale]
    )
    assert ours.head.weight is weight
    assert type(ours.head.weight) is nn.Parameter
    x = rows(rank)
    for each in (ours, theirs):
        each(x).square().mean().backward()
    assert_same(grads_of(ours), grads_of(theirs), "after backward")
    grad = ours.head.weight.grad
    assert type(grad) is Tensor
    assert grad.dtype == torch.float32
    others = [torch.empty_like(grad) for _ in range(world_size)]
    dist.all_gather(others, grad)
    assert not torch.equal(others[0], others[1])  # each rank has its own: not reduced
    assert ours.scale.grad is None


def test_row_14_ignored_parameters(ranks: Ranks) -> None:
    ranks(2).run(_ignored)


def _freeze_later(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    torch.manual_seed(0)
    model = Net()
    theirs = fsdp2(copy.deepcopy(model), mesh)
    ours = graphshard.compile(model, mesh, backend="eager")
    inputs = [rows(rank + 10 * step) for step in range(2)]
    assert_same(train(ours, inputs), train(theirs, inputs), "all trainable")
    for each in (ours, theirs):
        each.zero_grad()
        each.blocks[0].up.weight.requires_grad_(False)
        each.stem.requires_grad_(False)
    assert_same(train(ours, inputs), train(theirs, inputs), "some frozen")
    assert ours.stem.weight.grad is None
    _, program = graphshard.programs(ours)
    assert program.reason == "dtype or requires_grad of a parameter changed"
    reduced = {name for b in program.plan.buckets if b.kind == "reduce" for name in b.members}
    assert reduced == {n for n, p in ours.named_parameters() if p.requires_grad}


def test_row_73_frozen_after_compile(ranks: Ranks) -> None:
    """No reduction and no gradient for what is frozen, now or later."""
    ranks(2).run(_freeze_later)


def _swapped(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    torch.manual_seed(0)
    model = Net(dim=7)
    theirs = fsdp2(copy.deepcopy(model), mesh)
    ours = graphshard.compile(model, mesh, backend="eager")
    for each in (ours, theirs):
        value = distribute_tensor(torch.ones(7, 4), mesh, [Shard(0)], src_data_rank=None)
        each.stem.weight = nn.Parameter(value)
    inputs = [rows(rank + 10 * step) for step in range(3)]
    assert_same(train(ours, inputs), train(theirs, inputs), "after three steps")


def test_row_22_parameters_swapped_after_compile(ranks: Ranks) -> None:
    ranks(2).run(_swapped)


class Lora(nn.Module):
    """An adapter around a frozen linear, with DoRA's magnitude."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))
        self.magnitude = nn.Parameter(base.weight.detach().norm(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight + self.b @ self.a
        return F.linear(x, self.magnitude[:, None] * weight / weight.norm(dim=1, keepdim=True), self.base.bias)


def _wrapped(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    torch.manual_seed(0)
    model = Net()
    torch.nn.utils.parametrizations.weight_norm(model.stem)
    torch.nn.utils.parametrizations.spectral_norm(model.head)
    for block in model.blocks:
        block.up = Lora(block.up)
    reference = copy.deepcopy(model)
    ours = graphshard.compile(model, mesh, backend="eager")
    assert "stem.parametrizations.weight.original0" in dict(ours.named_parameters())
    batches = [[rows(0)] * world_size] * 3  # spectral norm iterates at each forward: the same on all ranks
    got = full(train(ours, [inputs[rank] for inputs in batches]))
    for name, value in data_parallel(reference, [[rows(0)]] * 3).items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer)


def test_parametrizations_and_adapters(ranks: Ranks) -> None:
    ranks(2).run(_wrapped)


class Tied(nn.Module):
    """Weights tied across units, and within one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(Block(5, 5) for _ in range(3))
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[1].down.weight = self.blocks[1].up.weight
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for block in self.blocks:
            y = block(y)
        return self.head(y)


TIES = [("embed.weight", "head.weight"), ("blocks.0.up.weight", "blocks.2.up.weight")]


def _tied(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    torch.manual_seed(0)
    model = Tied()
    reference = copy.deepcopy(model)
    ours = graphshard.compile(model, mesh, backend="eager")
    tokens = [torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(s)) for s in range(3)]
    got = full(train(ours, tokens))
    for name, value in data_parallel(reference, [[t] for t in tokens]).items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")

    (program,) = graphshard.programs(ours)
    for phase in ("forward", "backward"):
        gathered = [n for b in program.plan.buckets if (b.kind, b.phase) == ("gather", phase) for n in b.members]
        assert len(gathered) == len(set(gathered))
        assert "head.weight" not in gathered
    state = ours.state_dict()
    for first, second in TIES:
        assert {first, second} <= set(state)
        assert local(state[first]).data_ptr() == local(state[second]).data_ptr()

    def assert_tied(when: str) -> None:
        for first, second in TIES:
            assert ours.get_parameter(first) is ours.get_parameter(second), when

    values = {name: value.detach().clone() for name, value in state.items()}
    ours.load_state_dict(values)
    assert_tied("loaded")
    ours.load_state_dict(values, assign=True)
    assert_tied("assigned")
    ours.to(torch.float64)
    ours.float()
    assert_tied("converted")
    ours.to_empty(device="cpu")
    assert_tied("emptied")
    nn.Sequential(ours).load_state_dict({f"0.{n}": v for n, v in values.items()}, assign=True)
    assert_tied("assigned by a parent")
    assert torch.isfinite(ours(tokens[0])).all()


def test_rows_90_91_114_tied_weights(ranks: Ranks) -> None:
    """Rows 90, 91, 114: one shard, one gather, one gradient; both names; ties survive."""
    ranks(2).run(_tied)


# --- what travels together ----------------------------------------------------------------------------------


def _units(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    torch.manual_seed(0)
    model = Net()
    theirs = copy.deepcopy(model)
    fully_shard(theirs.blocks[0], mesh=mesh)
    fully_shard(theirs.blocks[1], mesh=mesh)
    fully_shard([theirs.stem, theirs.head], mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    ours = graphshard.compile(
        model, mesh, backend="eager", units=[("stem", "head"), lambda name, module: isinstance(module, Block)]
    )
    inputs = [rows(rank + 10 * step) for step in range(3)]
    assert_same(train(ours, inputs), train(theirs, inputs), "after three steps")
    (program,) = graphshard.programs(ours)
    # Gathered again in backward is only what backward reads: no biases.
    groups = {frozenset(b.members) for b in program.plan.buckets if b.kind == "reduce" or b.phase == "forward"}
    per_call = [["stem", "head"], ["blocks.0"], ["blocks.1"]]
    names = list(dict(ours.named_parameters()))
    assert groups == {frozenset(n for n in names if any(n.startswith(f"{m}.") for m in call)) for call in per_call}
    assert "gather stem, head in forward" in {b.name for b in program.plan.buckets}


def test_rows_2_3_units_are_fsdp2_groups(ranks: Ranks) -> None:
    """Rows 2, 3: a function chooses modules, a tuple makes one group of several."""
    ranks(2).run(_units)


class Pair(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))[:, [0, 1, 2, 0]])


def _pair(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    torch.manual_seed(0)
    pair = Pair(Net(), Net())
    theirs = copy.deepcopy(pair)
    fsdp2(theirs.first, mesh)
    fsdp2(theirs.second, mesh)
    graphshard.compile(pair.first, mesh, backend="eager")
    graphshard.compile(pair.second, mesh, backend="eager")
    inputs = [rows(rank + 10 * step) for step in range(3)]
    assert_same(train(pair, inputs), train(theirs, inputs), "after three steps")


def test_two_compiled_modules_in_one_parent(ranks: Ranks) -> None:
    ranks(2).run(_pair)


def _submodule(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    torch.manual_seed(0)
    model = Net()
    theirs = fsdp2(copy.deepcopy(model), mesh)
    ours = graphshard.compile(model, mesh, backend="eager")
    inputs = [rows(rank + 10 * step) for step in range(2)]
    assert_same(train(ours, inputs), train(theirs, inputs), "the whole")
    for each in (ours, theirs):
        each.zero_grad()
    x = rows(rank, 5, 8)
    for each in (ours, theirs):
        each.blocks[1](x).sum().backward()
    assert_same(grads_of(ours), grads_of(theirs), "one block")
    assert_same(train(ours, inputs), train(theirs, inputs), "the whole again")
    up = ours.blocks[0].up  # no unit: FSDP2 cannot
    torch.testing.assert_close(up(x), F.linear(x, up.weight.full_tensor(), up.bias.full_tensor()))
    with torch.no_grad():
        ours.blocks[1](x)
    titles = [program.title for program in graphshard.programs(ours)]
    assert titles == ["Net-0", "Block-blocks.1-0", "Linear-blocks.0.up-0", "Block-blocks.1-1"]


def test_row_45_a_submodule_called_on_its_own(ranks: Ranks) -> None:
    ranks(2).run(_submodule)


# --- errors -------------------------------------------------------------------------------------------------


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gain


def _error(make: Callable[[], nn.Module], options: Callable[[nn.Module], dict[str, Any]]) -> str:
    model = make()
    before = {name: (id(p), type(p)) for name, p in model.named_parameters()}
    attributes = dict(model.__dict__)
    with pytest.raises(graphshard.ArgumentError) as caught:
        graphshard.compile(model, world_mesh(), **options(model))
    assert {name: (id(p), type(p)) for name, p in model.named_parameters()} == before
    assert model.__dict__ == attributes
    assert type(model) is type(make())
    return str(caught.value)


def _wrong_arguments(rank: int, world_size: int) -> None:
    from torch.distributed.tensor import Replicate

    def given(**options: Any) -> Callable[[nn.Module], dict[str, Any]]:
        return lambda model: options

    wrong: list[tuple[Callable[[], nn.Module], Callable[[nn.Module], dict[str, Any]], str]] = [
        (Scalar, given(), "parameter gain is a scalar.*Change gain to a 1D tensor.*or pass it in ignored_params"),
        (Net, given(shard_placement_fn=Shard(0)), "shard_placement_fn must be a function.*got Shard"),
        (Net, given(shard_placement_fn=lambda p: Shard(1)), r"returned Shard\(1\) for parameter stem.bias.*1D tensor"),
        (Net, given(shard_placement_fn=lambda p: Shard(-3)), r"returned Shard\(-3\) for parameter stem.weight.*2D"),
        (Net, given(shard_placement_fn=lambda p: Replicate()), r"returned Replicate\(\) for parameter stem.weight"),
        (
            Net,
            given(ignored_params=["stem.weight"]),
            "ignored_params holds 'stem.weight', which is no parameter of Net",
        ),
        (Net, given(ignored_params=[nn.Parameter(torch.ones(2))]), r"holds a tensor of shape \[2\], which is no param"),
        (Net, lambda m: {"ignored_params": m.stem.weight}, "must be a set of the model's parameters, got a Parameter"),
        (Net, given(units=[3]), "units: 3 is neither a name pattern, nor a function"),
        (Net, given(units=[lambda name, module: False]), "units: <lambda> chooses no submodule of Net"),
        (Net, given(units=[("stem", "nope")]), "units: the pattern 'nope' matches no submodule"),
        (Net, given(units=[("stem", "head"), ("head", "blocks.0")]), r"units: head is in two groups, \(stem, head\)"),
        (lambda: Net().to(torch.complex64), given(), "stem.weight is trainable and of torch.complex64.*freeze it"),
    ]
    for make, options, text in wrong:
        assert re.search(text, _error(make, options)), (text, _error(make, options))


def test_rows_10_18_errors_name_the_parameter(ranks: Ranks) -> None:
    ranks(2).run(_wrong_arguments)


def _compiled_net() -> nn.Module:
    return graphshard.compile(Net(), world_mesh(), backend="eager")


def _wrong_later(rank: int, world_size: int) -> None:
    x = rows(rank)
    model = _compiled_net()
    model.stem.weight = nn.Parameter(torch.ones(8, 4))
    with pytest.raises(graphshard.ParameterError, match=r"stem.weight was replaced by a plain tensor.*\[Shard\(0\)\]"):
        model(x)
    model = _compiled_net()
    del model.stem.weight
    with pytest.raises(graphshard.ParameterError, match=r"stem.weight was removed, or registered under"):
        model(x)
    model = _compiled_net()
    model.extra = nn.Parameter(torch.ones(2))
    with pytest.raises(graphshard.ParameterError, match=r"parameter extra was added after graphshard.compile"):
        model(x)
    model = _compiled_net()
    model.head.weight = nn.Parameter(distribute_tensor(torch.ones(4, 8), world_mesh(), [Shard(0)]))
    with pytest.raises(graphshard.ParameterError, match=r"head.weight has shape \[4, 8\], it had \[3, 8\]"):
        model(x)
    model = graphshard.compile(Tied(), world_mesh(), backend="eager")
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(graphshard.ParameterError, match=r"head.weight was tied to embed.weight when"):
        model(torch.tensor([1, 2]))
    with pytest.raises(graphshard.ArgumentError, match="Block is a part of a compiled model"):
        graphshard.compile(_compiled_net().blocks[0], world_mesh())


def test_row_22_parameters_that_are_no_shards(ranks: Ranks) -> None:
    ranks(2).run(_wrong_later)


def _meta_device(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = Net()
    ignored = [model.head.weight]
    ours = graphshard.compile(model, world_mesh(), backend="eager", ignored_params=ignored)
    for module in (ours.stem, *ours.blocks):
        module.to_empty(device="cpu")
    with pytest.raises(graphshard.MaterializationError, match=r"2 parameters.*head.weight, head.bias.*to_empty"):
        ours(rows(rank))


def test_row_25_meta_parameters_are_listed(ranks: Ranks) -> None:
    ranks(2).run(_meta_device)


def test_rank_errors_are_reported(ranks: Ranks) -> None:
    """What these tests rely on: a failing assertion on a rank fails the test."""
    with pytest.raises(RankError, match="AssertionError"):
        ranks(2).run(_fails)


def _fails(rank: int, world_size: int) -> None:
    assert rank == 0
