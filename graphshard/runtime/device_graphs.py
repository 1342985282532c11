"""Capture what is launched on a device, so that it can be launched again at once: CUDA graphs.

`tests/graphs.py` has what stands for it on CPUs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from graphshard.torch_compat.cuda import clear_cublas_workspaces

ResultT = TypeVar("ResultT")


class DeviceGraphs(Protocol):
    """What can be asked of a device. The graphs of one value are launched one after the other, on one stream."""

    def stream(self) -> object:
        """The stream that is launched on now, as something that can be compared; None while others capture it."""

    def capture(self, launch: Callable[[], ResultT]) -> tuple[Callable[[], None], ResultT]:
        """Capture what a function launches; nothing is done then.

        Returns:
            What launches all of it again, on the stream that is current then, and what the function has returned. The
            memory of these tensors, as of all that the function allocates, is only the graph's while it runs: other
            graphs use it, too.

        Raises:
            RuntimeError: something in it cannot be captured.
        """


class CudaGraphs:
    """CUDA graphs of one device, which share a pool of memory.

    Capture is on a stream of its own. Errors are those of this thread: another may load data meanwhile, and NCCL's
    watchdog asks for events. Torch's default generator takes part in every graph: each launch draws what is next in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def stream(self) -> object:
        return None if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(self._device)

    def capture(self, launch: Callable[[], ResultT]) -> tuple[Callable[[], None], ResultT]:
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:  # torch lets a pool go with the last graph that uses it
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        clear_cublas_workspaces()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = launch()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # what is half captured cannot be ended
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            clear_cublas_workspaces()
        self._graphs.add(graph)
        return graph.replay, result
