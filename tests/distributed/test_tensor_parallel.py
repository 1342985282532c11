"""Tensor parallelism composed with sharding matches FSDP2 on the same parallelized model bit for bit."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.export import Dim
from torch.torch_version import TorchVersion

import graphshard
from graphshard.errors import CaptureError
from tests.distributed.tensor_parallel import (
    Mlp,
    Mlps,
    llama,
    mesh_of,
    mlps,
    pair_of,
    placed,
    rows,
    tied,
    tokens,
    train_alike,
    words,
)
from tests.distributed.twins import BF16, assert_same, grads_of, params_of
from tests.ranks import Ranks

OPTIMIZERS = {
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "AdamW": torch.optim.AdamW,
}


def _train_mlps(rank: int, world_size: int, optimizer: str, options: dict[str, Any]) -> None:
    mesh = mesh_of(2, 2)
    train_alike(pair_of(mlps, mesh, **options), mesh, rows, optimizer=OPTIMIZERS[optimizer])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.slow
def test_mlps_match_fsdp2(ranks: Ranks, optimizer: str) -> None:
    """Losses, gradients, norms, parameters, placements and the state dict, on 2 x 2 ranks."""
    ranks(4).run(_train_mlps, optimizer, {})


def _train_llama(rank: int, world_size: int, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    mesh = mesh_of(*shape)
    train_alike(pair_of(llama, mesh, **options), mesh, tokens)


@pytest.mark.slow
def test_a_llama_with_sequence_parallelism_matches_fsdp2(ranks: Ranks) -> None:
    """The usual plan: norms on parts of the sequence, whose gradients are partial sums on the tensor axis."""
    ranks(4).run(_train_llama, (2, 2), {})


def _one_data_rank(rank: int, world_size: int) -> list[str]:
    mesh = mesh_of(1, 2)
    pair = pair_of(mlps, mesh)
    train_alike(pair, mesh, rows, steps=2)
    return graphshard.programs(pair[0])[0].communication


@pytest.mark.slow
def test_a_data_axis_of_one_rank(ranks: Ranks) -> None:
    """The model gathers and reduces; parameters do not, apart from the gradient of one weight."""
    for lines in ranks(2).run(_one_data_rank):
        assert {line.partition(": ")[2] for line in lines} == {"all_reduce over tp", "start_all_reduce over tp"}


@pytest.mark.slow
def test_replicas_of_tensor_parallel_ranks(ranks: Ranks) -> None:
    """Three axes, 2 x 2 x 2: replicated, sharded, and parallelized."""
    ranks(8).run(_train_llama, (2, 2, 2), {})


@pytest.mark.slow
def test_mlps_in_bfloat16_match_fsdp2(ranks: Ranks) -> None:
    """There are no partial sums: FSDP2's bits, reduced in float32."""
    ranks(4).run(_train_mlps, "SGD", {"mp_policy": BF16})


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = _Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x).float().sum()


def _scaled(tp: DeviceMesh) -> nn.Module:
    return parallelize_module(_Scaled(), tp, {"scale": SequenceParallel()})


def _sum_of_pieces(rank: int, world_size: int, shape: tuple[int, int], steps: int) -> tuple[list[float], list[float]]:
    """Return a gradient of 256 plus 1 from the ranks of the tensor axis, in one or two microbatches."""
    mesh = mesh_of(*shape)
    found = []
    for model in pair_of(_scaled, mesh, mp_policy=BF16):
        for step in range(steps):
            model.set_requires_gradient_sync(step == steps - 1)
            model(torch.full((1, 1, 4), (256.0, 1.0)[mesh.get_local_rank("tp")] / steps)).backward()
        found.append(model.get_parameter("scale.weight").grad.full_tensor().tolist())
    return tuple(found)


