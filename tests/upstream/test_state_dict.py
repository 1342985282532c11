"""Counterparts of test_fully_shard_state_dict.py: state dicts hold the shards at any time."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphshard
from tests.distributed.nets import Block, largest_dim
from tests.distributed.twins import assert_same, example_llama, fsdp2, local, twins, world_mesh
from tests.ranks import Ranks
from tests.upstream.lockstep import Pair, own_rows, squares, stack, train_alike


def _nested(dim: int) -> nn.Module:
    """Build units of one module and of several, with none at the root."""
    return nn.Sequential(Block(dim, 4 * dim), nn.Sequential(Block(dim, 4 * dim), nn.Linear(dim, dim)), Block(dim, dim))


def _pointers(model: nn.Module) -> dict[str, int]:
    return {name: value.to_local().data_ptr() for name, value in model.state_dict().items()}


def _filled(pair: Pair, value: float) -> None:
    """Fill the shards, compare state dicts, and check that loading writes to the same memory."""
    for model in pair:
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(1.0)
        before = _pointers(model)
        assert before == {name: param.to_local().data_ptr() for name, param in model.named_parameters()}
        state = {name: entry.detach().clone().fill_(value) for name, entry in model.state_dict().items()}
        assert all(isinstance(entry, DTensor) for entry in state.values())
        assert all((local(param) == 1).all() for param in model.parameters())
        model.load_state_dict(state)
        assert all((local(param) == value).all() for param in model.parameters())
        even = [n for n, p in model.named_parameters() if local(p).size(0) * p.device_mesh.size(-1) == p.size(0)]
        after = _pointers(model)
        assert [after[name] for name in even] == [before[name] for name in even]


def _saved_and_loaded(rank: int, world_size: int, dims: list[int]) -> None:
    mesh = world_mesh()
    if world_size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for dim in dims:
        placement = largest_dim if dim == 16 else None
        for reshard in (True, False):
            torch.manual_seed(dim)
            pair = twins(_nested(dim), mesh, shard_placement_fn=placement, reshard_after_forward=reshard)
            _filled(pair, 42.0 + mesh.get_local_rank(-1))
            assert_same(*(dict(model.state_dict()) for model in pair), f"{dim=}, {reshard=}")
        before = [dict(model.state_dict()) for model in pair]
        outputs = [model(own_rows(0, 2, dim)) for model in pair]
        assert torch.equal(*outputs)
        for model, state in zip(pair, before):  # FSDP2 has gathered and not yet freed them
            assert_same(dict(model.state_dict()), state, f"{dim=}, after a forward")
        assert_same(*(dict(model.state_dict()) for model in pair), f"{dim=}, after a forward")


@pytest.mark.parametrize("dims", [[2, 3], [5], [16]], ids=str)
@pytest.mark.slow
def test_states_are_the_shards(ranks: Ranks, dims: list[int]) -> None:
    """`TestFullyShardStateDictMultiProcess.test_dp_state_dict_save_load`: even, uneven and empty shards, any dim."""
    ranks(2).run(_saved_and_loaded, dims)


@pytest.mark.slow
def test_states_of_replicas_are_the_shards(ranks: Ranks) -> None:
    """`TestFullyShardStateDictMultiProcess.test_dp_state_dict_save_load`, on two axes."""
    ranks(4).run(_saved_and_loaded, [3, 16])


def _cached(rank: int, world_size: int, convert: Callable[[nn.Module], nn.Module], stays: bool) -> None:
    pair = twins(nn.Linear(5, 5, bias=False), world_mesh())
    states = [model.state_dict() for model in pair]
    for model in pair:
        convert(model)

    def shared() -> list[bool]:
        return [_pointers(model)["weight"] == local(state["weight"]).data_ptr() for model, state in zip(pair, states)]

    assert shared() == [stays, stays]
    train_alike(pair, lambda model, step: squares(model(own_rows(step, 4, 5))))
    assert shared() == [stays, stays]
    assert_same(*states, "the states that were taken first")


CONVERSIONS: dict[str, tuple[Callable[[nn.Module], nn.Module], bool]] = {
    "not": (lambda model: model, True),
    "there and back": (lambda model: model.double().float(), False),
}


@pytest.mark.parametrize("how", CONVERSIONS)
def test_a_cached_state_dict_follows_training(ranks: Ranks, how: str) -> None:
    """`TestFullyShardStateDictMultiProcess.test_cached_state_dict`: until the model is converted."""
    ranks(2).run(_cached_by_name, how)


def _cached_by_name(rank: int, world_size: int, how: str) -> None:
    _cached(rank, world_size, *CONVERSIONS[how])


def _offloaded(rank: int, world_size: int) -> None:
    """Compare offloaded state dicts. FSDP2 pins memory by default, which needs a GPU."""

    def made() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))

    units = ["0", "1"]
    mesh = world_mesh()
    theirs = fsdp2(made(), mesh, units=units, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for pin in (True, False):
        policy = CPUOffloadPolicy(pin_memory=pin)
        ours = graphshard.compile(made(), mesh, units=units, offload_policy=policy, backend="eager")
        for model in (ours, theirs):
            torch.manual_seed(3)
            for name, param in list(model.named_parameters()):
                values = distribute_tensor(torch.randn(param.shape), param.device_mesh, param.placements)
                loaded = model.load_state_dict({name: values}, assign=True, strict=False)
                assert (len(loaded.missing_keys), loaded.unexpected_keys) == (1, [])
        outputs = [model(own_rows(0, 4, 4)) for model in (ours, theirs)]
        assert torch.equal(*outputs)
        assert_same(dict(ours.state_dict()), dict(theirs.state_dict()), f"{pin=}")
        assert {value.device.type for value in ours.state_dict().values()} == {"cpu"}


def test_parts_of_a_state_are_loaded_into_an_offloaded_model(ranks: Ranks) -> None:
    """`TestFullyShardStateDictMultiProcess.test_dp_state_dict_cpu_offload`: one by one, with the rest on meta."""
    ranks(2).run(_offloaded)


def _cut(mesh: DeviceMesh) -> nn.Module:
    """Shard blocks for tensor parallelism with `parallelize_module`."""
    plan = {f"{index}.{name}": style() for index in range(3) for name, style in STYLES.items()}
    return parallelize_module(stack(), mesh, plan)


STYLES = {"up": ColwiseParallel, "down": RowwiseParallel}


def _tensor_parallel(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    names = ("replicate", "shard", "tensor")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    theirs = fsdp2(_cut(mesh["tensor"]), mesh[names[:-1]])
    pair = graphshard.compile(_cut(mesh["tensor"]), mesh, backend="eager"), theirs
    plain = stack().state_dict()
    for model in pair:
        assert_same({name: value.full_tensor() for name, value in model.state_dict().items()}, plain, "whole")
    assert_same(*(dict(model.state_dict()) for model in pair), "shards")
    _filled(pair, 2.0)


@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)], ids=str)
def test_states_of_tensor_parallel_models(ranks: Ranks, shape: tuple[int, ...]) -> None:
    """`TestFullyShardStateDictMultiProcess.test_2d_state_dict_correctness`,
    `TestFullyShardStateDictMultiProcess.test_dp_tp_state_dict_save_load` and
    `TestFullyShardStateDictMultiProcess.test_hsdp_tp_state_dict_save_load`.
    """
    ranks(4).run(_tensor_parallel, shape)


def _full_on_rank_0(rank: int, world_size: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    plain, _ = example_llama(layers=1)
    for param in plain.parameters():
        dist.broadcast(param.detach(), src=0)
    expected = copy.deepcopy(plain.state_dict())
    ours, theirs = twins(plain, world_mesh())
    held: dict[str, Tensor] = {}
    for name, value in ours.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if rank == 0:
            held[name] = whole.cpu()
    assert_same(dict(ours.state_dict()), dict(theirs.state_dict()), "shards")
    if rank == 0:
        assert_same(held, dict(expected), "full values")
    return held


def test_full_values_on_one_rank(ranks: Ranks) -> None:
    """`TestFullyShardStateDictMultiThread.test_rank0_offload_full_state_dict`."""
    first, second = ranks(2).run(_full_on_rank_0)
    assert first
    assert not second
