"""From construction to the first step: meta device, initialization, conversion, copies, memory."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import graphshard
from graphshard.ir.mesh import Mesh
from graphshard.ir.param_table import build_table
from graphshard.ir.units import find_units, precision_of
from graphshard.runtime.shards import Storage, shard_module
from graphshard.torch_compat.torch_ops import TorchDispatchMode
from tests.distributed.nets import Net, Tied, full, largest_dim, rows, train
from tests.distributed.twins import assert_same, fsdp2, grads_of, local, params_of, twins, world_mesh
from tests.helpers import resident
from tests.ranks import Ranks


class Zoo(nn.Module):
    """Layers with different reset_parameters methods, and one with a custom initialization."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.attention = nn.MultiheadAttention(6, 2)
        self.norm = nn.LayerNorm(6)
        self.bilinear = nn.Bilinear(6, 6, 5)
        self.gain = nn.Parameter(torch.empty(5, 3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.gain, std=0.02)
        self.gain.data.mul_(2).add_(torch.rand_like(self.gain))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv(self.embed(tokens).transpose(-1, -2)).transpose(-1, -2)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.bilinear(x, x) @ self.gain


def _reset(model: nn.Module) -> None:
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is not None:
            reset()


def _meta_init(rank: int, world_size: int) -> None:
    torch.manual_seed(3)
    reference = Zoo()
    torch.manual_seed(5)
    _reset(reference)
    after = torch.rand(3)

    with torch.device("meta"):
        model = Zoo()
    model = graphshard.compile(model, world_mesh(), backend="eager", shard_placement_fn=largest_dim)
    assert all(param.is_meta and isinstance(param, DTensor) for param in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    with graphshard.checkpoint.unsharded_init():
        _reset(model)
    assert torch.equal(torch.rand(3), after)  # the same number of random numbers was drawn
    for name, param in reference.named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), param), name
    tokens = torch.arange(8).view(2, 4)
    torch.testing.assert_close(model(tokens), reference(tokens))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.quick_cases("1")
def test_meta_init_equals_unsharded_init(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(_meta_init)


def _hugging_face(rank: int, world_size: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=101,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    reference = LlamaForCausalLM(config)
    model = graphshard.compile(copy.deepcopy(reference), world_mesh(), backend="eager")
    torch.manual_seed(5)
    for module in reference.modules():
        reference._init_weights(module)
    torch.manual_seed(5)
    with graphshard.checkpoint.unsharded_init():
        for module in model.modules():
            model._init_weights(module)
    for name, param in reference.named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), param), name


@pytest.mark.slow
def test_hugging_face_init(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    ranks(2).run(_hugging_face)


MIB = 2**20


def _peak_memory(rank: int, world_size: int) -> dict[str, float]:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(6)))  # 64 MiB each
    model = graphshard.compile(model, world_mesh(), backend="eager")
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = resident("VmRSS")
    model.to_empty(device="cpu")
    with graphshard.checkpoint.unsharded_init():
        _reset(model)
    peak = resident("VmHWM") - before
    shards = sum(local(p).untyped_storage().nbytes() for p in model.parameters())
    one = math.prod(model[0].weight.shape) * 4
    assert shards == 6 * one / world_size
    assert shards <= peak <= shards + one + 8 * MIB
    return {"peak": peak / MIB, "shards": shards / MIB, "one": one / MIB}


@pytest.mark.slow
def test_peak_of_init_is_the_shards_and_one_parameter(ranks: Ranks) -> None:
    ranks(2).run(_peak_memory)


