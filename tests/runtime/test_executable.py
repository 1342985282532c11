"""Work of a step outside its executors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import graphshard
import graphshard.runtime.executable
from graphshard import Pipeline
from graphshard.passes import OffloadParameters
from tests.helpers import Blocks
from tests.ranks import FakeWorld


@dataclass(frozen=True)
class _CustomOffload(OffloadParameters):
    """Offloads under another name."""

    name: ClassVar[str] = "mine"


@pytest.mark.parametrize("offloads", [True, False])
@pytest.mark.quick_cases("False")
def test_waits_for_copies(fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch, offloads: bool) -> None:
    """Once after each phase of a program that offloads, whatever the pass is called.

    After backward for gradients; after forward, because a shard may be written before a backward follows, or without
    one.
    """
    fake_world(2)
    finished: list[torch.device] = []
    monkeypatch.setattr(graphshard.runtime.executable, "finish_copies", finished.append)
    passes = Pipeline().insert(_CustomOffload(always=offloads), before="plan")
    model = graphshard.compile(Blocks(2), init_device_mesh("cpu", (2,)), backend="eager", passes=passes)
    for _ in range(2):
        loss = model(torch.ones(3, 4))
        assert finished == [torch.device("cpu")] * offloads
        loss.backward()
        assert finished == [torch.device("cpu")] * (2 * offloads)
        finished.clear()
    with torch.no_grad():
        model(torch.ones(3, 4))
    assert finished == [torch.device("cpu")] * offloads
