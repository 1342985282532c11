"""Python overhead of a step per additional parameter, counted in calls."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from tests.helpers import Blocks
from tests.ranks import FakeWorld

# 173 with torch 2.13, including the operators of a layer and its collectives.
MOST = 190


def _calls_of_a_step(depth: int) -> Counter[str]:
    model = graphshard.compile(Blocks(depth, bias=True), init_device_mesh("cpu", (2,)), backend="eager")
    x = torch.ones(2, 4)

    def step() -> None:
        for param in model.parameters():
            param.grad = None
        model(x).backward()

    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1
        elif event == "c_call":
            calls[getattr(called, "__name__", "")] += 1

    for _ in range(3):
        step()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return calls


def test_python_calls_for_a_parameter(fake_world: FakeWorld) -> None:
    fake_world(2)
    few, many = _calls_of_a_step(5), _calls_of_a_step(15)
    more = Counter(many)
    more.subtract(few)
    parameters = 2 * 10
    assert sum(more.values()) / parameters <= MOST, more.most_common(20)
    assert more["narrow"] == 0  # shards of equal sizes need no view
    assert more["checked"] == parameters  # each is checked once
    assert more["sharded_like"] == parameters  # and its gradient becomes a DTensor once
