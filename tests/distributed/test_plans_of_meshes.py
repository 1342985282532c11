"""Cost-based plans for collectives on several axes: FSDP2's bits under any plan and under the least memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphshard
from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.errors import ArgumentError, DivergenceError, InfeasibleError
from graphshard.passes import MakePlan
from graphshard.schedule.planner import PlanByCost
from tests.distributed import expert_parallel
from tests.distributed.expert_parallel import WIDTH
from tests.distributed.tensor_parallel import data_of, llama, mesh_of, mlps, rows, tokens, train_alike
from tests.distributed.twins import (
    AliveBytes,
    assert_same,
    example_llama,
    fsdp2,
    grads_of,
    local,
    train_side_by_side,
)
from tests.ranks import Ranks

SHORTEST = graphshard.Pipeline().replace("plan", MakePlan(PlanByCost(Costs(load_profile("cpu-gloo")))))


def _compiled(
    model: nn.Module, mesh: DeviceMesh, inputs: dict[str, Any], *, limited: bool, **options: Any
) -> nn.Module:
    """Compile with the shortest plan by cost, or with the least possible memory."""
    if not limited:
        return graphshard.compile(model, mesh, backend="eager", passes=SHORTEST, **options)
    limit = _least(model, mesh, inputs, **options)
    return graphshard.compile(model, mesh, backend="eager", memory_limit=limit, **options)


def _least(model: nn.Module, mesh: DeviceMesh, inputs: dict[str, Any], **options: Any) -> int:
    """Return the least memory of any plan; a lower limit is an error on all ranks."""
    with pytest.raises(InfeasibleError, match=r"no schedule fits in a memory_limit of 1,000 bytes\. The le") as error:
        graphshard.compile(model, mesh, backend="eager", memory_limit=1000, **inputs, **options)
    return error.value.smallest


def _check(model: nn.Module) -> None:
    for program in graphshard.programs(model):
        prediction = program.plan.prediction
        assert prediction is not None, "planned by cost"
        assert prediction.lower_bound <= prediction.step_seconds


def _replicated(rank: int, world_size: int, shape: tuple[int, int], limited: bool) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model, batch = example_llama(layers=3)
    theirs = fsdp2(copy.deepcopy(model), mesh)
    inputs = {"example_inputs": (), "example_kwargs": batch()}
    ours = _compiled(model, mesh, inputs, limited=limited)
    train_side_by_side((ours, theirs), batch, steps=3)
    _check(ours)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=str)
@pytest.mark.slow
def test_replicas(ranks: Ranks, shape: tuple[int, int], limited: bool) -> None:
    """Two-stage reductions, packed and moved; or only all-reduces."""
    ranks(4).run(_replicated, shape, limited)


def _with_experts(rank: int, world_size: int, shape: tuple[int, ...], limited: bool) -> int:
    mesh = expert_parallel.mesh_of(*shape)
    ours, theirs = (expert_parallel.Moe(mesh["ep"], layers=2) for _ in range(2))
    expert_parallel.fsdp2(theirs, mesh)
    inputs = {"example_inputs": (expert_parallel.batch(0, rank),)}
    ours = _compiled(ours, mesh, inputs, limited=limited)
    for step in range(2):
        for model in (ours, theirs):
            model(expert_parallel.batch(step, rank)).backward()
        assert_same(grads_of(ours), grads_of(theirs), f"gradients of step {step}")
    _check(ours)
    axes = {bucket.axis for bucket in graphshard.programs(ours)[0].plan.buckets}
    assert {"dp", "dp_ep"} <= axes
    return graphshard.programs(ours)[0].plan.prediction.peak_bytes


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.slow
def test_experts(ranks: Ranks, limited: bool) -> None:
    """Their parameters are gathered over other axes, on the same link."""
    assert len(set(ranks(4).run(_with_experts, (2, 2), limited))) == 1


@pytest.mark.slow
def test_experts_and_replicas(ranks: Ranks) -> None:
    """Gradients of both have two-stage reductions."""
    ranks(8).run(_with_experts, (2, 2, 2), True)


def _regathered(rank: int, world_size: int, limited: bool) -> None:
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    model, batch = example_llama(layers=3)
    theirs = fsdp2(copy.deepcopy(model), mesh, reshard_after_forward=2)
    inputs = {"example_inputs": (), "example_kwargs": batch()}
    ours = _compiled(model, mesh, inputs, limited=limited, reshard_after_forward=2)
    train_side_by_side((ours, theirs), batch, steps=3)
    _check(ours)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.slow
def test_gathers_again_among_neighbors(ranks: Ranks, limited: bool) -> None:
    ranks(4).run(_regathered, limited)


def _parallelized(rank: int, world_size: int, shape: tuple[int, ...], make: Any, batch: Any, limited: bool) -> None:
    mesh = mesh_of(*shape)
    theirs = fsdp2(make(mesh["tp"]), data_of(mesh))
    ours = _compiled(make(mesh["tp"]), mesh, {"example_inputs": batch()}, limited=limited)
    train_alike((ours, theirs), mesh, batch)
    _check(ours)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("model", ["mlps", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.quick_cases("mlps-True")
def test_a_tensor_axis(ranks: Ranks, model: str, limited: bool) -> None:
    """The model's collectives keep their position between collectives of parameters and gradients."""
    make, batch = {"mlps": (mlps, rows), "llama": (llama, tokens)}[model]
    ranks(4).run(_parallelized, (2, 2), make, batch, limited)


