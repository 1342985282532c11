"""Offloaded shards are updated by a CPU thread during backward, with the bits of FSDP2's separate step."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import graphshard
from graphshard.ir import operators
from graphshard.passes.offload_parameters import OffloadParameters
from graphshard.pipeline.pipeline import Pipeline
from graphshard.runtime.step_overlap import Updates
from tests.distributed.test_checkpoint import Net
from tests.distributed.test_compile_step import _assert_same_state, _groups, _input, _loss, _separate
from tests.distributed.twins import fsdp2, world_mesh
from tests.ranks import Ranks


@contextlib.contextmanager
def _threads() -> Iterator[list[int]]:
    """Record the threads that update parameters."""
    seen: list[int] = []
    update = Updates._update

    def noted(self: Updates, *args: Any) -> None:
        seen.append(threading.get_ident())
        update(self, *args)

    with mock.patch.object(Updates, "_update", noted):
        yield seen


def _pair() -> tuple[nn.Module, nn.Module]:
    """Build graphshard's model, whose shards are copied as on a GPU, and FSDP2's."""
    torch.manual_seed(1)
    model = Net()
    theirs = fsdp2(copy.deepcopy(model), world_mesh())
    passes = Pipeline().insert(OffloadParameters(always=True), before="plan")
    return graphshard.compile(model, world_mesh(), backend="eager", passes=passes), theirs


def _train(rank: int, world_size: int, clip_norm: float | None, accumulate: int) -> list[int]:
    pair = _pair()
    optims = [torch.optim.AdamW(_groups(model), lr=0.02) for model in pair]
    step = graphshard.compile_step(pair[0], optims[0], _loss, clip_norm=clip_norm, accumulate=accumulate)
    with _threads() as threads:
        for number in range(3):
            calls = [(_input(rank, accumulate * number + index),) for index in range(accumulate)]
            loss = step(*calls) if accumulate > 1 else step(*calls[0])
            assert step.updated_in_backward is (clip_norm is None)
            ours = len(threads)
            expected, norm = _separate(pair[1], optims[1], calls, clip_norm=clip_norm)
            assert torch.equal(loss, expected)
            assert norm is None or torch.equal(step.grad_norm, norm)
            _assert_same_state(pair, optims, f"step {number}")
    assert ours > 3, "groups of a bucket, one after the other"
    return [thread - threading.get_ident() for thread in threads]


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (2, 1), (2, 2), (3, 1)])
@pytest.mark.slow
def test_training_equals_fsdp2(ranks: Ranks, world_size: int, accumulate: int) -> None:
    for threads in ranks(world_size).run(_train, None, accumulate):
        assert threads
        assert all(threads), "not in the thread that runs the backward"


def test_clipping_equals_fsdp2(ranks: Ranks) -> None:
    """Updates follow backward."""
    for threads in ranks(2).run(_train, 1e-4, 1):
        assert threads
        assert not any(threads)


def _failing(rank: int, world_size: int) -> None:
    model, _ = _pair()
    before = {name: param.to_local().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = graphshard.compile_step(model, optimizer, _loss)
    calls: list[int] = []

    def fails(self: Updates, group: Any, members: Any) -> None:
        calls.append(len(members))
        raise RuntimeError("no memory for the optimizer's state")

    with (
        mock.patch.object(Updates, "_update", fails),
        pytest.raises(RuntimeError, match="no memory for the opt"),
    ):
        step(_input(rank))
    assert len(calls) == 1, "nothing is updated after what failed"
    assert all(torch.equal(param.to_local(), before[name]) for name, param in model.named_parameters())
    step(_input(rank))
    assert step.updated_in_backward
    assert not any(torch.equal(p.to_local(), before[n]) for n, p in model.named_parameters() if p.to_local().numel())


def test_the_step_raises_errors_of_the_thread(ranks: Ranks) -> None:
    ranks(2).run(_failing)


class _Stream:
    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked = name, asked

    def record_event(self) -> Any:
        self.asked.append(f"event on {self.name}")
        return mock.Mock(synchronize=lambda: self.asked.append(f"wait for {self.name}"))


def test_the_update_waits_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both directions: gradients on their way to the host, and shards that are still read."""
    asked: list[str] = []
    copies = operators._Copies(_Stream("up", asked), _Stream("down", asked))  # type: ignore[arg-type]
    monkeypatch.setattr(operators, "_copies", lambda device: copies)
    monkeypatch.setattr(operators, "_current", lambda: torch.device("cuda", 0))
    finish = operators.copies_so_far(torch.device("cuda"))
    assert asked == ["event on up", "event on down"]
    finish()
    assert asked[2:] == ["wait for up", "wait for down"]