def _chunk_bytes(param: nn.Parameter, world_size: int) -> int:
    return -(-param.shape[0] // world_size) * math.prod(param.shape[1:]) * 4


def _only_shards(rank: int, world_size: int) -> None:
    model = Net(dim=7)
    ignored = model.head.weight
    full = [StorageWeakRef(param.untyped_storage()) for param in model.parameters()]
    graphshard.compile(model, world_mesh(), backend="eager", ignored_params=[ignored])
    for name, param in model.named_parameters():
        if param is not ignored:
            assert local(param).untyped_storage().nbytes() == _chunk_bytes(param, world_size), name
    assert model.head.weight is ignored
    assert sum(not storage.expired() for storage in full) == 1


def test_full_parameters_are_freed(ranks: Ranks) -> None:
    """The memory of full parameters is freed, except for an ignored one."""
    ranks(3).run(_only_shards)


class _Moves(TorchDispatchMode):
    """A mode that counts bytes created on the meta device, which stands for the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not isinstance(result, DTensor) and result.is_meta:
            self.made.append(result.untyped_storage().nbytes())
        return result


def _moved(rank: int, world_size: int) -> None:
    model = Net(dim=7)
    model.register_buffer("scale", torch.ones(3))
    ignored = model.head.weight
    units = find_units(model)
    table = build_table(
        model,
        mesh=Mesh.of_shape((world_size,)),
        units=units,
        precision=precision_of(None, units),
        reshard_after_forward=None,
        ignored=[ignored],
    )
    device = torch.device("meta")
    with _Moves() as moves:
        shard_module(model, table, world_mesh(), device, Storage(device))
    assert model.scale.is_meta
    assert model.head.weight is ignored
    assert not ignored.is_meta
    sharded = [param for param in model.parameters() if param is not ignored]
    assert all(local(param).is_meta for param in sharded)
    assert max(moves.made) == max(_chunk_bytes(param, world_size) for param in sharded)


def test_shards_and_buffers_move_to_the_device(ranks: Ranks) -> None:
    """Ignored parameters do not move, and no full parameter is created on the device."""
    ranks(3).run(_moved)


# --- conversion ---------------------------------------------------------------------------------------------


def _convert(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    conversions = {
        torch.float64: nn.Module.double,
        torch.float16: nn.Module.half,
        torch.bfloat16: lambda m: m.to(torch.bfloat16),
        torch.float32: lambda m: m.double().float(),
    }
    for dtype, convert in conversions.items():
        torch.manual_seed(0)
        model = Net(dim=7)
        called = copy.deepcopy(model)
        theirs = convert(fsdp2(copy.deepcopy(model), mesh))
        ours = convert(graphshard.compile(model, mesh, backend="eager"))
        for param in ours.parameters():
            assert isinstance(param, DTensor)
            assert param.dtype == dtype
        inputs = [rows(rank + 10 * step).to(dtype) for step in range(2)]
        expected = train(theirs, inputs)
        assert_same(train(ours, inputs), expected, f"{dtype}")
        # After a call FSDP2 2.13 fails; the expected result starts from the same values.
        called = graphshard.compile(called, mesh, backend="eager")
        called(rows(rank)).sum().backward()
        called.zero_grad()
        convert(called)
        assert_same(train(called, inputs), expected, f"{dtype}, after a call")


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.slow
def test_conversion_after_compile_equals_fsdp2(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(_convert)


# --- copies -------------------------------------------------------------------------------------------------


def _deepcopy(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    torch.manual_seed(0)
    model = graphshard.compile(Net(dim=7), mesh, backend="eager")
    inputs = [rows(rank + 10 * step) for step in range(2)]
    train(model, inputs)
    twin = copy.deepcopy(model)
    assert type(twin).__name__ == "FSDPNet"
    assert isinstance(twin, Net)
    before = {name: value.clone() for name, value in full(params_of(model)).items()}
    assert_same(params_of(twin), params_of(model), "copied")
    assert all(p.grad is None for p in twin.parameters())
    model.zero_grad()
    assert_same(train(twin, inputs), train(model, inputs), "trained side by side")
    assert not torch.equal(before["stem.weight"], twin.stem.weight.full_tensor())
    train(twin, inputs)
    assert not torch.equal(model.stem.weight.full_tensor(), twin.stem.weight.full_tensor())
    # A submodule of the copy uses the copy's shards.
    x = rows(rank, 5, 7)
    twin.blocks[0](x).sum().backward()
    assert grads_of(model)["blocks.0.up.weight"] is not twin.blocks[0].up.weight.grad
    with pytest.raises(copy.Error, match=r"blocks.0 is a part of a compiled model and cannot be copied alone"):
        copy.deepcopy(model.blocks[0])

    tied = graphshard.compile(Tied(), mesh, backend="eager")
    parent = copy.deepcopy(nn.ModuleDict({"net": tied}))
    assert parent["net"].head.weight is parent["net"].embed.weight
    assert parent["net"].head.weight is not tied.head.weight
    tokens = torch.tensor([1, 2, 3])
    assert torch.equal(parent["net"](tokens), tied(tokens))


@pytest.mark.slow
def test_deepcopy_is_independent(ranks: Ranks) -> None:
    ranks(2).run(_deepcopy)


def _ema_on_one_rank(rank: int, world_size: int) -> None:
    """Copy the model on one rank only, to hold averages; a model compiled later is not affected either."""
    model, twin = twins(Net(), world_mesh())
    average = copy.deepcopy(model) if rank == 0 else None
    other, other_twin = twins(Net(), world_mesh())
    expected = {name: local(param).detach().clone() for name, param in params_of(model).items()}
    inputs = [rows(rank + 10 * step) for step in range(2)]
    for x in inputs:
        assert_same(train(model, [x]), train(twin, [x]), "the model")
        assert_same(train(other, [x]), train(other_twin, [x]), "the other model")
        for name, param in params_of(model).items():
            expected[name].lerp_(local(param).detach(), 0.1)
        if average is not None:
            with torch.no_grad():
                for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(param, 0.1)
    if average is not None:
        assert_same(params_of(average), expected, "averages")


@pytest.mark.slow
def test_averages_on_one_rank(ranks: Ranks) -> None:
    ranks(2).run(_ema_on_one_rank)
