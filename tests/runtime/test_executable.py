"""What a step does around its executors."""

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
class _Mine(OffloadParameters):
    """Offloads under a name of its own."""

    name: ClassVar[str] = "mine"


@pytest.mark.parametrize("offloads", [True, False])
def test_copies_are_waited_for(fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch, offloads: bool) -> None:
    """Once behind each phase of a program that offloads, whatever the pass is called.

    Behind backward for gradients; behind forward, as nobody knows if a backward follows before a shard is written to.
    """
    fake_world(2)
    finished: list[torch.device] = []
    monkeypatch.setattr(graphshard.runtime.executable, "finish_copies", finished.append)
    passes = Pipeline().insert(_Mine(always=offloads), before="plan")
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
