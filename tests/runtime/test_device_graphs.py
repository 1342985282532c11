"""What is asked of `torch.cuda` to capture, and in which order; there is no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from graphshard.runtime.device_graphs import CudaGraphs

DEVICE = torch.device("cuda", 0)


class _Cuda:
    """As much of `torch.cuda` as capturing asks, which notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.current = "compute"
        self.capturing = False
        self.fails_to_end = False

    def Stream(self, device: torch.device) -> str:
        return "capture"

    def graph_pool_handle(self) -> str:
        return "pool"

    def current_stream(self, device: torch.device) -> str:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def synchronize(self, device: torch.device) -> None:
        self.asked.append("synchronize")

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def CUDAGraph(self) -> Any:
        graph = mock.Mock()
        graph.capture_begin = lambda pool, capture_error_mode: self.asked.append(
            f"begin on {self.current} in {pool}, {capture_error_mode}"
        )
        graph.capture_end = self._end
        graph.replay = lambda: self.asked.append(f"replay on {self.current}")
        return graph

    def _end(self) -> None:
        self.asked.append("end")
        if self.fails_to_end:
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    made = _Cuda()
    monkeypatch.setattr(torch, "cuda", made)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: made.asked.append("forget"), raising=False)
    return made


def test_capture_and_replay(cuda: _Cuda) -> None:
    graphs = CudaGraphs(DEVICE)
    replay, result = graphs.capture(lambda: cuda.asked.append(f"launch on {cuda.current}") or 3)
    began = "begin on capture in pool, thread_local"
    assert cuda.asked == ["synchronize", "forget", began, "launch on capture", "end", "forget"]
    assert result == 3
    cuda.asked.clear()
    replay()
    assert cuda.asked == ["replay on compute"]


@pytest.mark.parametrize("fails_to_end", [False, True])
def test_what_fails_is_raised_when_the_capture_has_ended(cuda: _Cuda, fails_to_end: bool) -> None:
    cuda.fails_to_end = fails_to_end
    graphs = CudaGraphs(DEVICE)

    def launch() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="operation not permitted"):
        graphs.capture(launch)
    assert cuda.asked[-2:] == ["end", "forget"]
    assert cuda.current == "compute"


def test_no_stream_while_the_user_captures_it(cuda: _Cuda) -> None:
    graphs = CudaGraphs(DEVICE)
    assert graphs.stream() == "compute"
    cuda.capturing = True
    assert graphs.stream() is None
