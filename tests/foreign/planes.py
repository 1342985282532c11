"""Graphs with parameters sharded over two axes, as captured by AutoParallel, written out.

weight  S(0) S(0): gathered over dp, then over tp, where it is used; its gradient is scattered over both
weight  S(0) S(1): gathered over dp; along its columns the ranks of tp compute partial sums, which are all-reduced
rows    S(0) on dp: dealt out again over tp for the columns, by all-to-all, and back
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

c10d = torch.ops._c10d_functional
wait = c10d.wait_tensor


def planes(
    dp: str, tp: str, size: int, *, dim: int = 16, rows: int = 8, depth: int = 3
) -> tuple[Callable[..., Any], list[Tensor]]:
    """Build forward and backward of `depth` blocks on `size` x `size` ranks, and inputs of one rank."""

    def whole(shard: Tensor, *groups: str) -> Tensor:
        for group in groups:
            shard = wait(c10d.all_gather_into_tensor(shard, size, group))
        return shard.to(torch.float32)

    def exchanged(value: Tensor, group: str) -> Tensor:
        """All-to-all that gives some columns of all ranks' rows, and averages them."""
        parts, sizes = torch.cat(value.chunk(size, dim=1)), [value.shape[0]] * size
        return wait(c10d.all_to_all_single(parts, sizes, sizes, group)).view(size, *sizes[:1], -1).mean(0)

    def scattered(gradient: Tensor, *groups: str) -> Tensor:
        gradient = gradient.to(torch.float64)
        for group in groups:
            gradient = wait(c10d.reduce_scatter_tensor(gradient, "sum", size, group))
        return gradient / size

    def run(x: Tensor, *shards: Tensor) -> Any:
        saved, value = [], x
        for both, columns in zip(shards[::2], shards[1::2]):
            saved.append(value)
            value = torch.relu(value @ whole(both, dp, tp))
            dealt = exchanged(value, tp)  # [rows, dim / size]
            partial = dealt @ whole(columns, dp)  # [rows, dim], partial sums
            value = wait(c10d.all_reduce(partial, "sum", tp)) + value.mean()
        gradient, gradients = value * 0.01, []
        for both, before in zip(shards[-2::-2], reversed(saved)):
            dealt = exchanged(gradient, tp)
            gradients.append(scattered(dealt.t() @ before, dp))
            gradient = gradient @ whole(both, dp, tp).t() + dealt.sum()
            gradients.append(scattered(before.t() @ gradient, tp, dp))
        norm = wait(c10d.all_reduce(wait(c10d.all_reduce(gradient.square().sum(), "sum", dp)), "sum", tp))
        return value, gradients, norm

    both = [torch.randn(dim // size // size, dim, dtype=torch.float64) for _ in range(depth)]
    columns = [torch.randn(dim // size // size, dim, dtype=torch.float64) for _ in range(depth)]
    return run, [torch.randn(rows, dim), *(shard for pair in zip(both, columns) for shard in pair)]
