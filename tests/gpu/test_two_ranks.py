"""Two or more ranks: with NCCL, on one GPU if there are no more, and with gloo.

`pytest -m gpu` runs them on the GPU. Without one they run on the CPU, which keeps them correct: one in the quick tests,
the others with `pytest -m slow`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

import graphshard
from tests.distributed.twins import (
    BF16,
    POLICIES,
    Batch,
    assert_same,
    example_llama,
    grads_of,
    params_of,
    train_side_by_side,
    twins,
)
from tests.helpers import Blocks
from tests.ranks import Ranks

GPU = [
    pytest.param("cuda", "nccl", id="nccl", marks=pytest.mark.gpu),
    pytest.param("cuda", "gloo", id="gloo", marks=pytest.mark.gpu),
]
ALWAYS = pytest.mark.parametrize(("device", "backend"), [pytest.param("cpu", "gloo", id="on_cpu"), *GPU])
DEVICES = pytest.mark.parametrize(
    ("device", "backend"), [pytest.param("cpu", "gloo", id="on_cpu", marks=pytest.mark.slow), *GPU]
)


def _mesh(device: str, *shape: int) -> DeviceMesh:
    """Build a mesh of all ranks; with gloo on CUDA, all of them use the first GPU."""
    if device == "cuda" and dist.get_backend() == "gloo":
        torch.cuda.set_device(0)
    names = ("replicate", "shard") if len(shape) == 2 else None
    return init_device_mesh(device, shape or (dist.get_world_size(),), mesh_dim_names=names)


def _llama(device: str) -> tuple[nn.Module, Batch]:
    model, batch = example_llama()
    return model.to(device), lambda: {name: value.to(device) for name, value in batch().items()}


def _train(rank: int, world_size: int, device: str, policy: str, shape: tuple[int, ...]) -> None:
    model, batch = _llama(device)
    pair = twins(model, _mesh(device, *shape), mp_policy=POLICIES[policy])
    train_side_by_side(pair, batch, steps=4)
    assert {param.to_local().device.type for param in pair[0].parameters()} == {device}


@ALWAYS
@pytest.mark.quick_cases("nccl", "gloo")
def test_training_equals_fsdp2(ranks: Ranks, device: str, backend: str) -> None:
    """Losses, gradients, norms, parameters and buffers, bit for bit: the sum of two ranks has one order."""
    ranks(2, backend).run(_train, device, "bf16", ())


@DEVICES
def test_training_in_float32_equals_fsdp2(ranks: Ranks, device: str, backend: str) -> None:
    ranks(2, backend).run(_train, device, "fp32", ())


def _registered(rank: int, world_size: int, device: str, setter: str) -> None:
    model, batch = _llama(device)
    pair = twins(model, _mesh(device))
    for module in pair[0].modules():
        if setter == "symmetric" and isinstance(module, FSDPModule):
            module.set_symm_mem_for_comm()
        elif isinstance(module, FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)
    train_side_by_side(pair, batch, steps=2)


@DEVICES
@pytest.mark.parametrize("setter", ["group", "symmetric"])
def test_registered_memory(ranks: Ranks, device: str, backend: str, setter: str) -> None:
    """NCCL's registered and symmetric memory change no bits; gloo has neither, and does without."""
    ranks(2, backend).run(_registered, device, setter)


def _compiled(rank: int, world_size: int, device: str) -> None:
    model, batch = _llama(device)
    net = graphshard.compile(model, _mesh(device), mp_policy=BF16)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        torch.manual_seed(rank)
        loss = net(**batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True), losses


@DEVICES
def test_compiled_training_learns(ranks: Ranks, device: str, backend: str) -> None:
    """With Inductor's kernels between the collectives."""
    ranks(2, backend).run(_compiled, device)


@DEVICES
def test_hsdp_equals_fsdp2(ranks: Ranks, device: str, backend: str) -> None:
    ranks(4, backend).run(_train, device, "bf16", (2, 2))


