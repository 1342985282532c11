"""A process per way to train: they prepare concurrently, and train one at a time.

Tracing and compiling takes seconds of one core each, and a machine with a GPU has many. A process answers one request
after the other:

    begin(size, ranks)      the model, its first step and two more; seconds of the first
    turn()                  steps; seconds of each
    end()                   peak bytes of a step, and its number of kernels; frees the model
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.autograd import DeviceType

from benchmarks.gpu.settings import Setup, Size, Step, world
from benchmarks.gpu.variants import variants
from graphshard.runtime.step_recorder import clock_of

_WARMUP = 2
# Seconds that a process has to end.
_GRACE = 5.0


class FailedError(Exception):
    """A process could not answer a request; the message says why."""


class Worker:
    """Process of one variant, from the outside.

    Args:
        name: of the variant.
    """

    def __init__(self, setup: Setup, name: str) -> None:
        context = multiprocessing.get_context("spawn")  # a fork lacks the threads that torch relies on
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, setup, name), name=name)
        self.process.start()
        theirs.close()

    def ask(self, what: str, *args: Any) -> None:
        """Send a request without waiting; if the process is gone, `answer` says so."""
        with contextlib.suppress(OSError):
            self._connection.send((what, args))

    def answer(self, end: float) -> Any:
        """Return its answer.

        Args:
            end: deadline on the monotonic clock; a process that takes longer is ended.

        Raises:
            FailedError: it failed, is gone, or was ended.
        """
        try:
            if not self._connection.poll(max(end - time.monotonic(), 0.0)):
                self.stop()
                raise FailedError("ended: no time is left")
            answer = self._connection.recv()
        except (EOFError, OSError):
            self.process.join(_GRACE)
            raise FailedError(f"its process ended with {self.process.exitcode}") from None
        if isinstance(answer, FailedError):
            raise answer
        return answer

    def stop(self) -> None:
        """End the process."""
        self._connection.close()
        self.process.kill()
        self.process.join()


def said(error: BaseException) -> str:
    """Return an error as one line for the table; the traceback goes to the log."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error)[:200]}"


def _serve(connection: Connection, setup: Setup, name: str) -> None:
    """Answer requests in the process until the connection closes."""
    # Sizes and worlds compile the same functions; at its limit, torch would only log and stop compiling.
    torch._dynamo.config.recompile_limit = 64
    variant = _Variant(setup, name)
    while True:
        try:
            what, args = connection.recv()
        except EOFError:
            return
        answer: Any
        try:
            answer = getattr(variant, what)(*args)
        except Exception as error:
            answer = FailedError(said(error))
        connection.send(answer)


class _Variant:
    def __init__(self, setup: Setup, name: str) -> None:
        self._setup, self._name = setup, name
        self._clock = clock_of(torch.device(setup.device))
        self._stack = contextlib.ExitStack()
        self._step: Step | None = None

    def begin(self, size: Size, num_ranks: int) -> float:
        """Free the previous model, and return the seconds of the first step, from the model."""
        self._forget()
        mesh = self._stack.enter_context(world(self._setup, num_ranks))
        model, tokens = size.model(self._setup.device), size.tokens(self._setup.device)
        self._clock.finish()
        began = time.perf_counter()
        self._step = variants(self._setup)[self._name](model, mesh, tokens)
        loss = self._step()
        self._clock.finish()
        first = time.perf_counter() - began
        if num_ranks == 1 and not torch.isfinite(loss):
            raise ValueError(f"the loss of the first step is {loss.item()}")
        for _ in range(_WARMUP):
            self._step()
        self._leave_room()
        return first

    def turn(self) -> float:
        """Return the seconds of steps. One more runs before, to reallocate memory that others used meanwhile."""
        assert self._step is not None
        self._step()
        self._clock.finish()
        began = self._clock.stamp()
        for _ in range(self._setup.steps):
            self._step()
        ended = self._clock.stamp()
        self._clock.finish()
        self._leave_room()
        return self._clock.seconds(began, ended) / self._setup.steps

    def end(self) -> tuple[int | None, int | None]:
        """Return the peak bytes of tensors in a step, and its number of kernels; None on a CPU."""
        found = (None, None) if self._setup.is_dry else (self._peak(), self._kernels())
        self._forget()
        return found

    def _peak(self) -> int:
        assert self._step is not None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._step()
        torch.cuda.synchronize()
        return int(torch.cuda.memory_stats()["active_bytes.all.peak"])

    def _kernels(self) -> int:
        """Count kernels, without copies and fills by the driver."""
        assert self._step is not None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self._step()
            torch.cuda.synchronize()
        return num_kernels(profile.events())

    def _leave_room(self) -> None:
        """Release cached memory to others until the next turn."""
        self._clock.finish()
        if not self._setup.is_dry:
            torch.cuda.empty_cache()

    def _forget(self) -> None:
        self._step = None
        gc.collect()
        self._stack.close()
        gc.collect()
        self._leave_room()


def num_kernels(events: Any) -> int:
    """Count the kernels among a profiler's events, without copies and fills by the driver."""
    names = [event.name for event in events if event.device_type == DeviceType.CUDA]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names)