@pytest.mark.parametrize(("shape", "steps"), [((2, 2), 1), ((1, 2), 1), ((2, 2), 2)], ids=str)
@pytest.mark.quick_cases("(1, 2)-1")
def test_partial_sums_are_added_up_in_the_reduce_dtype(ranks: Ranks, shape: tuple[int, int], steps: int) -> None:
    """bfloat16 cannot represent 257: before torch 2.15 FSDP2 adds the ranks in the compute dtype, which gives 256."""
    for ours, theirs in ranks(math.prod(shape)).run(_sum_of_pieces, shape, steps):
        assert ours == [257.0] * 4
        assert theirs == ([256.0] * 4 if steps == 1 and TorchVersion(torch.__version__) < "2.15" else ours)


# --- DTensor outputs and their loss ----------------------------------------------------------------------------------


def _loss_outside(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens)
    assert isinstance(logits, DTensor)
    assert logits.placements == (Shard(2),)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _train_with_cut_logits(rank: int, world_size: int, inside: bool) -> None:
    mesh = mesh_of(2, 2)
    pair = pair_of(functools.partial(llama, layers=1, cut_logits=True), mesh)
    with loss_parallel():
        train_alike(pair, mesh, tokens, **({} if inside else {"run": _loss_outside}))


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.slow
def test_a_loss_of_vocabulary_sharded_logits(ranks: Ranks, inside: bool) -> None:
    """The caller computes the loss from a DTensor output, or the model does."""
    ranks(4).run(_train_with_cut_logits, inside)


# --- with other features ----------------------------------------------------------------------------------------------


