"""Gradients of losses over a vocabulary are computed without materializing one-hot tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from graphshard.lower.inductor import decompose
from graphshard.lower.inductor_rewrites import has_one_hots
from tests.lower.small_regions import compile_inductor
from tests.lower.test_regions import _region

ROWS, COLUMNS = 6, 40


def _grad(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    logits = logits.detach().requires_grad_()
    return torch.autograd.grad(F.cross_entropy(logits.float(), targets, **options), logits)[0]


def _inputs(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(0, COLUMNS, (ROWS,))
    targets[2] = -100  # an ignored target
    return [torch.randn(ROWS, COLUMNS).to(dtype), targets]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}], ids=str)
@pytest.mark.slow
def test_a_loss_over_a_vocabulary(dtype: torch.dtype, options: dict[str, Any]) -> None:
    inputs = _inputs(dtype)
    region = _region(lambda logits, targets: _grad(logits, targets, **options), *inputs)
    expected = _grad(*inputs, **options)
    run = compile_inductor(region, "region_0")
    (value,) = run(list(inputs))
    torch.testing.assert_close(value, expected)
    assert value.dtype == dtype


@pytest.mark.slow
def test_no_intermediate_of_the_size_of_the_logits() -> None:
    """Except the inputs of the gradient."""
    region = _region(lambda logits, targets: _grad(logits, targets), *_inputs(torch.float32))
    decomposed, _ = decompose(region.module)
    assert not has_one_hots(decomposed.graph)
    run: Any = compile_inductor(region, "region_0")
    assert run.source_code.count(f"= empty_strided_cpu(({ROWS}, {COLUMNS})") == 1


def _scattered(index: Tensor, dim: int, background: float, dtype: torch.dtype) -> Tensor:
    shape = [3, 5, 4]
    return torch.full(shape, background, dtype=dtype).scatter(dim, index, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_along_any_dim(dim: int, dtype: torch.dtype) -> None:
    shape = [3, 5, 4]
    size, shape[dim] = shape[dim], 1
    index = torch.randint(0, size, shape, generator=torch.Generator().manual_seed(0))
    region = _region(lambda index: _scattered(index, dim, 1, dtype) * 1, index)
    module, _ = decompose(region.module)
    assert torch.ops.aten.scatter.value not in {node.target for node in module.graph.nodes}
    (value,) = module(index)
    expected = _scattered(index, dim, 1, dtype) * 1
    assert torch.equal(value, expected)
    assert value.dtype == expected.dtype


@pytest.mark.parametrize(
    ("shape", "dim"), [((3, 2, 4), 1), ((2, 1, 4), 1), ((3, 1, 3), 1)], ids=["two to a row", "fewer rows", "shorter"]
)
def test_other_one_hots_do_not_change(shape: tuple[int, ...], dim: int) -> None:
    index = torch.zeros(shape, dtype=torch.int64)
    graph = make_fx(lambda index: _scattered(index, dim, 0, torch.float32), tracing_mode="fake")(index).graph
    assert graph.find_nodes(op="call_function", target=torch.ops.aten.scatter.value)
    assert not has_one_hots(graph)
