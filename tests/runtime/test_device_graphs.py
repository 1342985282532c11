"""Calls of `torch.cuda` for capturing, and their order; no GPU is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from graphshard.runtime.cuda_graphs import CudaGraphs

DEVICE = torch.device("cuda", 0)


class _Cuda:
    """A fake `torch.cuda` that records the calls for capturing."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.current = "compute"
        self.capturing = False
        self.fails_to_end = False
        self.pools = 0

    def Stream(self, device: torch.device) -> str:
        return "capture"

    def graph_pool_handle(self) -> str:
        self.pools += 1
        return f"pool {self.pools}"

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

    def CUDAGraph(self) -> _Graph:
        return _Graph(self)


class _Graph:
    def __init__(self, cuda: _Cuda) -> None:
        self.cuda = cuda

    def capture_begin(self, pool: str, capture_error_mode: str) -> None:
        self.cuda.asked.append(f"begin on {self.cuda.current} in {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        self.cuda.asked.append("end")
        if self.cuda.fails_to_end:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.cuda.asked.append(f"replay on {self.cuda.current}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    made = _Cuda()
    monkeypatch.setattr(torch, "cuda", made)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: made.asked.append("forget"), raising=False)
    return made


def test_capture_and_replay(cuda: _Cuda) -> None:
    graphs = CudaGraphs(DEVICE)
    replay, result = graphs.capture(lambda: cuda.asked.append(f"launch on {cuda.current}") or 3)
    began = "begin on capture in pool 1, thread_local"
    assert cuda.asked == ["synchronize", "forget", began, "launch on capture", "end", "forget"]
    assert result == 3
    cuda.asked.clear()
    replay()
    assert cuda.asked == ["replay on compute"]


@pytest.mark.parametrize("fails_to_end", [False, True])
def test_errors_are_raised_after_the_capture(cuda: _Cuda, fails_to_end: bool) -> None:
    cuda.fails_to_end = fails_to_end
    graphs = CudaGraphs(DEVICE)

    def launch() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="operation not permitted"):
        graphs.capture(launch)
    assert cuda.asked[-2:] == ["end", "forget"]
    assert cuda.current == "compute"


def test_an_unused_pool_is_not_reused(cuda: _Cuda) -> None:
    """torch frees a pool with its last graph, and rejects capturing into it."""
    graphs = CudaGraphs(DEVICE)
    first, _ = graphs.capture(lambda: 1)
    second, _ = graphs.capture(lambda: 2)
    del first
    third, _ = graphs.capture(lambda: 3)
    del second, third
    graphs.capture(lambda: 4)
    began = [line.split(" in ")[1].split(",")[0] for line in cuda.asked if line.startswith("begin")]
    assert began == ["pool 1", "pool 1", "pool 1", "pool 2"]


def test_no_stream_while_the_user_captures_it(cuda: _Cuda) -> None:
    graphs = CudaGraphs(DEVICE)
    assert graphs.stream() == "compute"
    cuda.capturing = True
    assert graphs.stream() is None
