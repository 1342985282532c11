"""Gathers that write to registered memory: a pool that is like NCCL's, and what happens where there is none."""

from __future__ import annotations

import logging
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import graphshard
from graphshard.runtime import communication_memory
from tests.distributed.nets import Net, rows
from tests.distributed.twins import BF16, assert_same, grads_of, twins, world_mesh
from tests.ranks import Ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mp_policy": BF16},
    "kept": {"reshard_after_forward": False},
}


class _Pool:
    """Memory in blocks, which come back when nothing holds them; then they contain NaN.

    Attributes:
        given: addresses, in the order of requests.
    """

    def __init__(self) -> None:
        self.given: list[int] = []
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def __call__(self, group: Any, device: torch.device) -> Any:
        return self._allocate

    def _allocate(self, size: int, dtype: torch.dtype, group: Any) -> Tensor:
        free = self._free.setdefault((size, dtype), [])
        block = free.pop() if free else torch.empty(size, dtype=dtype)
        self.given.append(block.data_ptr())
        view = torch.from_dlpack(block)  # another storage, in the block's memory
        weakref.finalize(view.untyped_storage(), lambda: free.append(block.fill_(torch.nan)))
        return view


def _train(rank: int, step: int, *models: Any) -> None:
    for model in models:
        model.zero_grad()
        model(rows(10 * step + rank)).float().sum().backward()


def _registered(rank: int, world_size: int, units: list[str], options: dict[str, Any]) -> list[int]:
    pair, pool = twins(Net(), world_mesh(), **options), _Pool()
    with mock.patch.object(communication_memory, "group_allocator", pool):
        for unit in units:
            pair[0].get_submodule(unit).set_allocate_memory_from_process_group_for_comm(True)
        given = []
        for step in range(3):
            pool.given.clear()
            _train(rank, step, *pair)
            assert_same(*map(grads_of, pair), f"step {step}")
            given.append(list(pool.given))
        assert "gather_" in graphshard.programs(pair[0])[-1].forward.code
        # Threads of gloo may hold a result a little longer, so which block is taken varies.
        assert len(set().union(*given)) <= len(given[0]), "blocks"
        for unit in units:
            pair[0].get_submodule(unit).set_allocate_memory_from_process_group_for_comm(False)
        pool.given.clear()
        _train(rank, 4, *pair)
        assert_same(*map(grads_of, pair), "plain memory again")
        assert not pool.given
    return given[2]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.quick_cases("fp32-3", "kept-2")
def test_gathers_into_a_pool(ranks: Ranks, world_size: int, name: str) -> None:
    """FSDP2's bits, all steps in a few blocks, and nothing is read after it was freed."""
    for given in ranks(world_size).run(_registered, ["", "blocks.0", "blocks.1"], OPTIONS[name]):
        assert len(given) == (3 if name == "kept" else 5)


def test_one_unit(ranks: Ranks) -> None:
    """Gathers of other units keep torch's memory."""
    (all_units, *_), (one, *_) = (ranks(2).run(_registered, units, {}) for units in (["", "blocks.0"], ["blocks.0"]))
    assert 0 < len(one) < len(all_units)


def _absent(rank: int, world_size: int) -> list[str]:
    pair, said = twins(Net(), world_mesh()), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("graphshard").addHandler(handler)
    try:
        pair[0].set_symm_mem_for_comm()
        pair[0].blocks[0].set_allocate_memory_from_process_group_for_comm(True)
    finally:
        logging.getLogger("graphshard").removeHandler(handler)
    _train(rank, 0, *pair)
    assert_same(*map(grads_of, pair), "gradients")
    return said


def test_gloo_has_no_such_memory(ranks: Ranks) -> None:
    """One line, and the plain way."""
    for said in ranks(2).run(_absent):
        assert said == [
            f"{name}: gloo has no such memory on cpu. Gathers write to torch's."
            for name in ("set_symm_mem_for_comm", "set_allocate_memory_from_process_group_for_comm")
        ]
