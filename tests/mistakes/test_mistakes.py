"""Every mistake of the table gets an error that says what to do instead."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

import graphshard
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
