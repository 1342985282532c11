"""`reduce="exchange"`: gradients have the bits of a float32 sum in the order of ranks, whoever adds and however."""

from __future__ import annotations

import contextlib
import copy
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

import graphshard
from graphshard.errors import ArgumentError, ArtifactError, UnsupportedError
from graphshard.ir import operators
from graphshard.ir.graph import is_in_order
from graphshard.passes import MakePlan
from tests.distributed.twins import assert_same, grads_of, local, params_of, world_mesh
from tests.helpers import COALESCED
from tests.ranks import Ranks

SHAPES = {"2": (2,), "3": (3,), "4": (4,), "2 x 2": (2, 2)}
WIRES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


class Uneven(nn.Module):
    """Shards of different sizes, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.last = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.last(x) * self.scale


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _input(rank: int, step: int) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _mean(gradient: Tensor, group: dist.ProcessGroup, wire: torch.dtype) -> Tensor:
    """Cast to the wire's dtype, gather, add in float32 in the order of ranks, and divide."""
    sent = gradient.to(wire).contiguous()
    received = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(received, sent, group=group)
    total = received[0].float()
    for each in received[1:]:
        total = total + each.float()
    return total / group.size()


class Reference:
    """Plain torch: the unsharded model for gradients, DTensors of its parameters for clipping and the optimizer."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, wire: torch.dtype) -> None:
        self.plain, self.sharded, self.mesh, self.wire = copy.deepcopy(model), copy.deepcopy(model), mesh, wire
        self.like: dict[str, DTensor] = {}

    def shard_like(self, model: nn.Module) -> None:
        """Take mesh and placements of a compiled model's parameters."""
        for name, param in model.named_parameters():
            owner, _, last = name.rpartition(".")
            module = self.sharded.get_submodule(owner)
            if isinstance(param, DTensor):
                whole = module._parameters[last].detach()
                module._parameters[last] = nn.Parameter(distribute_tensor(whole, param.device_mesh, param.placements))

    def backward(self, inputs: list[Tensor]) -> None:
        """Compute gradients of the mean over ranks of the sum over microbatches."""
        sums: dict[str, Tensor] = {}
        for x in inputs:
            self.plain.zero_grad()
            _loss(self.plain, x).backward()
            for name, param in self.plain.named_parameters():
                sums[name] = (sums[name] + param.grad if name in sums else param.grad).to(self.wire)
        for name, param in self.sharded.named_parameters():
            mean = sums[name]
            for axis in range(self.mesh.ndim)[::-1]:
                mean = _mean(mean, self.mesh.get_group(axis), self.wire)
            both = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
            param.grad = distribute_tensor(mean, *both) if both else mean

    def update(self, optimizer: torch.optim.Optimizer, clip_norm: float) -> None:
        """Clip and update, and take the new parameters."""
        nn.utils.clip_grad_norm_(self.sharded.parameters(), clip_norm)
        optimizer.step()
        with torch.no_grad():
            for ours, whole in zip(self.sharded.parameters(), self.plain.parameters()):
                whole.copy_(ours.full_tensor() if isinstance(ours, DTensor) else ours)


def _train(
    rank: int, world_size: int, shape: tuple[int, ...], wire: torch.dtype, backend: str, in_one: bool, **options: Any
) -> None:
    torch.manual_seed(0)
    mesh, model = _mesh(shape), Uneven()
    reference = Reference(model, mesh, wire)
    policy = MixedPrecisionPolicy(reduce_dtype=wire)
    ours = graphshard.compile(model, mesh, backend=backend, mp_policy=policy, reduce="exchange", **options)
    reference.shard_like(ours)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (ours, reference.sharded)]
    step_of = graphshard.compile_step(ours, optimizers[0], _loss, clip_norm=0.5, accumulate=2) if in_one else None
    for step in range(3):
        inputs = [_input(rank, 2 * step), _input(rank, 2 * step + 1)]
        if step_of is not None:
            step_of(*((x,) for x in inputs))
        else:
            for index, x in enumerate(inputs):
                ours.set_requires_gradient_sync(index == 1)
                _loss(ours, x).backward()
        reference.backward(inputs)
        if step_of is None:
            assert_same(grads_of(ours), grads_of(reference.sharded), f"gradients of step {step}")
            nn.utils.clip_grad_norm_(ours.parameters(), 0.5)
            optimizers[0].step()
            optimizers[0].zero_grad()
        reference.update(optimizers[1], 0.5)
        assert_same(params_of(ours), params_of(reference.sharded), f"parameters of step {step}")
    (program,) = graphshard.programs(ours)[:1]
    assert any(", in order" in line for line in program.communication)


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.quick_cases("3-bf16", "2 x 2-bf16")
def test_gradients_are_sums_in_rank_order(ranks: Ranks, shape: tuple[int, ...], wire: torch.dtype) -> None:
    """Accumulated over two microbatches, clipped, uneven."""
    ranks(4 if len(shape) > 1 else shape[0]).run(_train, shape, wire, "eager", False)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.quick_cases("3")
def test_compile_step(ranks: Ranks, shape: tuple[int, ...]) -> None:
    """Updates inside backward, clipping and accumulation read the same gradients."""
    ranks(4 if len(shape) > 1 else shape[0]).run(_train, shape, torch.bfloat16, "eager", True)


def _coalesced(rank: int, world_size: int) -> None:
    passes = graphshard.Pipeline().replace("plan", MakePlan(COALESCED))
    _train(rank, world_size, (2, 2), torch.bfloat16, "eager", True, passes=passes)


