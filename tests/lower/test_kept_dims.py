"""Results of compiled regions that dropped dims of size 1 get them back."""

from __future__ import annotations

import torch
from torch import Tensor

from graphshard.lower.inductor_rewrites import with_dims


def test_dims_come_back() -> None:
    expected = [torch.empty(1, 1, 6), torch.empty(6), torch.empty(1, 2, 3), torch.empty(2, 3), 5]

    def region(inputs: list[Tensor]) -> list[object]:
        (x,) = inputs
        return [x, x + 1, (x + 2).view(1, 2, 3), x.view(2, 3), 5]

    results = with_dims(region, expected)([torch.arange(6.0)])
    assert [r.shape for r in results[:-1]] == [e.shape for e in expected[:-1]]
    assert results[0].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert results[-1] == 5


def test_regions_without_dropped_dims_are_not_wrapped() -> None:
    def region(inputs: list[Tensor]) -> list[Tensor]:
        return inputs

    assert with_dims(region, [torch.empty(2, 3), torch.empty(1)]) is region
