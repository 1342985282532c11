"""Sharded and ignored parameters, and the units that they form."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import graphshard
from tests.distributed.nets import Block, Net, Tied, data_parallel, full, rows, train
from tests.distributed.twins import assert_same, fsdp2, grads_of, groups_of, local, twins, world_mesh
from tests.ranks import Ranks

# --- sharded parameters -------------------------------------------------------------------------------------


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
    assert not torch.equal(others[0], others[1])  # not reduced: values differ between ranks
    assert ours.scale.grad is None


def test_ignored_parameters(ranks: Ranks) -> None:
    ranks(2).run(_ignored)


def _freeze_later(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    torch.manual_seed(0)
    model = Net()
    ours, theirs = twins(model, mesh)
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


@pytest.mark.slow
def test_frozen_after_compile(ranks: Ranks) -> None:
    """Frozen parameters have no reduction and no gradient, also if frozen later."""
    ranks(2).run(_freeze_later)


def _swapped(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    torch.manual_seed(0)
    model = Net(dim=7)
    ours, theirs = twins(model, mesh)
    for each in (ours, theirs):
        value = distribute_tensor(torch.ones(7, 4), mesh, [Shard(0)], src_data_rank=None)
        each.stem.weight = nn.Parameter(value)
    inputs = [rows(rank + 10 * step) for step in range(3)]
    assert_same(train(ours, inputs), train(theirs, inputs), "after three steps")


@pytest.mark.slow
def test_parameters_swapped_after_compile(ranks: Ranks) -> None:
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
    batches = [[rows(0)] * world_size] * 3  # spectral norm iterates at each forward: equal on all ranks
    got = full(train(ours, [inputs[rank] for inputs in batches]))
    for name, value in data_parallel(reference, [[rows(0)]] * 3).items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer)


@pytest.mark.slow
def test_parametrizations_and_adapters(ranks: Ranks) -> None:
    ranks(2).run(_wrapped)


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


@pytest.mark.slow
def test_tied_weights(ranks: Ranks) -> None:
    """One shard, one gather, one gradient, both names; ties survive."""
    ranks(2).run(_tied)


# --- units --------------------------------------------------------------------------------------------------


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
    # Backward gathers only what it reads: no biases.
    groups = {frozenset(b.members) for b in program.plan.buckets if b.kind == "reduce" or b.phase == "forward"}
    units = [module for module in theirs.modules() if isinstance(module, FSDPModule)]
    of_fsdp2 = [[p._param_fqn for p in group.fsdp_params] for unit in units for group in groups_of(unit)]
    assert groups == set(map(frozenset, of_fsdp2))
    assert len(groups) == 3
    assert "gather stem, head in forward" in {b.name for b in program.plan.buckets}


def test_units_match_fsdp2s_groups(ranks: Ranks) -> None:
    """A function chooses modules, a tuple makes one group of several."""
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


@pytest.mark.slow
def test_two_compiled_modules_in_one_parent(ranks: Ranks) -> None:
    ranks(2).run(_pair)


def _submodule(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    torch.manual_seed(0)
    model = Net()
    ours, theirs = twins(model, mesh)
    inputs = [rows(rank + 10 * step) for step in range(2)]
    assert_same(train(ours, inputs), train(theirs, inputs), "the whole")
    for each in (ours, theirs):
        each.zero_grad()
    x = rows(rank, 5, 8)
    for each in (ours, theirs):
        each.blocks[1](x).sum().backward()
    assert_same(grads_of(ours), grads_of(theirs), "one block")
    assert_same(train(ours, inputs), train(theirs, inputs), "the whole again")
    up = ours.blocks[0].up  # not a unit: FSDP2 does not support it
    torch.testing.assert_close(up(x), F.linear(x, up.weight.full_tensor(), up.bias.full_tensor()))
    with torch.no_grad():
        ours.blocks[1](x)
    titles = [program.title for program in graphshard.programs(ours)]
    assert titles == ["Net-0", "Block-blocks.1-0", "Linear-blocks.0.up-0", "Block-blocks.1-1"]


@pytest.mark.slow
def test_a_submodule_called_directly(ranks: Ranks) -> None:
    ranks(2).run(_submodule)


class Joined(nn.Module):
    """Concatenates its parameters, like attention in transformers' wavlm; the concatenation is not part of a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers = nn.ModuleList(Block(8, 12) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat([part.weight for part in self.parts])
        bias = torch.cat([part.bias for part in self.parts])
        x = F.linear(x, weight, bias).unflatten(-1, (3, 8)).sum(-2)
        for layer in self.layers:
            x = layer(x)
        return x


def _joined(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Joined()
    theirs = copy.deepcopy(model)
    for layer in theirs.layers:
        fully_shard(layer, mesh=world_mesh())
    fully_shard(theirs, mesh=world_mesh())
    ours = graphshard.compile(model, world_mesh(), backend="eager", units=["layers.*"])
    inputs = [rows(10 * step + rank, 5, 8) for step in range(2)]
    assert_same(*(full(train(each, inputs)) for each in (ours, theirs)), "trained")


def test_parameters_that_the_model_concatenates(ranks: Ranks) -> None:
    ranks(2).run(_joined)
