"""FSDP2's methods for custom collectives and their settings, compared with the real FSDP2."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import graphshard
from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.torch_compat.torch_ops import TorchDispatchMode
from tests.distributed.nets import Net, rows
from tests.distributed.twins import BF16, assert_same, grads_of, twins, world_mesh
from tests.ranks import Ranks


def _needs(method: str) -> pytest.MarkDecorator:
    """Skip if this FSDP2 lacks a method: torch 2.11 has fewer."""
    return pytest.mark.skipif(not hasattr(FSDPModule, method), reason=f"this FSDP2 has no {method}")


class _Comm:
    """Counts calls and records arguments."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(tuple(size), torch.nan, dtype=dtype, device=device)


class _Gather(_Comm):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.calls.append(str(dist.get_process_group_ranks(group)))
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class _Reduce(_Comm):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Return twice the gradient, so that the call has an effect; synchronously, so there is no wait."""
        self.calls.append(str(op))
        dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)
        output_tensor.mul_(2)


def _comms(unit: Any) -> tuple[_Gather, _Reduce]:
    gather, reduce = _Gather(), _Reduce()
    unit.set_custom_all_gather(gather)
    unit.set_custom_reduce_scatter(reduce)
    return gather, reduce


def _train(rank: int, *models: Any) -> None:
    for model in models:
        model(rows(rank)).float().sum().backward()


def _custom(rank: int, world_size: int, policy: Any) -> None:
    pair = twins(Net(), world_mesh(), mp_policy=policy)
    _train(rank, *pair)
    comms = [_comms(model.blocks[0]) for model in pair]
    for model in pair:
        model.zero_grad()
    _train(rank, *pair)
    assert_same(*map(grads_of, pair), "gradients")
    (gather, reduce), (their_gather, their_reduce) = comms
    assert gather.calls == their_gather.calls == [str(list(range(world_size)))] * 2
    assert len(reduce.calls) == len(their_reduce.calls) == 1
    pair[0].blocks[1].set_all_reduce_hook(lambda gradient: None)
    measured = graphshard.profiling.profile_step(pair[0], (rows(rank),), loss=lambda y: y.float().sum(), warmup=1)
    assert len(gather.calls) > len(their_gather.calls)
    assert all(each.predicted is not None and each.kind in ("gather", "reduce") for each in measured.collectives)


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.slow
def test_custom_collectives_of_a_unit(ranks: Ranks, policy: Any) -> None:
    """Called the same number of times as by FSDP2, with its memory; the other units use the default."""
    ranks(3).run(_custom, policy or torch.distributed.fsdp.MixedPrecisionPolicy())


def _each_larger(rank: int, world_size: int) -> None:
    """A planner that packs nothing launches each tensor separately."""
    apart = graphshard.PlanByUnit(pack_gathers_below=0, pack_reductions_below=0)
    passes = graphshard.Pipeline().replace("plan", graphshard.passes.MakePlan(apart))
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    graphshard.compile(model, world_mesh(), backend="eager", passes=passes)
    gather, reduce = _comms(model.blocks[0])
    _train(rank, model)
    names = [name for name, _ in model.blocks[0].named_parameters()]
    # Backward reads no bias.
    assert len(gather.calls) == len(names) + len([name for name in names if "bias" not in name])
    assert len(reduce.calls) == len(names)
    (plain(torch.cat([rows(r) for r in range(world_size)])).sum() / world_size).backward()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        factor = 2 if name.startswith("blocks.0.") else 1
        torch.testing.assert_close(param.grad.full_tensor(), factor * expected.grad, msg=name)


def test_custom_collectives_without_packing(ranks: Ranks) -> None:
    ranks(2).run(_each_larger)


def _hook(calls: list[tuple[torch.dtype, int]], gradient: Tensor) -> None:
    calls.append((gradient.dtype, gradient.numel()))
    gradient.mul_(3).add_(0.5)


def _hooked(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    pair = twins(Net(), mesh, mp_policy=BF16)
    seen: list[list[tuple[torch.dtype, int]]] = [[], []]
    for model, calls in zip(pair, seen):
        model.blocks[1].set_all_reduce_hook(functools.partial(_hook, calls))
        model.set_requires_gradient_sync(False)
    _train(rank, *pair)
    assert seen == [[], []]
    for model in pair:
        model.set_requires_gradient_sync(True)
    _train(rank, *pair)
    assert_same(*map(grads_of, pair), "gradients")
    assert seen[0] == seen[1], seen
    assert [dtype for dtype, _ in seen[0]] == [torch.float32]


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["FSDP", "HSDP"])
@pytest.mark.slow
def test_a_hook_sees_reduced_gradients(ranks: Ranks, shape: tuple[int, ...]) -> None:
    """Runs once per reduction, after the all-reduce over replicas, on FSDP2's buffer; in-place changes take effect."""
    ranks(4).run(_hooked, shape)


