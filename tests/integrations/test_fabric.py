"""Lightning Fabric's `ModelParallelStrategy` trains a compiled model like FSDP2's, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from tests.distributed.twins import CountLaunches, assert_same, fsdp2, params_of
from tests.docs.nets import Transformer, batch
from tests.ranks import Ranks

MICROBATCHES = 3


def _compile(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return graphshard.compile(model, mesh["data_parallel"], backend="eager")


def _fully_shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fsdp2(model, mesh["data_parallel"])


def _fabric(parallelize: Callable[..., nn.Module], rank: int, world_size: int, **options: Any) -> Fabric:
    """Create a Fabric as torchrun's ranks do; the process group already exists."""
    strategy = ModelParallelStrategy(
        parallelize_fn=parallelize, data_parallel_size=world_size, tensor_parallel_size=1, **options
    )
    with mock.patch.dict(os.environ, LOCAL_RANK=str(rank)):
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
        fabric.launch()
    assert (fabric.global_rank, fabric.world_size) == (rank, world_size)
    return fabric


def _set_up(fabric: Fabric, *, empty: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with fabric.init_module(empty_init=empty):
        model = Transformer()
    model = fabric.setup(model)
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))


def _train(fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[Any]:
    """Train microbatched steps; return losses and norms."""
    seen = []
    for step in range(steps):
        for index in range(MICROBATCHES):
            torch.manual_seed(10 * step + 2 * index + fabric.global_rank)
            with fabric.no_backward_sync(model, enabled=index < MICROBATCHES - 1):
                loss = model(*batch())
                fabric.backward(loss)
            seen.append(loss.detach())
        seen.append(fabric.clip_gradients(model, optimizer, max_norm=0.5).full_tensor())
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _side_by_side(rank: int, world_size: int, empty: bool) -> None:
    seen, models, launches = [], [], []
    for parallelize in (_compile, _fully_shard):
        fabric = _fabric(parallelize, rank, world_size)
        model, optimizer = _set_up(fabric, empty=empty)
        first = _train(fabric, model, optimizer, steps=1)  # also captures
        with CountLaunches() as counts:
            seen.append(first + _train(fabric, model, optimizer, steps=2))
        models.append(model)
        launches.append(counts.of("scatter"))
    assert_same(dict(enumerate(seen[0])), dict(enumerate(seen[1])), "losses and norms")
    assert_same(params_of(models[0]), params_of(models[1]), "after three steps")
    # Two steps of three units: without the context every microbatch would reduce.
    assert launches == [6, 6]


@pytest.mark.slow
def test_equals_fsdp2(ranks: Ranks) -> None:
    """Accumulated gradients, clipping, and fewer reductions than microbatches."""
    ranks(2).run(_side_by_side, False)


@pytest.mark.slow
def test_equals_fsdp2_from_meta_device(ranks: Ranks) -> None:
    """`init_module(empty_init=True)`: Lightning allocates the shards and calls `reset_parameters`."""
    ranks(2).run(_side_by_side, True)


def _save_and_load(rank: int, world_size: int, folder: str, distributed: bool) -> None:
    """Models of graphshard and FSDP2 resume from one checkpoint: a folder of graphshard, or a file of FSDP2."""
    path = Path(folder, "checkpoint")
    parallelize = _compile if distributed else _fully_shard
    fabric = _fabric(parallelize, rank, world_size, save_distributed_checkpoint=distributed)
    model, optimizer = _set_up(fabric)
    _train(fabric, model, optimizer, steps=1)
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 1})
    rest = _train(fabric, model, optimizer, steps=2)
    for parallelize in (_compile, _fully_shard):
        fabric = _fabric(parallelize, rank, world_size)
        other, optimizer = _set_up(fabric)
        state = {"model": other, "optimizer": optimizer, "step": 0}
        fabric.load(path, state)
        assert state["step"] == 1
        again = _train(fabric, other, optimizer, steps=2)
        assert_same(dict(enumerate(rest)), dict(enumerate(again)), "losses after loading")
        assert_same(params_of(model), params_of(other), "parameters after loading")


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [True, False], ids=["folder", "file"])
def test_checkpoint(ranks: Ranks, tmp_path: Path, distributed: bool) -> None:
    """`fabric.save` and `fabric.load`, of shards and of a full state."""
    ranks(2).run(_save_and_load, str(tmp_path), distributed)


def _load_raw(rank: int, world_size: int, folder: str) -> None:
    path = Path(folder, "weights.pt")
    torch.manual_seed(1)
    whole = Transformer().state_dict()
    if rank == 0:
        torch.save(whole, path)
    fabric = _fabric(_compile, rank, world_size)
    fabric.barrier()
    model, _ = _set_up(fabric)
    fabric.load_raw(path, model)
    found = {name: param.full_tensor() for name, param in model.state_dict().items()}
    assert_same(found, whole, "raw weights")


def test_raw_weights(ranks: Ranks, tmp_path: Path) -> None:
    """A file of an unsharded model, loaded into the shards."""
    ranks(2).run(_load_raw, str(tmp_path))
