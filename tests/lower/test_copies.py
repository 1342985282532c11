"""Regions that only copy run as one launch per pair of dtypes; here on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard.ir.graph import aten
from graphshard.lower.eager import copies_of

SHARDS = (torch.randn(4, 3), torch.randn(5), torch.randn(3), torch.randn(0))


def _region(fn: Callable[..., Any], inputs: tuple[Tensor, ...] = SHARDS) -> GraphModule:
    return make_fx(fn, tracing_mode="fake")(*inputs)


def _prologue(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
    """Compute a prologue of an all-gather, with a parameter that needs no cast, and an empty shard."""
    small = [aten.view.default(aten._to_copy.default(x, dtype=torch.bfloat16), [-1]) for x in (b, c, d)]
    return [aten._to_copy.default(a, dtype=torch.bfloat16), aten.cat.default(small), aten.clone.default(c)]


def test_casts_and_packing() -> None:
    module = _region(_prologue)
    copies = copies_of(module, "cpu")
    assert copies is not None
    inputs = list(SHARDS)
    with mock.patch("graphshard.lower.eager.foreach_copy_", wraps=torch._foreach_copy_) as started:
        found = copies(inputs)
    assert not inputs, "what is given is let go of"
    assert started.call_count == 2, "to bfloat16, and float32"
    for value, expected in zip(found, _prologue(*SHARDS), strict=True):
        assert torch.equal(value, expected)
        assert (value.dtype, value.stride()) == (expected.dtype, expected.stride())


GRADIENTS = (torch.randn(4, 6).bfloat16(), torch.randn(1, 1, 4).bfloat16(), torch.randn(1, 6).bfloat16())


def _before_a_reduction(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
    """Pack small gradients for two ranks; two transposes cancel."""
    wide = aten._to_copy.default(aten.t.default(aten.t.default(a)), dtype=torch.float32)
    small = [aten._to_copy.default(aten.view.default(x, [-1]), dtype=torch.float32) for x in (b, c)]
    packed = aten.cat.default([aten.view.default(x, [2, -1]) for x in small], 1)
    return [wide, packed]


def test_gradients() -> None:
    copies = copies_of(_region(_before_a_reduction, GRADIENTS), "cpu")
    assert copies is not None
    with mock.patch("graphshard.lower.eager.foreach_copy_", wraps=torch._foreach_copy_) as started:
        found = copies(list(GRADIENTS))
    ((there, _),) = (call.args for call in started.call_args_list)
    assert all(value.is_contiguous() for value in there), "what has gaps would be copied one by one, with all others"
    for value, expected in zip(found, _before_a_reduction(*GRADIENTS), strict=True):
        assert torch.equal(value, expected)
        assert (value.dtype, value.stride()) == (expected.dtype, expected.stride())


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b, c, d: [aten.mul.Tensor(a, 2), aten.clone.default(b)],
        lambda a, b, c, d: [aten.clone.default(a)],
        lambda a, b, c, d: [aten.clone.default(a), b],
        lambda a, b, c, d: [aten.clone.default(a), aten.clone.default(aten.t.default(a))],
        lambda a, b, c, d: [aten.clone.default(a), aten.cat.default([b, aten.clone.default(c)])],
        lambda a, b, c, d: [aten.clone.default(b), aten.clone.default(aten.slice.Tensor(a, 0, 1, 3))],
        lambda a, b, c, d: [aten.clone.default(b), aten.clone.default(aten.reshape.default(aten.t.default(a), [12]))],
        lambda a, b, c, d: [aten.clone.default(b), aten.clone.default(aten.expand.default(a, [2, 4, 3]))],
        lambda a, b, c, d: [aten.clone.default(b), aten.t.default(aten.clone.default(a))],
        lambda a, b, c, d: [aten.clone.default(b), aten._to_copy.default(a, dtype=torch.bfloat16, pin_memory=False)],
    ],
    ids=[
        "computes",
        "one copy",
        "an input",
        "of a view",
        "packs a value that is not a copy",
        "of a part",
        "of a possible copy",
        "several times",
        "a view",
        "where to",
    ],
)
def test_rejects_other_regions(fn: Callable[..., Any]) -> None:
    assert copies_of(_region(fn), "cpu") is None


def test_strided_inputs() -> None:
    inputs = (torch.randn(3, 4).t(), *SHARDS[1:])
    assert copies_of(_region(_prologue, inputs), "cpu") is None


def test_cpus_use_inductors_kernels() -> None:
    assert copies_of(_region(_prologue)) is None
