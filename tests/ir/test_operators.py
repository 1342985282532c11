"""Copies between host and a simulated device: stream and event dependencies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from graphshard.ir import operators
from graphshard.ir.operators import copied_to, finish_copies


class Stream:
    """A stream's launches, and everything that must finish before its next launch."""

    def __init__(self, device: Any = None) -> None:
        self.tail: frozenset[str] = frozenset()
        self.synchronized = False

    def launch(self, name: str, before: dict[str, frozenset[str]]) -> None:
        before[name] = self.tail
        self.tail |= {name}

    def wait_stream(self, other: Stream) -> None:
        self.tail |= other.tail

    def record_event(self) -> Stream:
        return self  # nothing is launched before the wait

    def synchronize(self) -> None:
        self.synchronized = True


class Device:
    """Fake `torch.cuda`."""

    Stream = Stream

    def __init__(self) -> None:
        self.compute = self.current = Stream()
        self.before: dict[str, frozenset[str]] = {}  # dependencies of each launch

    def current_device(self) -> int:
        return 0

    def current_stream(self) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream, self.current
        yield
        self.current = before

    def run(self, name: str) -> Tensor:
        """Compute on the current stream."""
        self.current.launch(name, self.before)
        return Tensor(name, self, is_cuda=True)


class Tensor:
    """A tensor on device or host, whose operations are launched on the current stream."""

    device = torch.device("cuda", 0)

    def __init__(self, name: str, cuda: Device, is_cuda: bool = False) -> None:
        self.name, self.cuda, self.is_cuda = name, cuda, is_cuda
        self.recorded: list[Stream] = []  # streams for which the allocator keeps it

    def to(self, device: torch.device, non_blocking: bool) -> Tensor:
        assert device.type == "cuda"
        assert non_blocking
        return self.cuda.run(f"upload {self.name}")

    def copy_(self, source: Tensor, non_blocking: bool) -> Tensor:
        assert non_blocking
        return self.cuda.run(f"download {source.name}")

    def view_as(self, other: Tensor) -> Tensor:
        return self

    def record_stream(self, stream: Stream) -> None:
        self.recorded.append(stream)


@pytest.fixture
def cuda() -> Iterator[Device]:
    device = Device()
    operators._copies.cache_clear()
    pinned = mock.Mock(side_effect=lambda gradient, device, pin_memory: Tensor("pinned", gradient.cuda))
    with mock.patch.object(torch, "cuda", device), mock.patch.object(torch, "empty_like", pinned):
        yield device
    operators._copies.cache_clear()


def test_no_upload_waits_for_a_download_or_for_compute(cuda: Device) -> None:
    """On one stream they would: a download waits for its producer."""
    first = operators._upload(Tensor("w0", cuda), "cuda")
    operators._arrived(first)
    gradient = cuda.run("compute")
    operators._download(gradient)
    operators._upload(Tensor("w1", cuda), "cuda")
    assert cuda.before == {
        "upload w0": set(),
        "compute": {"upload w0"},
        "download compute": {"upload w0", "compute"},
        "upload w1": {"upload w0"},
    }


def test_memory_is_kept_for_the_streams_that_use_it(cuda: Device) -> None:
    """Compute reads uploads, and downloads read results of compute."""
    copies = operators._copies(torch.device("cuda", 0))
    assert operators._upload(Tensor("w", cuda), "cuda").recorded == [cuda.compute]
    gradient = cuda.run("compute")
    operators._download(gradient)
    assert gradient.recorded == [copies.down]
    assert copies.up is not copies.down


def test_the_host_waits_for_both_directions(cuda: Device) -> None:
    """A shard may be written, and a gradient read, after the copies; compute may still run."""
    copies = operators._copies(torch.device("cuda", 0))
    finish_copies(torch.device("cuda"))
    assert copies.up.synchronized
    assert copies.down.synchronized
    assert not cuda.compute.synchronized


def test_the_host_waits_for_unshard(cuda: Device) -> None:
    """It may write to shards after `unshard`, while the device still computes."""
    cuda.run("compute")
    copies = copied_to([Tensor("w0", cuda), Tensor("w1", cuda)], torch.device("cuda"))
    cuda.run("gather")
    assert len(copies) == 2
    assert cuda.before["upload w1"] == {"upload w0"}
    assert cuda.before["gather"] == {"compute", "upload w0", "upload w1"}
    assert operators._copies(torch.device("cuda", 0)).up.synchronized
    assert not cuda.compute.synchronized
