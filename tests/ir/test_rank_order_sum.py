"""Sums in the order of ranks: the loop and the kernel have the bits of additions one by one."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from graphshard.ir._rank_order_sum import sum_by_kernel, sum_dtype, sum_in_rank_order

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _one_by_one(chunks: list[Tensor]) -> Tensor:
    total = chunks[0].to(sum_dtype(chunks[0].dtype))
    for chunk in chunks[1:]:
        total = total + chunk.to(total.dtype)
    return total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum(dtype: torch.dtype) -> None:
    chunks = list(torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype))
    received, expected = torch.cat(chunks), _one_by_one(chunks)
    assert torch.equal(sum_in_rank_order(received, 3, "sum"), expected)
    assert torch.equal(sum_in_rank_order(received, 3, "avg"), expected / 3)
    assert torch.equal(received, torch.cat(chunks)), "the buffer stays"
    pair = sum_in_rank_order(chunks[1].clone(), 2, "avg", chunks[0])
    assert torch.equal(pair, _one_by_one(chunks[:2]) / 2)
    assert pair.dtype == expected.dtype == sum_dtype(dtype)


@pytest.mark.parametrize("numel", [0, 1, 5000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, numel: int) -> None:
    """Triton's interpreter runs it on the CPU."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "graphshard.ir._rank_order_kernel", raising=False)
    chunks = list(torch.randn(5, numel, generator=torch.Generator().manual_seed(0)).to(dtype))
    assert torch.equal(sum_by_kernel(torch.cat(chunks), 5), _one_by_one(chunks))
    monkeypatch.delitem(sys.modules, "graphshard.ir._rank_order_kernel", raising=False)