def test_several_tensors_in_a_bucket(ranks: Ranks) -> None:
    """Each is exchanged and added by itself, as on NCCL; the bucket has one wait."""
    ranks(4).run(_coalesced)


@pytest.mark.slow
def test_inductor(ranks: Ranks) -> None:
    """Regions of Inductor around the sums: the model computes nothing that fusion rounds differently."""
    ranks(3).run(_train, (3,), torch.bfloat16, "inductor", False)


class Late:
    """A process group whose messages are sent, and arrive, in random order."""

    def __init__(self, group: dist.ProcessGroup, seed: int) -> None:
        self.group, self.rank, self.random = group, group.rank(), random.Random(seed)

    def alltoall_base(self, received: Tensor, sent: Tensor, *sizes: Any) -> None:
        self.swap(list(received.chunk(self.group.size())), list(sent.chunk(self.group.size())))

    def gather(self, received: Tensor, shard: Tensor, name: str) -> None:
        self.swap(list(received.chunk(self.group.size())), [shard] * self.group.size())

    def swap(self, received: list[Tensor], sent: list[Tensor]) -> None:
        """Receive a tensor from every rank and send it one."""
        others = [rank for rank in range(self.group.size()) if rank != self.rank]
        received[self.rank].copy_(sent[self.rank])
        receiving = [
            dist.irecv(received[rank], group_src=rank, group=self.group)
            for rank in self.random.sample(others, len(others))
        ]
        sending = [
            dist.isend(sent[rank], group_dst=rank, group=self.group) for rank in self.random.sample(others, len(others))
        ]
        for work in (*sending, *self.random.sample(receiving, len(receiving))):
            work.wait()


def _arrivals(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model, group = Uneven(), dist.group.WORLD
    x = _input(rank, 0)
    _loss(model, x).backward()
    whole = [torch.empty(7, 7) for _ in range(world_size)]
    dist.all_gather(whole, model.layers[0].weight.grad)
    assert not torch.equal((whole[0] + whole[1]) + whole[2], (whole[2] + whole[1]) + whole[0]), "orders must differ"
    model.zero_grad()
    ours = graphshard.compile(model, world_mesh(), backend="eager", reduce="exchange")
    found = []
    for seed in (None, 0, 1, 2):
        late = Late(group, 10 * (seed or 0) + rank)
        with contextlib.ExitStack() as stack:
            if seed is not None:
                stack.enter_context(mock.patch.object(operators, "process_group", return_value=late))
                stack.enter_context(mock.patch.object(operators, "all_gather_into", late.gather))
            _loss(ours, x).backward()
        found.append({name: local(grad).clone() for name, grad in grads_of(ours).items()})
        ours.zero_grad()
    for other in found[1:]:
        assert_same(found[0], other, "arrivals in another order")


def test_the_order_of_arrival_changes_nothing(ranks: Ranks) -> None:
    """On three ranks the sum in another order has other bits."""
    ranks(3).run(_arrivals)


def _by_cost(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Uneven()
    reference = Reference(model, world_mesh(), torch.float32)
    ours = graphshard.compile(model, world_mesh(), backend="eager", reduce="auto")
    reference.shard_like(ours)
    x = _input(rank, 0)
    _loss(ours, x).backward()
    reference.backward([x])
    assert_same(grads_of(ours), grads_of(reference.sharded), "gradients")
    program = graphshard.programs(ours)[0]
    reductions = [bucket for bucket in program.plan.buckets if bucket.kind == "reduce"]
    assert reductions
    assert all(bucket.exchanged for bucket in reductions)
    assert not any(is_in_order(node) for node in program.backward.graph.nodes)


def test_the_planner_exchanges_where_it_may_and_that_is_faster(ranks: Ranks) -> None:
    """Gloo's reduce-scatter is an all-reduce for each rank."""
    ranks(3).run(_by_cost)


def _load(rank: int, world_size: int, path: Path) -> None:
    torch.manual_seed(0)
    model, mesh = Uneven(), _mesh((2, 2))
    with pytest.raises(ArtifactError, match="reduce"):
        graphshard.load(path, copy.deepcopy(model), mesh, reduce=None)
    reference = Reference(model, mesh, torch.bfloat16)
    ours = graphshard.load(path, model, mesh)
    reference.shard_like(ours)
    x = _input(rank, 0)
    ours(x).square().mean().backward()
    reference.backward([x])
    assert_same(grads_of(ours), grads_of(reference.sharded), "gradients")


@pytest.mark.slow
def test_export(ranks: Ranks, tmp_path: Path) -> None:
    """Files have the operators, and say how they were exported."""
    path, policy = tmp_path / "net.gshard", MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    options = {"backend": "eager", "mp_policy": policy, "reduce": "exchange"}
    graphshard.export(Uneven(), (2, 2), path, example_inputs=(_input(0, 0),), **options)
    ranks(4).run(_load, path)


def _refused(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ArgumentError, match=r"gradient of scale has nothing .* axis 'shard' .* one rank\. Leave"):
        graphshard.compile(Uneven(), mesh, reduce="exchange")
    model = graphshard.compile(Uneven(), world_mesh(), backend="eager", reduce="exchange")
    with pytest.raises(UnsupportedError, match='reduce="exchange" adds gradients itself'):
        model.set_custom_reduce_scatter(mock.MagicMock())


def test_errors(ranks: Ranks) -> None:
    ranks(2).run(_refused)