class Wide(nn.Module):
    """Blocks of two matmuls, whose parameters take most of the memory."""

    def __init__(self, depth: int = 3, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


def _wide(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = Wide()
    if "tp" in (mesh.mesh_dim_names or ()):
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return model


def _peaks(
    rank: int, world_size: int, shape: tuple[int, ...], names: tuple[str, ...], again: int | None
) -> list[float]:
    """Return the measured peak as a fraction of the planned one, under the least limit and under another."""
    mesh, x = init_device_mesh("cpu", shape, mesh_dim_names=names), torch.randn(2, 128, requires_grad=True)
    # Nothing is packed: the plan does not count the send buffer of packed tensors.
    options = {"reshard_after_forward": True if again is None else again, "units": ["layers.*.*"]}
    model = _wide(mesh)
    least = _least(model, mesh, {"example_inputs": (x,)}, **options)
    found = []
    for limit in (least, 2 * least):
        model = graphshard.compile(_wide(mesh), mesh, backend="eager", memory_limit=limit, **options)
        model(x).backward()
        model.zero_grad()
        shards = [local(param).detach() for param in model.parameters()]
        state = 3 * sum(shard.nbytes for shard in shards)  # plus the optimizer's two states, which do not exist here
        (program,) = graphshard.programs(model)
        predicted = program.plan.prediction.peak_bytes
        assert predicted <= limit
        x.grad = None
        with AliveBytes([x, *shards], predicted - state) as mode:
            model(x).backward()
        found.append((mode.most + state) / predicted)
    return found


@pytest.mark.parametrize(
    ("shape", "names", "again"),
    [
        ((4,), ("dp",), None),
        ((2, 2), ("replicate", "shard"), None),
        ((4,), ("dp",), 2),
        ((2, 2), ("dp", "tp"), None),
    ],
    ids=["one axis", "replicas", "neighbors", "tensor axis"],
)
@pytest.mark.slow
def test_measured_memory_matches_the_plan(ranks: Ranks, shape: Any, names: Any, again: int | None) -> None:
    """Never more: a plan counts the maximum of each stretch of compute."""
    for shares in ranks(4).run(_peaks, shape, names, again):
        assert all(0.7 < share <= 1.0 for share in shares)


class Odd(nn.Module):
    """Matmuls whose inner dims no axis divides: ranks with smaller shards pad what they send."""

    def __init__(self, width: int = 6, inner: int = 13, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, inner), "down": nn.Linear(inner, width)}) for _ in range(depth)
        )
        self.last = nn.Linear(width, inner, bias=False)
        self.head = nn.Linear(inner, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["down"](torch.relu(layer["up"](x)))
        return self.head(self.last(x)).square().mean()


def odd(tp: DeviceMesh) -> nn.Module:
    torch.manual_seed(1)
    model = Odd()
    for layer in model.layers:
        parallelize_module(layer, tp, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    parallelize_module(model, tp, {"last": ColwiseParallel(output_layouts=Replicate())})
    return model


class Padded(nn.Module):
    """Gathers frozen rows over the tensor axis: a rank with fewer rows holds its shard and a padded copy."""

    def __init__(self, rows: int = 15, width: int = 4096) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(rows, width) * 0.1, requires_grad=False)
        self.head = nn.Linear(rows, 5)

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.rows * 2
        made = F.linear(x, scaled.full_tensor())
        return self.head(made).square().mean() + scaled.sum().full_tensor()


def _padded(tp: DeviceMesh) -> nn.Module:
    torch.manual_seed(1)
    model = Padded()
    rows = distribute_tensor(model.rows.detach(), tp, [Shard(0)], src_data_rank=None)
    model.rows = nn.Parameter(rows, requires_grad=False)
    return model


def few_rows() -> tuple[Tensor]:
    return (torch.randn(3, 6),)


def _pieces(rank: int, world_size: int, limited: bool, activation: Any) -> tuple[Any, ...]:
    mesh, options = mesh_of(2, 2), {} if activation is None else {"activation": activation}
    theirs = fsdp2(odd(mesh["tp"]), data_of(mesh))
    ours = _compiled(odd(mesh["tp"]), mesh, {"example_inputs": few_rows()}, limited=limited, **options)
    train_alike((ours, theirs), mesh, few_rows)
    _check(ours)
    (program,) = graphshard.programs(ours)
    return [_without_sizes(line) for line in program.communication], program.plan.buckets, program.plan.prediction


def _without_sizes(line: str) -> str:
    """Strip the size; keep the collective, and its axis if the model launches it."""
    return line.partition(" as ")[0]


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.slow
def test_uneven_shards_on_a_tensor_axis(ranks: Ranks, limited: bool) -> None:
    """All ranks use the first rank's plan, so all launch the same collectives in the same order."""
    first, *others = ranks(4).run(_pieces, limited, None)
    assert all(other == first for other in others)
    assert any("over tp" in line for line in first[0])


@pytest.mark.slow
def test_activation_policy_with_uneven_shards(ranks: Ranks) -> None:
    """The first rank selects saved values by name, because sizes differ between ranks."""
    first, *others = ranks(4).run(_pieces, True, "auto")
    assert all(other == first for other in others)


class OddBlock(nn.Module):
    """A block with a sum over the tensor axis between the values it may save."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        made = self.up(x)
        return x + torch.tanh(self.out(torch.tanh(self.down(torch.relu(made) * torch.sigmoid(made)))))


def odd_blocks(tp: DeviceMesh) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(*(OddBlock(6, 13) for _ in range(3)))
    for block in model:
        parallelize_module(block, tp, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    return model


def _shares(rank: int, world_size: int, share: float) -> list[str]:
    """Return the communication of a step: a sum is repeated if later values are not saved."""
    mesh = mesh_of(2, 2)
    model = graphshard.compile(odd_blocks(mesh["tp"]), mesh, backend="eager", units=["*"], activation=share)
    plain = graphshard.compile(odd_blocks(mesh["tp"]), mesh, backend="eager", units=["*"])
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank // 2))
    for each in (model, plain):
        each(x).square().mean().backward()
    assert_same(grads_of(model), grads_of(plain), "gradients")
    (program,) = graphshard.programs(model)
    return [_without_sizes(line) for line in program.communication]


@pytest.mark.parametrize(("share", "again"), [(0.12, 1), (0.18, 0)])
@pytest.mark.quick_cases("0.12-1")
def test_activation_share_with_uneven_shards(ranks: Ranks, share: float, again: int) -> None:
    """Ranks with smaller shards would save one value less, and repeat a sum that others do not."""
    first, *others = ranks(4).run(_shares, share)
    assert all(other == first for other in others)
    assert sum("over tp" in line for line in first if line.startswith("backward")) == 2 + again


def _padded_peaks(rank: int, world_size: int) -> tuple[int, int, int, str]:
    """Return the least limit, the predicted and measured peaks, and the message below the limit."""
    mesh, x = mesh_of(2, 2), torch.randn(2, 4096)
    options, inputs = {"units": ["head"]}, {"example_inputs": (x,)}
    least = _least(_padded(mesh["tp"]), mesh, inputs, **options)
    model = graphshard.compile(_padded(mesh["tp"]), mesh, backend="eager", memory_limit=least, **options)
    model(x).backward()
    model.zero_grad()
    shards = [local(param).detach() for param in model.parameters()]
    state = sum(shard.nbytes for shard in shards) + 2 * sum(local(p).nbytes for p in model.head.parameters()) + x.nbytes
    (program,) = graphshard.programs(model)
    predicted = program.plan.prediction.peak_bytes
    with AliveBytes([x, *shards], predicted - state) as mode:
        model(x).backward()
    with pytest.raises(InfeasibleError) as error:
        graphshard.compile(_padded(mesh["tp"]), mesh, backend="eager", memory_limit=least - 1, **inputs, **options)
    assert error.value.smallest == least
    return least, predicted, mode.most + state, str(error.value)


def test_the_limit_holds_on_the_rank_with_the_highest_peak(ranks: Ranks) -> None:
    """The rank with the smaller shard and a padded copy; all ranks know its minimum."""
    found = ranks(4).run(_padded_peaks)
    assert len({(least, predicted, message) for least, predicted, _, message in found}) == 1
    least, predicted, _, message = found[0]
    taken = [most for _, _, most, _ in found]
    assert max(taken[1], taken[3]) > 1.1 * max(taken[0], taken[2])
    assert 0.9 * predicted < max(taken) <= predicted <= least
    assert f"in a memory_limit of {least - 1:,} bytes. The least possible is {least:,} bytes: pieces of" in message


class _OddExperts(nn.Module):
    """An odd number of experts on two ranks, which see each other's tokens."""

    def __init__(self, axis: DeviceMesh, number: int) -> None:
        super().__init__()
        self.group = axis.get_group()
        for name, shape in {"up": (number, WIDTH, 10), "down": (number, 10, WIDTH)}.items():
            weight = distribute_tensor(torch.randn(shape) * 0.2, axis, [Shard(0)], src_data_rank=None)
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        rows = collectives.all_gather_tensor_autograd(x, 0, self.group)
        made = torch.relu(rows @ self.up.to_local()) @ self.down.to_local()
        return collectives.reduce_scatter_tensor_autograd(made.sum(0), "sum", 0, self.group)


class _OddLayer(nn.Module):
    def __init__(self, axis: DeviceMesh, number: int) -> None:
        super().__init__()
        self.shared, self.experts = nn.Linear(WIDTH, WIDTH), _OddExperts(axis, number)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shared(x) + self.experts(x)


class _OddMoe(nn.Module):
    def __init__(self, axis: DeviceMesh, number: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(_OddLayer(axis, number) for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def _train_experts(rank: int, number: int, limited: bool) -> nn.Module:
    mesh = expert_parallel.mesh_of(2, 2)
    ours, theirs = (_OddMoe(mesh["ep"], number) for _ in range(2))
    expert_parallel.fsdp2(theirs, mesh)
    ours = _compiled(ours, mesh, {"example_inputs": (_rows_of(0, rank),)}, limited=limited)
    for step in range(2):
        for model in (ours, theirs):
            model(_rows_of(step, rank)).backward()
        assert_same(grads_of(ours), grads_of(theirs), f"gradients of step {step}")
    return ours


def _rows_of(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def _five_experts(rank: int, world_size: int, limited: bool) -> tuple[Any, ...]:
    ours = _train_experts(rank, 5, limited)
    _check(ours)
    (program,) = graphshard.programs(ours)
    assert {"dp", "dp_ep"} <= {bucket.axis for bucket in program.plan.buckets}
    return [_without_sizes(line) for line in program.communication], program.plan.buckets, program.plan.prediction


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.slow
def test_uneven_shards_on_an_expert_axis(ranks: Ranks, limited: bool) -> None:
    """Ranks with more experts and ranks with fewer gather different parameters."""
    first, *others = ranks(4).run(_five_experts, limited)
    assert all(other == first for other in others)


def _three_experts(rank: int, world_size: int) -> str:
    """Matmuls with one expert compute differently, so backward gathers different parameters."""
    ours = _train_experts(rank, 3, limited=False)
    (program,) = graphshard.programs(ours)
    assert program.plan.prediction is None
    mesh = expert_parallel.mesh_of(2, 2)
    with pytest.raises(ArgumentError) as error:
        _compiled(_OddMoe(mesh["ep"], 3), mesh, {"example_inputs": (_rows_of(0, rank),)}, limited=True)
    return str(error.value)


def test_uneven_shards_with_different_gathers(ranks: Ranks) -> None:
    """Planned by unit; with a limit it is an error on all ranks."""
    (message,) = set(ranks(4).run(_three_experts))
    assert message.startswith(
        "memory_limit=1000 cannot be kept: layers.0.experts.up is in pieces of different sizes on ep"
    )
    assert message.endswith("Leave it out, or cut dims that the size of the axis divides.")


class _More(nn.Module):
    """Sums over the tensor axis once more if the local shard is the large one."""

    def __init__(self, tp: DeviceMesh) -> None:
        super().__init__()
        self.blocks, self.group = odd_blocks(tp), tp.get_group()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        if self.blocks[0].up.bias.to_local().shape[0] > 6:
            x = x + collectives.all_reduce(x.detach(), "sum", self.group)
        return x.sum()


def _more(rank: int, world_size: int) -> str:
    mesh = mesh_of(2, 2)
    model = graphshard.compile(_More(mesh["tp"]), mesh, backend="eager")
    with pytest.raises(DivergenceError) as error:
        model(*few_rows())
    return str(error.value)


def test_rejects_uneven_shards_with_different_collectives(ranks: Ranks) -> None:
    """All ranks raise before one waits for a sum that the others do not launch."""
    (message,) = set(ranks(4).run(_more))
    assert "made a different program than rank" in message
    assert "they first differ at collective 3:" in message
    assert ": forward: all_reduce over tp\n" in message
    assert ": backward: start_all_reduce over tp\n" in message
