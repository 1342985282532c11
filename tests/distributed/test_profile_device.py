"""`graphshard.profiling.profile_step` with the clock of a simulated device whose launches return at once.

The device takes `PRODUCT` seconds for a matmul and `SENDING` for a collective, which run in sequence on one link;
everything else is free. Host time must not appear in the profile.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import graphshard
from graphshard.runtime.step_recorder import DeviceClock
from graphshard.torch_compat.torch_ops import TorchDispatchMode
from tests.distributed.nets import Block
from tests.distributed.twins import GATHERS, filled, world_mesh
from tests.ranks import Ranks

PRODUCT, SENDING = 100.0, 250.0


class _Device(TorchDispatchMode):
    """Fake `torch.cuda` with one compute stream and one link."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.link = 0.0  # when the stream and the link finish the work launched so far
        self.reached = 0.0  # when the host's last wait ends
        self.arrival: dict[int, float] = {}  # by address
        self.asked: set[torch.device] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._opname == "wait_tensor":
            self.now = max(self.now, self.arrival.pop(args[0].data_ptr(), self.now))
        elif func.namespace in ("c10d", "_c10d_functional") and func._opname != "barrier":
            received = filled(args) if func._opname in GATHERS else result
            self.link = max(self.link, self.now) + SENDING
            if isinstance(received, Tensor):
                self.arrival[received.data_ptr()] = self.link
        elif func._opname in ("mm", "addmm"):
            self.now += PRODUCT
        return result

    def current_stream(self, device: torch.device) -> _Device:
        self.asked.add(device)
        return self

    def synchronize(self, device: torch.device) -> None:
        self.asked.add(device)
        self.reached = self.now

    def Event(self, *, enable_timing: bool) -> _Event:  # torch's name
        assert enable_timing
        return _Event(self)


class _Event:
    """Like torch's event: the time is known once the host has waited for the device."""

    def __init__(self, device: _Device) -> None:
        self.device = device
        self.at = -1.0

    def record(self, stream: _Device) -> None:
        assert stream is self.device
        self.at = stream.now

    def elapsed_time(self, until: _Event) -> float:
        assert self.at >= 0
        if max(self.at, until.at) > self.device.reached:
            raise RuntimeError("the device has not reached both events")
        return (until.at - self.at) * 1e3


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _products(program: graphshard.Program, region: str) -> int:
    graph = program.regions[program.region_names[region]].module.graph
    return sum(getattr(node.target, "_opname", "") in ("mm", "addmm") for node in graph.nodes)


def _simulated(rank: int, world_size: int) -> None:
    model = graphshard.compile(_Net(), world_mesh(), backend="eager")
    device = _Device()
    with mock.patch("graphshard.predict.profile_step.clock_of", lambda of: DeviceClock(of, device)), device:
        profile = graphshard.profiling.profile_step(model, (torch.ones(4, 8),))
    assert device.asked == {torch.device("cpu")}
    (program,) = graphshard.programs(model)
    for step in profile.ranks:
        compute = [span for span in step.spans if span.kind == "compute"]
        exposed = [span for span in step.spans if span.kind == "exposed"]
        for span in compute:
            assert span.seconds == pytest.approx(PRODUCT * _products(program, span.name)), span
        # Only matmuls and waits take time, one after another.
        assert step.seconds == pytest.approx(sum(span.seconds for span in (*compute, *exposed)))
        assert sum(span.seconds for span in compute) == pytest.approx(PRODUCT * 17)  # the input has no gradient
        sent = [span for span in step.spans if span not in compute and span not in exposed]
        assert len(sent) == len(program.plan.buckets)
        assert all(span.seconds >= SENDING - 1e-3 for span in sent), "waited for before it has arrived"
    (first,) = (wait for wait in profile.waits if wait.name == "gather layers.0 in forward")
    assert first.measured.median == pytest.approx(SENDING)


def test_times_come_from_the_device(ranks: Ranks) -> None:
    ranks(2).run(_simulated)
