"""Sums over several dims that keep them, `(1, 1, width)`, as results of regions on a GPU.

Where a normalization's gradients and those of its weight share a kernel, Inductor before torch 2.13 ends the sum for
the weight by a call of torch, and returns `(width,)`. Whoever is given that fails, or does not notice. Here results
get their dims back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.torch_version import TorchVersion

from graphshard.lower.regions import Boxed

ARE_LOST = TorchVersion(torch.__version__) < "2.13"
# For regions of dynamic sizes, whose shapes are not known: they have no such kernels.
WITHOUT = {"triton.mix_order_reduction": False}


class WithDims:
    """A compiled region whose results have the dims that its graph says."""

    def __init__(self, fn: Boxed, places: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        self._fn, self._places = fn, places
        self.source_code = getattr(fn, "source_code", "")

    def __call__(self, inputs: list[Any]) -> list[Any]:
        results = list(self._fn(inputs))
        for place, shape in self._places:
            if results[place].dim() != len(shape):
                results[place] = results[place].view(shape)
        return results


def with_dims(fn: Boxed, outputs: Sequence[Any]) -> Boxed:
    """The region, or one that returns what it should.

    Args:
        outputs: fake values of its results.
    """
    tensors = [(place, value) for place, value in enumerate(outputs) if isinstance(value, torch.Tensor)]
    places = [(place, tuple(value.shape)) for place, value in tensors if value.dim() > 1 and 1 in value.shape]
    return WithDims(fn, places) if places else fn