def _accumulate(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    pair = pair_of(functools.partial(llama, layers=1), mesh)
    for last in (False, False, True):
        torch.manual_seed(10 * mesh.get_local_rank("dp") + last)
        batch = tokens()
        for model in pair:
            model.set_requires_gradient_sync(last)
            model(*batch).backward()
        assert_same(grads_of(pair[0]), grads_of(pair[1]), "gradients")


@pytest.mark.slow
def test_microbatches(ranks: Ranks) -> None:
    """Accumulated gradients include partial sums on the tensor axis, which the last backward reduces."""
    ranks(4).run(_accumulate)


OPTIONS: dict[str, dict[str, Any]] = {
    "kept": {"reshard_after_forward": False},
    "columns": {"shard_placement_fn": lambda param: Shard(param.ndim - 1)},
}


def _train_with(rank: int, world_size: int, name: str) -> None:
    mesh = mesh_of(2, 2)
    train_alike(pair_of(functools.partial(llama, layers=1), mesh, **OPTIONS[name]), mesh, tokens, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_options(ranks: Ranks, name: str) -> None:
    """FSDP2's options have the same meaning; if the plan and sharding split different dims, no shard is strided."""
    ranks(4).run(_train_with, name)


class _Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().sum()


def _odd(tp: DeviceMesh) -> nn.Module:
    torch.manual_seed(1)
    return parallelize_module(_Odd(), tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _train_odd(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    train_alike(pair_of(_odd, mesh), mesh, lambda: (torch.randn(2, 3),), clip=False)


@pytest.mark.slow
def test_uneven_shards_over_the_data_ranks(ranks: Ranks) -> None:
    """Five rows on each rank of the tensor axis, over two data ranks."""
    ranks(4).run(_train_odd)


def _recompute(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    ours = graphshard.compile(llama(mesh["tp"], layers=1), mesh, backend="eager", activation="full")
    _, theirs = pair_of(functools.partial(llama, layers=1), mesh)
    train_alike((ours, theirs), mesh, tokens, steps=1)


@pytest.mark.slow
def test_recomputed_layers(ranks: Ranks) -> None:
    """Recomputation repeats the model's collectives; results do not change."""
    ranks(4).run(_recompute)


def _tied(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    train_alike(pair_of(tied, mesh), mesh, words, steps=2, clip=False)


@pytest.mark.slow
def test_tied_and_frozen_parameters_and_checkpoints(ranks: Ranks) -> None:
    """A checkpointed layer repeats its collectives."""
    ranks(4).run(_tied)


def _tied_parts(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    model = tied(mesh["tp"])
    for part in (model.embed, *model.layers, model.head, model):
        graphshard.fully_shard(part, mesh=mesh["dp"], backend="eager")
    assert model.embed.weight is model.head.weight
    train_alike((model, pair_of(tied, mesh)[1]), mesh, words, steps=2, clip=False)
    assert model.embed.weight is model.head.weight


@pytest.mark.slow
def test_parameters_tied_across_calls_of_fully_shard(ranks: Ranks) -> None:
    """A tie to a parameter that another call has sharded refers to its shard."""
    ranks(4).run(_tied_parts)


class _Autocast(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.mlp, self.times = Mlp(), times

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = sum(self.mlp(x * time) for time in range(self.times))
        return y.float().square().mean()


def _autocasting(tp: DeviceMesh, times: int) -> nn.Module:
    torch.manual_seed(1)
    model = _Autocast(times)
    parallelize_module(model.mlp, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _autocast(rank: int, world_size: int) -> str:
    mesh = mesh_of(2, 2)
    train_alike(pair_of(functools.partial(_autocasting, times=1), mesh), mesh, rows, steps=2)
    model = graphshard.compile(_autocasting(mesh["tp"], times=2), mesh, backend="eager")
    with pytest.raises(CaptureError) as error:
        model(*rows())
    return str(error.value)


def test_autocast(ranks: Ranks) -> None:
    """Autocast would cast a parameter twice, where eager mode caches the first cast: the error names the parameter."""
    for message in ranks(4).run(_autocast):
        assert "Autocast casts a parameter that is a DTensor once for all its uses" in message
        assert "parameter mlp.up.weight again (linear)" in message
        assert "test_tensor_parallel.py" in message  # the line


def _gathered_by_hand(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    pair = pair_of(mlps, mesh)
    torch.manual_seed(10 * mesh.get_local_rank("dp"))
    batch = rows()
    for layer in ("layers.0", "layers.1", ""):
        for model in pair:
            handle = model.get_submodule(layer).unshard(async_op=True)
            handle.wait()
        ours, theirs = (params_of(model.get_submodule(layer)) for model in pair)
        assert_same(ours, theirs, "gathered")
        assert placed(pair[0]) == placed(pair[1])
        assert [isinstance(p, DTensor) for p in ours.values()] == [isinstance(p, DTensor) for p in theirs.values()]
    losses = [model(*batch) for model in pair]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert_same(grads_of(pair[0]), grads_of(pair[1]), "gradients")
    train_alike(pair, mesh, rows, steps=1)


@pytest.mark.slow
def test_unshard(ranks: Ranks) -> None:
    """Modules show DTensors on the tensor axis, as FSDP2's do; the next forward reads them."""
    ranks(4).run(_gathered_by_hand)


def _differing(rank: int, world_size: int) -> str:
    mesh = mesh_of(2, 2)
    model = mlps(mesh["tp"])
    if mesh.get_local_rank("tp"):
        model.head.bias = None
    graphshard.compile(model, mesh, backend="eager")
    with pytest.raises(graphshard.GraphshardError) as error:
        model(*rows())
    return str(error.value)


@pytest.mark.slow
def test_rejects_different_models_on_the_tensor_axis(ranks: Ranks) -> None:
    """Models with other parameters there are found before anything runs."""
    for message in ranks(4).run(_differing):
        assert "made a different program than rank" in message
        assert "parameter head.bias" in message


def _profile(rank: int, world_size: int) -> str:
    mesh = mesh_of(2, 2)
    model = graphshard.compile(mlps(mesh["tp"]), mesh, backend="eager")
    return str(graphshard.profiling.profile_step(model, rows()))


def test_profile(ranks: Ranks) -> None:
    """Of all ranks."""
    assert all("Mlps on 4 ranks" in text for text in ranks(4).run(_profile))


def _offload_and_call_parts(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    pair = pair_of(mlps, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    train_alike(pair, mesh, rows, steps=2)
    (x,) = rows()
    parts = [model.layers[0](x) for model in pair]
    assert torch.equal(*parts)
    with torch.no_grad():
        results = [model(x) for model in pair]
    assert torch.equal(*results)
    pair = pair_of(mlps, mesh)
    for model in pair:
        model.double()
    train_alike(pair, mesh, lambda: (torch.randn(3, 8).double(),), steps=1)


@pytest.mark.slow
def test_offloading_parts_inference_and_conversion(ranks: Ranks) -> None:
    ranks(4).run(_offload_and_call_parts)


def _ignore(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    pair = mlps(mesh["tp"]), mlps(mesh["tp"])
    left = [model.layers[0].up.weight for model in pair]
    graphshard.compile(pair[0], mesh, backend="eager", ignored_params=left[:1])
    for part in (*pair[1].layers, pair[1]):
        fully_shard(part, mesh=mesh["dp"], ignored_params=set(left[1:]))
    (x,) = rows()
    for model in pair:
        model(x).backward()
    assert_same(grads_of(pair[0]), grads_of(pair[1]), "gradients")
    assert left[0].placements == left[0].grad.placements == (Shard(0),)


def test_ignored_parameters_stay_on_the_tensor_axis(ranks: Ranks) -> None:
    ranks(4).run(_ignore)


def _prepared(tp: DeviceMesh) -> nn.Module:
    """Parallelize blocks that take whole rows and return parts, which the next block or the head gathers."""
    torch.manual_seed(1)
    model = Mlps(2)
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False)}
        parallelize_module(layer, tp, plan)
    outer = {
        "layers.0": PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()),
        "layers.1": PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Replicate(),
            use_local_input=True,
            output_layouts=Shard(0),
            desired_output_layouts=Replicate(),
        ),
    }
    return parallelize_module(model, tp, outer)


def _prepare(rank: int, world_size: int) -> list[str]:
    mesh = mesh_of(2, 2)
    pair = pair_of(_prepared, mesh)
    train_alike(pair, mesh, lambda: (torch.randn(4, 8),), steps=2)
    return graphshard.programs(pair[0])[0].communication


@pytest.mark.slow
def test_prepared_inputs_and_outputs_of_modules(ranks: Ranks) -> None:
    """The output of a block is scattered, and gathered afterwards."""
    for lines in ranks(4).run(_prepare):
        assert {"forward: reduce_scatter over tp", "forward: all_gather over tp"} <= set(lines)


class _Dropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.5)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.relu(self.up(self.drop(self.norm(x)))), 0.3, self.training)
        return self.down(x).square().mean()


def _dropouts(tp: DeviceMesh) -> nn.Module:
    torch.manual_seed(1)
    plan = {
        "norm": SequenceParallel(),
        "drop": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(_Dropouts(), tp, plan)


def _drop(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    train_alike(pair_of(_dropouts, mesh), mesh, lambda: (torch.randn(2, 2, 8),), steps=2)


@pytest.mark.slow
def test_dropout_of_tensors_and_of_dtensors(ranks: Ranks) -> None:
    """On a CPU both draw from torch's generator."""
    ranks(4).run(_drop)


def _dynamic(rank: int, world_size: int) -> int:
    mesh = mesh_of(2, 2)
    ours = graphshard.compile(mlps(mesh["tp"]), mesh, backend="eager", dynamic_shapes=({0: Dim("batch")},))
    theirs = pair_of(mlps, mesh)[1]
    for size in (3, 5, 2):
        batch = functools.partial(torch.randn, size, 8)
        train_alike((ours, theirs), mesh, lambda batch=batch: (batch(),), steps=1)
    return len(graphshard.programs(ours))


@pytest.mark.slow
def test_dynamic_sizes(ranks: Ranks) -> None:
    """One program for all batches."""
    assert ranks(4).run(_dynamic) == [1] * 4


def _regather(rank: int, world_size: int) -> None:
    mesh = mesh_of(4, 2)
    ours = graphshard.compile(mlps(mesh["tp"]), mesh, backend="eager", reshard_after_forward=2)
    train_alike((ours, pair_of(mlps, mesh)[1]), mesh, rows, steps=2)


@pytest.mark.slow
def test_regathering_among_neighbors(ranks: Ranks) -> None:
    """FSDP2 does not support this for DTensor parameters."""
    ranks(8).run(_regather)


def _by_parts(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    ours, (_, theirs) = llama(mesh["tp"]), pair_of(llama, mesh)
    for layer in ours.layers:
        graphshard.fully_shard(layer, mesh=mesh["dp"], backend="eager")
    graphshard.fully_shard(ours, mesh=mesh["dp"], backend="eager")
    train_alike((ours, theirs), mesh, tokens, steps=2)
    blocks = mlps(mesh["tp"]), mlps(mesh["tp"])
    for ours, theirs in zip(*((*model.layers, model.head, model) for model in blocks)):  # the head is not a DTensor
        graphshard.fully_shard(ours, mesh=mesh, backend="eager")  # also accepts the whole mesh
        fully_shard(theirs, mesh=mesh["dp"])
    train_alike(blocks, mesh, rows, steps=2)


@pytest.mark.slow
def test_fully_shard_on_the_data_axis(ranks: Ranks) -> None:
    """Called like FSDP2: the tensor axis comes from the parameters."""
    ranks(4).run(_by_parts)


def _initialize_meta(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    with torch.device("meta"):
        pair = pair_of(functools.partial(llama, layers=1), mesh)
    for model in pair:
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        model.init_weights()
    assert_same(pair[0].state_dict(), pair[1].state_dict(), "at the beginning")
    train_alike(pair, mesh, tokens, steps=2)


@pytest.mark.slow
def test_meta_init(ranks: Ranks) -> None:
    """Created on the meta device, parallelized, sharded, then initialized as DTensors."""
    ranks(4).run(_initialize_meta)


INDUCTOR = {"mlps": (mlps, rows), "llama": (functools.partial(llama, layers=1), tokens)}


def _inductor(rank: int, world_size: int, name: str) -> None:
    make, batch = INDUCTOR[name]
    mesh = mesh_of(2, 2)
    ours, (_, theirs) = graphshard.compile(make(mesh["tp"]), mesh), pair_of(make, mesh)
    for step in range(2):
        torch.manual_seed(10 * step + mesh.get_local_rank("dp"))
        inputs = batch()
        losses = [model(*inputs) for model in (ours, theirs)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
        for name, param in theirs.named_parameters():
            found = ours.get_parameter(name).grad
            torch.testing.assert_close(found.to_local(), param.grad.to_local(), msg=name, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["mlps", pytest.param("llama", marks=pytest.mark.slow)])
def test_inductor(ranks: Ranks, name: str) -> None:
    """Regions are between the model's collectives; equal up to rounding."""
    ranks(4).run(_inductor, name)


def _draw_whole(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    with torch.device("meta"):
        model = mlps(mesh["tp"])
    graphshard.compile(model, mesh, backend="eager").to_empty(device="cpu")
    torch.manual_seed(3)
    with graphshard.checkpoint.unsharded_init(), torch.no_grad():
        for param in model.parameters():
            param.normal_()
    torch.manual_seed(3)
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), torch.empty(param.shape).normal_()), name


def test_values_of_the_whole_model(ranks: Ranks) -> None:
    """`unsharded_init` shards its random numbers like the parameters, twice along one dim."""
    ranks(4).run(_draw_whole)


class _Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().sum()


def _uneven(tp: DeviceMesh) -> nn.Module:
    torch.manual_seed(1)
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    return parallelize_module(_Uneven(), tp, plan)


def _train_uneven(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    train_alike(pair_of(_uneven, mesh), mesh, lambda: (torch.randn(2, 3),), clip=False)


@pytest.mark.slow
def test_uneven_shards_on_the_tensor_axis(ranks: Ranks) -> None:
    """Seven columns: each rank of the tensor axis has a program for its sizes."""
    ranks(4).run(_train_uneven)
