"""External graphs on real gloo ranks: the same bits before and after scheduling, on one axis and on two."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard import ScheduledGraph, schedule_graph
from graphshard.ir.program import Phase
from graphshard.profiling import Profile, load_profile
from graphshard.runtime.collective_launches import gather_into_buffers
from tests.foreign.planes import planes
from tests.ranks import Ranks

c10d = torch.ops._c10d_functional
wait = c10d.wait_tensor
DIM, ROWS = 16, 8


def _data_parallel(names: list[str], size: int) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Return forward and backward of a fully sharded stack: gathers of cast shards twice, reductions of gradients."""
    (name,) = names

    def run(x: torch.Tensor, *shards: torch.Tensor) -> Any:
        def full(shard: torch.Tensor) -> torch.Tensor:
            return wait(c10d.all_gather_into_tensor(shard.to(torch.float64), size, name)).to(torch.float32)

        saved, value = [], x
        for shard in shards:
            saved.append(value)
            value = torch.relu(value @ full(shard))
        gradient, reduced = value * 0.01, []
        for shard, before in zip(reversed(shards), reversed(saved)):
            reduced.append(wait(c10d.reduce_scatter_tensor(before.t() @ gradient, "avg", size, name)) / 2)
            gradient = gradient @ full(shard).t()
        return value, reduced

    return run, [torch.randn(ROWS, DIM), *(torch.randn(DIM // size, DIM) for _ in range(4))]


def _two_axes(names: list[str], size: int) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Return gathers over one axis, activation all-reduces over the other, gradients over both, a mutated buffer."""
    data, tensor = names

    def run(x: torch.Tensor, running: torch.Tensor, *shards: torch.Tensor) -> Any:
        value, gradients = x, []
        for shard in shards:
            full = wait(c10d.all_gather_into_tensor(shard, size, data))
            value = wait(c10d.all_reduce(torch.tanh(value @ full), "sum", tensor))
            running.mul_(0.5).add_(value.mean(0))
            value = value + torch.rand_like(value)
            scattered = wait(c10d.reduce_scatter_tensor(full * value.mean(), "sum", size, data))
            gradients.append(wait(c10d.all_reduce(scattered, "avg", tensor)))
        return value, gradients, running.clone(), wait(c10d.all_reduce(x, "sum", data))

    return run, [torch.randn(ROWS, DIM), torch.zeros(DIM), *(torch.randn(DIM // size, DIM) for _ in range(3))]


def _exchange(names: list[str], size: int) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Return a forward with all-to-alls, a coalesced gather of views, and a wait with several users."""
    (name,) = names

    def run(x: torch.Tensor, one: torch.Tensor, other: torch.Tensor, *vectors: torch.Tensor) -> Any:
        parts = [ROWS // size] * size
        sent = wait(c10d.all_to_all_single(x, parts, parts, name))
        first, second = c10d.all_gather_into_tensor_coalesced([one.view(-1, DIM), other], size, name)
        first, second = wait(first), wait(second)
        third = wait(c10d.all_gather_into_tensor(other * 2, size, name))
        value = torch.relu(sent @ first) @ second[:DIM] + sent @ third
        back = wait(c10d.all_to_all_single(value, parts, parts, name))
        sums = [wait(c10d.all_reduce(torch.sin(vector), "sum", name)) for vector in vectors]
        return back, first, first.t() @ second, wait(c10d.all_reduce(one, "max", name)), sums

    vectors = [torch.randn(length) for length in (1, 3, 1000, 17, 65537)]
    return run, [torch.randn(ROWS, DIM), torch.randn(DIM // size, DIM), torch.randn(DIM // size, DIM), *vectors]


def _planes(names: list[str], size: int) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Return a graph as captured by AutoParallel: parameters are sharded over both axes."""
    return planes(*names, size)


PROGRAMS = {"data parallel": _data_parallel, "exchange": _exchange, "two axes": _two_axes, "planes": _planes}


def _run(module: GraphModule, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    gather_into_buffers(Phase(module, (), ()))  # functional gathers corrupt the heap on gloo
    module.recompile()
    inputs = [tensor.clone() for tensor in inputs]
    return [*torch.utils._pytree.tree_leaves(module(*inputs)), *inputs]


def _launches(found: ScheduledGraph, names: list[str]) -> list[tuple[str, Any]]:
    """Return the launches in order, with axes instead of groups, whose names differ between ranks."""
    nodes = [
        n for n in found.module.graph.nodes if "_c10d_functional" in str(n.target) and n.target is not wait.default
    ]
    return [(str(n.target), (*n.args[1:-1], names.index(n.args[-1]))) for n in nodes]


def _machine() -> Profile:
    """Return an H100 whose collectives take 50 us to start, so that packing pays."""
    profile = load_profile("h100")
    return replace(profile, protocols=tuple(replace(p, base=p.base + 50e-6) for p in profile.protocols))


def _compare(rank: int, world_size: int, name: str, shape: tuple[int, ...]) -> Any:
    mesh = init_device_mesh("cpu", shape)
    names = [mesh.get_group(dim).group_name for dim in range(mesh.ndim)]
    torch.manual_seed(0)
    function, inputs = PROGRAMS[name](names, shape[0])
    gm = make_fx(function)(*inputs)
    inputs = [tensor + rank * 0.37 * torch.rand_like(tensor) for tensor in inputs]
    found = schedule_graph(gm, mesh, hardware=_machine(), memory_limit=math.inf)
    launches = _launches(found, names)
    before, after = _run(gm, inputs), _run(found.module, inputs)
    equal = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    joined = sum(len(bucket.members) > 1 for bucket in found.buckets)
    return equal, launches, joined, found.seconds_before, found.seconds_after


SHAPES = [
    ("data parallel", (2,)),
    ("exchange", (2,)),
    ("data parallel", (4,)),
    ("exchange", (4,)),
    ("two axes", (2, 2)),
    ("planes", (2, 2)),
]


@pytest.mark.parametrize(("name", "shape"), SHAPES)
@pytest.mark.quick_cases("data parallel-shape0", "exchange-shape1", "two axes-shape4")
def test_the_same_bits_and_order_on_all_ranks(ranks: Ranks, name: str, shape: tuple[int, ...]) -> None:
    size = 1
    for length in shape:
        size *= length
    found = ranks(size).run(_compare, name, shape)
    for equal, launches, joined, before, after in found:
        assert all(equal)
        assert launches == found[0][1]
        assert joined
        assert after < before