def _accumulate(rank: int, world_size: int, device: str) -> None:
    model, batch = _llama(device)
    ours, theirs = twins(model, _mesh(device), mp_policy=BF16)
    for last in (False, True):
        found = []
        for net in (ours, theirs):
            torch.manual_seed(rank)
            net.set_requires_gradient_sync(last)
            net(**batch()).backward()
            found.append(grads_of(net))
        assert_same(*found, f"gradients when {last=}")
    assert all(grad is not None for grad in grads_of(ours).values())


@DEVICES
def test_accumulation_equals_fsdp2(ranks: Ranks, device: str, backend: str) -> None:
    ranks(2, backend).run(_accumulate, device)


def _offload(rank: int, world_size: int, device: str) -> None:
    model, batch = _llama(device)
    pin = device == "cuda"  # on a CPU, FSDP2 fails for lack of pinned memory
    options = {"mp_policy": BF16, "offload_policy": CPUOffloadPolicy(pin_memory=pin)}
    pair = twins(model.cpu(), _mesh(device), **options)
    train_side_by_side(pair, batch, steps=3)
    assert {param.to_local().device.type for param in pair[0].parameters()} == {"cpu"}
    for module in (pair[0], *pair[0].layers):
        module.unshard()
    assert {param.device.type for param in pair[0].parameters()} == {device}
    pair[0].reshard()
    pair[0].set_reshard_after_backward(False)
    pair[0](**batch()).backward()


@DEVICES
def test_offloading_equals_fsdp2(ranks: Ranks, device: str, backend: str) -> None:
    """Followed by `unshard` of parameters whose shards are on the host, where norms are reduced by gloo."""
    ranks(2, "cpu:gloo,cuda:nccl" if backend == "nccl" else backend).run(_offload, device)


def _unshard(rank: int, world_size: int, device: str) -> None:
    model, batch = _llama(device)
    pair = twins(model, _mesh(device), mp_policy=BF16)
    found = []
    for net in pair:
        torch.manual_seed(rank)
        net.unshard()
        for block in net.layers:
            block.unshard(async_op=True).wait()
        loss = net(**batch())
        loss.backward()
        net.reshard()
        found.append({"loss": loss.detach(), **grads_of(net)})
    assert_same(*found, "after unshard")


@DEVICES
def test_unshard_equals_fsdp2(ranks: Ranks, device: str, backend: str) -> None:
    ranks(2, backend).run(_unshard, device)


def _checkpoint(rank: int, world_size: int, device: str, folder: str) -> None:
    mesh = _mesh(device)
    state: list[dict[str, Any]] = []
    for way in ("saved", "loaded"):
        model, batch = _llama(device)
        graphshard.compile(model, mesh, backend="eager", mp_policy=BF16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if way == "loaded":
            graphshard.checkpoint.load_checkpoint(folder, model, optimizer)
        for step in range(2 if way == "loaded" else 4):
            torch.manual_seed(10 * (step + 2 * (way == "loaded")) + rank)
            model(**batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if way == "saved" and step == 1:
                graphshard.checkpoint.save_checkpoint(folder, model, optimizer)
        state.append(params_of(model))
    assert_same(*state, "after two more steps")


@DEVICES
def test_checkpoint_repeats_training(ranks: Ranks, device: str, backend: str, tmp_path: Path) -> None:
    ranks(2, backend).run(_checkpoint, device, str(tmp_path / "checkpoint"))


def _artifact(rank: int, world_size: int, device: str, path: str) -> None:
    mesh = _mesh(device)
    losses = []
    for way in ("compile", "load"):
        torch.manual_seed(0)
        model = Blocks(3, 16, bias=True)
        if way == "compile":
            graphshard.compile(model, mesh, backend="eager", mp_policy=BF16)
        else:
            graphshard.load(path, model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            loss = model(torch.randn(4, 16).to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        losses.append(dict(enumerate(found)))
    assert_same(*losses, "losses")


@DEVICES
def test_loaded_file_trains_as_compile(ranks: Ranks, device: str, backend: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Blocks(3, 16, bias=True)
    inputs = (torch.zeros(4, 16),)
    options = {"example_inputs": inputs, "mp_policy": BF16, "backend": "eager", "device": device}
    path = graphshard.export(model, (2,), tmp_path / "blocks.gshard", **options)
    ranks(2, backend).run(_artifact, device, str(path))
