"""One run of regions as a graph of the device: what it is captured with, and how it is launched.

A graph reads and writes at fixed addresses. So what goes in and out is copied, to and from memory that is given, those
of a dtype by one launch. Other inputs are read where they lie, and the graph is of no use once they have moved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphshard.lower.replays import Boxed
from graphshard.runtime.device_graphs import DeviceGraphs
from graphshard.torch_compat.operators import foreach_copy_

# Bytes that memory for tensors begins at multiples of, as in torch's allocator.
_ALIGNMENT = 512


@dataclass
class CapturedRun:
    """A run as a graph of the device.

    Attributes:
        launch: launches all of it.
        fixed: of inputs that are read where they lie, their place and address.
        given: of those that are copied, their places and the memory they are copied to, by dtype.
        made: what the run returns: memory that results are in, by place.
        constants: what it returns besides tensors, by place.
    """

    launch: Callable[[], None]
    fixed: tuple[tuple[int, int], ...]
    given: list[tuple[list[int], list[Tensor]]] = field(default_factory=list)
    made: list[tuple[list[int], list[Tensor]]] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)

    def moved(self, inputs: Sequence[Any]) -> list[int]:
        """Which of the inputs that it reads in place are not where they were."""
        return [index for index, place in self.fixed if inputs[index].data_ptr() != place]

    def __call__(self, inputs: list[Any]) -> list[Any]:
        for places, memory in self.given:
            foreach_copy_(memory, [inputs[place] for place in places])
        inputs.clear()
        self.launch()
        results = dict(self.constants)
        for places, memory in self.made:
            fresh = [
                torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                for value in memory
            ]
            foreach_copy_(fresh, memory)
            results.update(zip(places, fresh))
        return [results[place] for place in range(len(results))]


@torch.inference_mode(False)  # what is captured here is launched outside of inference, too
@torch.no_grad()
def capture_run(
    graphs: DeviceGraphs,
    reserve: Callable[[int], Tensor],
    code: Boxed,
    inputs: Sequence[Any],
    copied: Sequence[int],
    num_made: int,
) -> CapturedRun:
    """Capture the code of a run for inputs such as these.

    Args:
        reserve: memory of so many bytes, for what is copied.
        copied: which of the inputs are.
        num_made: bytes of the results.
    """
    begin = bytes_of(inputs[index] for index in copied)
    memory = reserve(begin + num_made)
    offsets = itertools.accumulate((_num_bytes(inputs[index]) for index in copied), initial=0)
    static = {index: _placed(memory, offset, inputs[index]) for index, offset in zip(copied, offsets)}
    fixed = tuple((i, v.data_ptr()) for i, v in enumerate(inputs) if isinstance(v, Tensor) and i not in static)

    def launch() -> list[Any]:
        results = code([static.get(index, value) for index, value in enumerate(inputs)])
        offset, made = begin, []
        for value in results:
            made.append(_placed(memory, offset, value) if isinstance(value, Tensor) else value)
            offset += _num_bytes(value)
        for places in _by_dtype(dict(enumerate(results))):
            foreach_copy_([made[place] for place in places], [results[place] for place in places])
        return made

    replay, made = graphs.capture(launch)
    results = dict(enumerate(made))
    return CapturedRun(
        replay,
        fixed,
        [(places, [static[place] for place in places]) for places in _by_dtype(static)],
        [(places, [results[place] for place in places]) for places in _by_dtype(results)],
        {place: value for place, value in results.items() if not isinstance(value, Tensor)},
    )


def _by_dtype(values: dict[int, Any]) -> list[list[int]]:
    """Places of tensors, those of a dtype together: they are copied by one launch."""
    found: dict[torch.dtype, list[int]] = {}
    for place, value in values.items():
        if isinstance(value, Tensor):
            found.setdefault(value.dtype, []).append(place)
    return list(found.values())


def _extent(value: Tensor) -> int:
    """Elements from the first one to the last one in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride())) if value.numel() else 0


def _num_bytes(value: Any) -> int:
    """Bytes in the memory that graphs read and write."""
    if not isinstance(value, Tensor):
        return 0
    return math.ceil(_extent(value) * value.dtype.itemsize / _ALIGNMENT) * _ALIGNMENT


def bytes_of(values: Iterable[Any]) -> int:
    """What values take of the memory that graphs read and write."""
    return sum(map(_num_bytes, values))


def _placed(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    """A tensor like another, in a piece of memory."""
    size = _extent(like) * like.dtype.itemsize
    return (
        memory[offset : offset + size]
        .view(like.dtype)
        .as_strided(like.shape, like.stride(), offset // like.dtype.itemsize)
    )