class _Groups(TorchDispatchMode):
    """Records the names of the process groups that reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "reduce_scatter" in str(func):
            self.names.append(str(args[-1]))
        return func(*args, **kwargs or {})


def _separate(rank: int, world_size: int) -> None:
    ours, theirs = twins(Net(), world_mesh())
    found = []
    for enable in (True, False):
        for model in (ours, theirs):
            model.set_separate_reduce_scatter_group(enable)
            model.zero_grad()
        with _Groups() as groups:
            _train(rank, ours)
        _train(rank, theirs)
        assert_same(grads_of(ours), grads_of(theirs), "gradients")
        found.append(set(groups.names))
    own, shared = found
    assert len(own) == len(shared) == 1
    assert own != shared
    ours.blocks[0].set_separate_reduce_scatter_group()
    with _Groups() as groups:
        _train(rank, ours)
    assert set(groups.names) == own | shared


@_needs("set_separate_reduce_scatter_group")
@pytest.mark.slow
def test_reductions_in_a_separate_group(ranks: Ranks) -> None:
    """For all units, for none, and for one."""
    ranks(3).run(_separate)


def _buffers(rank: int, world_size: int) -> list[list[str]]:
    ours, theirs = twins(Net(), world_mesh())
    found = []
    for most in (1, 2):
        for model in (ours, theirs):
            model.set_reduce_scatter_max_input_buffers(most)
            model.zero_grad()
        _train(rank, ours, theirs)
        assert_same(grads_of(ours), grads_of(theirs), "gradients")
        plan = graphshard.programs(ours)[-1].plan
        assert plan is not None
        found.append([f"{e.action} {e.bucket}" for e in plan.events["backward"] if e.bucket.startswith("reduce")])
    return found


@_needs("set_reduce_scatter_max_input_buffers")
@pytest.mark.slow
def test_concurrent_reductions(ranks: Ranks) -> None:
    last, first, root = (f"reduce {unit} in backward" for unit in ("blocks.1", "blocks.0", "(root)"))
    for one, two in ranks(2).run(_buffers):
        assert one[:4] == [f"start {last}", f"wait {last}", f"start {first}", f"wait {first}"]
        assert two[:4] == [f"start {last}", f"start {first}", f"wait {last}", f"start {root}"]


class _Event:
    waited = 0

    def wait(self) -> None:
        self.waited += 1


def _events(rank: int, world_size: int) -> None:
    model, _ = twins(Net(), world_mesh())
    event = _Event()
    model.set_post_optim_event(event)
    _train(rank, model)
    _train(rank, model)
    assert event.waited == 1


def test_the_next_call_waits_for_an_event_once(ranks: Ranks) -> None:
    ranks(2).run(_events)


def _before_the_root(rank: int, world_size: int) -> None:
    """Settings of a unit remain when it becomes a part of a model."""
    model = Net()
    for block in model.blocks:
        graphshard.fully_shard(block, backend="eager")
    gather, _ = _comms(model.blocks[1])
    calls: list[tuple[torch.dtype, int]] = []
    model.blocks[0].set_all_reduce_hook(functools.partial(_hook, calls))
    model.blocks[0].set_reduce_scatter_max_input_buffers(2)
    graphshard.fully_shard(model, backend="eager")
    _train(rank, model)
    assert len(gather.calls) == 2
    assert len(calls) == 1
    plan = graphshard.programs(model)[-1].plan
    assert plan is not None
    events = [f"{e.action} {e.bucket}" for e in plan.events["backward"] if e.bucket.startswith("reduce")]
    assert [event.split()[0] for event in events[:2]] == ["start", "start"]


def test_settings_before_the_root_is_sharded(ranks: Ranks) -> None:
    ranks(2).run(_before_the_root)


ERRORS: dict[str, Callable[[Any], None]] = {
    r"comm must have FSDP2's allocate.*got 3": lambda m: m.set_custom_all_gather(3),
    r"comm must have FSDP2's allocate.*got <?function|comm must have": lambda m: m.set_custom_reduce_scatter(print),
    r"hook must be": lambda m: m.set_all_reduce_hook("x"),
    r"max_input_buffers must be a positive int, got True": lambda m: m.set_reduce_scatter_max_input_buffers(True),
    r"max_input_buffers must be a positive int, got 0": lambda m: m.set_reduce_scatter_max_input_buffers(0),
    r"enable must be": lambda m: m.set_separate_reduce_scatter_group("x"),
    r"event must be a torch\.Event, got 3": lambda m: m.set_post_optim_event(3),
    r"backend must be one of 'NCCL', got 'NVSHMEM'": lambda m: m.set_symm_mem_for_comm("NVSHMEM"),
    r"enable must be a bool, got 1|enable must be": lambda m: m.set_allocate_memory_from_process_group_for_comm(1),
}


def _wrong(rank: int, world_size: int) -> None:
    model, _ = twins(Net(), world_mesh())
    for message, call in ERRORS.items():
        with pytest.raises((ArgumentError, UnsupportedError)) as caught:
            call(model)
        assert re.search(message, str(caught.value)), str(caught.value)
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model, _ = twins(Net(), replicas)
    with pytest.raises(ArgumentError, match=r"^stream=.*with replicas the hook runs where"):
        model.set_all_reduce_hook(print, stream=object())
    limited = graphshard.compile(Net(), world_mesh(), backend="eager", memory_limit=10**9, hardware="cpu-gloo")
    with pytest.raises(UnsupportedError, match="set_custom_all_gather: memory_limit decides when"):
        limited.set_custom_all_gather(_Gather())


def test_wrong_arguments(ranks: Ranks) -> None:
    ranks(2).run(_wrong)
