"""Every mistake of the table gets an error that says what to do instead."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import graphshard
import tests.mistakes.wrappers  # noqa: F401 - it adds rows
from graphshard.errors import ParameterError
from tests.distributed.twins import world_mesh
from tests.mistakes.table import MISTAKES, Net, X, Y, compiled, made
from tests.ranks import Ranks


def _all(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    for name in MISTAKES:
        found[name] = made(name)
        dist.barrier()  # the process group works after each
    return found


def test_mistakes(ranks: Ranks) -> None:
    for found in ranks(2).run(_all):
        wrong = {name: text for name, text in found.items() if MISTAKES[name][1] not in text}
        assert not wrong, "\n".join(itertools.starmap("{}: {}".format, wrong.items()))


def _no_sync(rank: int, world_size: int) -> None:
    model = compiled(world_mesh())
    with model.no_sync():
        model(X, Y).backward()
    assert model.head.weight.grad is None
    model(X, Y).backward()
    accumulated = model.head.weight.grad.full_tensor()
    model.zero_grad()
    for _ in range(2):
        model(X, Y).backward()
    torch.testing.assert_close(model.head.weight.grad.full_tensor(), accumulated)


def test_no_sync_accumulates(ranks: Ranks) -> None:
    """FSDP2 has no such method: code that comes from FSDP1 or DDP goes on working."""
    ranks(2).run(_no_sync)


def _by_class(rank: int, world_size: int) -> list[str]:
    by_class = compiled(world_mesh(), Net(), units=[torch.nn.Linear])
    by_class(X, Y).backward()
    return sorted({row.unit for row in graphshard.programs(by_class)[0].params})


def test_units_by_class(ranks: Ranks) -> None:
    for found in ranks(2).run(_by_class):
        assert found == ["head", "layers.0", "layers.1"]


def _data_recovers(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    model = compiled(mesh)
    before = model(X, Y)
    value = distribute_tensor(torch.zeros(4, 8), mesh, [Shard(0)])
    copied = copy.deepcopy(model)
    model.head.weight.data = value
    with pytest.raises(ParameterError, match="changes nothing"):
        model(X, Y)
    torch.testing.assert_close(model(X, Y), before)
    with torch.no_grad():
        model.head.weight.copy_(value)
    assert not model.head.weight.full_tensor().any()
    torch.testing.assert_close(copied(X, Y), before)
    model.bfloat16()  # exchanges storages, and values with them
    model(X.bfloat16(), Y)


def test_model_is_usable_after_data_was_assigned(ranks: Ranks) -> None:
    ranks(2).run(_data_recovers)


def _attributes(rank: int, world_size: int) -> None:
    model = compiled(world_mesh())
    trained = torch.compile(lambda x, y: model(x, y) + len(model.layers), backend="eager")
    trained(X, Y).backward()
    assert model.head.weight.grad is not None
    assert getattr(model, "module", None) is None
    with pytest.raises(AttributeError, match=r"object has no attribute 'layer'$"):
        _ = model.layer


def test_errors_of_attributes(ranks: Ranks) -> None:
    """Attributes are found by the user's class, and by what torch.compile makes of code around the model."""
    ranks(2).run(_attributes)
