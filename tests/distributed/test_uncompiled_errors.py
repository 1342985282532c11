"""Operations within `graphshard.uncompiled` that are impossible, or would be lost, raise and change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.errors import ArgumentError, UnsupportedError
from tests.distributed.extended import even, patch_shards
from tests.distributed.nets import Net
from tests.distributed.twins import world_mesh
from tests.ranks import Ranks


def _writes(model: nn.Module) -> None:
    model.blocks[0].up.weight.zero_()


def _exchanges(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(torch.zeros(3, 8))


def _writes_in_a_unit(model: nn.Module) -> None:
    def write(module: nn.Module, args: Any) -> None:
        module.weight.zero_()

    handle = model.blocks[1].down.register_forward_pre_hook(write)
    try:
        model(torch.ones(2, 4))
    finally:
        handle.remove()


def _trains(model: nn.Module) -> None:
    with torch.enable_grad():
        model(torch.ones(2, 4))


def _trains_a_block(model: nn.Module) -> None:
    with torch.enable_grad():
        model.blocks[0](torch.ones(2, 8)).sum().backward()


def _optimizes(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=1)


def _compiles(model: nn.Module) -> None:
    graphshard.compile(model, world_mesh(), backend="eager")


def _copies_shards(model: nn.Module) -> None:
    """Copy units that are not gathered; the original does not change."""
    twin = copy.deepcopy(model)
    twin(torch.ones(2, 4))


def _fails(model: nn.Module) -> None:
    raise ZeroDivisionError("of the user")


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "writes": (_writes, UnsupportedError, "parameter blocks.0.up.weight was written to, or replaced, within"),
    "converts": (nn.Module.half, UnsupportedError, "parameter stem.weight was written to, or replaced, within"),
    "exchanges": (_exchanges, UnsupportedError, "parameter head.weight was written to, or replaced, within"),
    "writes in a unit": (_writes_in_a_unit, UnsupportedError, "blocks.1.down.weight was written to"),
    "trains": (
        _trains,
        UnsupportedError,
        "gradients enabled within graphshard.uncompiled.*Leave the block to train it",
    ),
    "trains a block": (_trains_a_block, UnsupportedError, "a gradient reached the gathered parameter blocks.0"),
    "optimizes": (_optimizes, UnsupportedError, "parameter .* was given to an optimizer"),
    "compiles": (_compiles, ArgumentError, "cannot be compiled: it is, and stem.weight is gathered within"),
    "copies shards": (_copies_shards, RuntimeError, "mixed torch.Tensor and DTensor"),
    "fails": (_fails, ZeroDivisionError, "of the user"),
}


def _refused(rank: int, world_size: int, case: str) -> None:
    """Check that the error leaves shards, classes and programs unchanged."""
    act, kind, message = REFUSED[case]
    model, x = graphshard.compile(Net(), world_mesh(), backend="eager"), torch.ones(2, 4)
    expected = model(x)
    reshard = case in ("writes in a unit", "copies shards")
    with pytest.raises(kind, match=message), graphshard.uncompiled(model, reshard_after_forward=reshard):
        act(model)
    assert torch.equal(model(x), expected)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert len(graphshard.programs(model)) == 1


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.quick_cases("exchanges", "writes in a unit", "trains", "compiles", "copies shards")
def test_rejects_operations_that_would_be_lost(ranks: Ranks, case: str) -> None:
    ranks(2).run(_refused, case)


def test_wrong_arguments(mesh: DeviceMesh) -> None:
    with pytest.raises(ArgumentError, match=r"model: .*Net.* is not compiled"), graphshard.uncompiled(Net()):
        pass
    model, wrong = graphshard.compile(Net(), mesh, backend="eager"), {"reshard_after_forward": "unit"}
    with pytest.raises(ArgumentError, match="must be True or False, got 'unit'"), graphshard.uncompiled(model, **wrong):
        pass


def test_the_capture_limit_error_suggests_uncompiled(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    model = graphshard.compile(Net(), mesh, backend="eager", max_captures=1)
    with torch.no_grad():
        for rows in (2, 3, 1):  # the last one broadcasts and has no symbol
            assert model(torch.ones(rows, 4)).shape == (rows, 3)
    *_, warning = (record.getMessage() for record in caplog.records)
    assert "Calls without gradients run without programs within `with graphshard.uncompiled(model):`." in warning
    with graphshard.uncompiled(model):
        assert model(torch.ones(3, 4)).shape == (3, 3)


def _decides_itself(rank: int, world_size: int) -> None:
    model = graphshard.compile(even(), world_mesh(), backend="eager")
    patch_shards(model)
    with pytest.raises(UnsupportedError, match=r"blocks.* decides itself"), graphshard.uncompiled(model):
        pass


def test_rejects_parameters_that_only_programs_gather(ranks: Ranks) -> None:
    ranks(2).run(_decides_itself)
