"""CUDA graphs emulated on the CPU: operators are recorded with their arguments and run again on replay.

As on a GPU, capturing computes nothing and draws no random numbers, and no Python runs when a graph is launched. Memory
that a graph allocates is undefined before the launch and after it, because other graphs share it; the emulation fills
such memory with NaN.

    with on_cpu() as graphs:
        model = graphshard.compile(model, mesh, backend="eager", cuda_graphs=True)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from graphshard.module import compiled_module
from graphshard.runtime.cuda_graphs import CudaGraphs, ResultT
from graphshard.torch_compat.torch_ops import TorchDispatchMode, pytree

# A call, its results, and whether it writes to its arguments.
_Call = tuple[Any, tuple[Any, ...], dict[str, Any], Any, bool]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        schema = func._schema
        if schema.is_mutable:
            (written,) = {
                arg.name for arg in schema.arguments if arg.alias_info is not None and arg.alias_info.is_write
            }
            first = schema.arguments[0].name == written
            results = (args[0] if first else kwargs[written]) if schema.returns else None
        elif any(result.alias_info is not None for result in schema.returns):
            return func(*args, **kwargs)
        else:  # zeros are valid indices, too
            results = func(*pytree.tree_map_only(Tensor, torch.zeros_like, args), **kwargs)
        self.calls.append((func, args, kwargs, results, schema.is_mutable))
        return results


@dataclass
class Graphs(CudaGraphs):
    """`CudaGraphs` on a CPU.

    Attributes:
        captured, launched: how often.
        current: the stream.
    """

    captured: int = 0
    launched: int = 0
    current: object = "compute"
    fails: str = field(default="")

    def stream(self) -> object:
        return self.current

    def capture(self, launch: Callable[[], ResultT]) -> tuple[Callable[[], None], ResultT]:
        if self.fails:
            raise RuntimeError(self.fails)
        state = torch.get_rng_state()
        recorder = _Recorder()
        try:
            with recorder:
                result = launch()
        finally:
            torch.set_rng_state(state)
        calls = recorder.calls
        _spoil(calls)
        self.captured += 1

        def replay() -> None:
            self.launched += 1
            for func, args, kwargs, results, writes in calls:
                again = func(*args, **kwargs)
                if not writes:
                    for into, value in zip(pytree.tree_leaves(results), pytree.tree_leaves(again), strict=True):
                        if isinstance(into, Tensor):
                            into.copy_(value)
            _spoil(calls)

        return replay, result


def _spoil(calls: list[_Call]) -> None:
    """Overwrite the results of the calls with garbage."""
    for _, _, _, results, writes in calls:
        for value in pytree.tree_leaves(results):
            if isinstance(value, Tensor) and not writes:
                value.fill_(torch.nan if value.is_floating_point() else 99)


@contextlib.contextmanager
def on_cpu() -> Iterator[Graphs]:
    """Let `cuda_graphs=` of `compile` capture on the CPU."""
    graphs = Graphs()
    with mock.patch.object(compiled_module, "graphs_of", return_value=graphs):
        yield graphs
