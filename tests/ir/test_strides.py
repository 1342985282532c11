"""Operators that accept gradients of any strides give equal results for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphshard.ir.graph import aten
from graphshard.ir.strides import ANY_STRIDES
from graphshard.torch_compat.torch_ops import OpOverload


def g(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def i(*shape: int, below: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(1))


_X = g(2, 3, 4, seed=1)
_PICTURE = g(2, 3, 6, 6, seed=1)
_POOLED, _PLACES = aten.max_pool2d_with_indices.default(_PICTURE, [2, 2])
_Q, _K, _V = (g(2, 2, 5, 4, seed=seed) for seed in (1, 2, 3))
_ATTENDED, _LOGSUMEXP = aten._scaled_dot_product_flash_attention_for_cpu.default(_Q, _K, _V)
_STATISTICS = (g(3, seed=1), g(3, seed=2), g(3, seed=3).square() + 1, g(3, seed=4), g(3, seed=5).square() + 1)

# By operator, the gradient and the other arguments.
CALLS: dict[OpOverload, tuple[Any, ...]] = {
    aten._adaptive_avg_pool2d_backward.default: (g(2, 3, 2, 2), _PICTURE),
    aten._log_softmax_backward_data.default: (g(2, 3, 4), g(2, 3, 4, seed=1), 1, torch.float32),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        *(g(2, 2, 5, 4), _Q, _K, _V, _ATTENDED, _LOGSUMEXP, 0.0, False),
    ),
    aten._softmax_backward_data.default: (g(2, 3, 4), g(2, 3, 4, seed=1).softmax(1), 1, torch.float32),
    aten._to_copy.default: (g(2, 3, 4),),
    aten.addmm.default: (g(3, 4), g(3, 2), g(2, 4)),
    aten.avg_pool2d_backward.default: (g(2, 3, 3, 3), _PICTURE, [2, 2], [2, 2], [0, 0], False, True, None),
    aten.baddbmm.default: (g(2, 3, 4), g(2, 3, 5), g(2, 5, 4)),
    aten.bmm.default: (g(2, 3, 4), g(2, 4, 5)),
    aten.cat.default: ([g(2, 3, 4), g(2, 3, 4, seed=1)], 1),
    aten.clone.default: (g(2, 3, 4),),
    aten.constant_pad_nd.default: (g(2, 3, 4), [-1, 2]),
    aten.convolution_backward.default: (
        *(g(2, 4, 4, 4), _PICTURE, g(4, 3, 3, 3), [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3),
    ),
    aten.cumsum.default: (g(2, 3, 4), 1),
    aten.embedding_dense_backward.default: (g(2, 3, 4), i(2, 3, below=5), 5, -1, False),
    aten.flip.default: (g(2, 3, 4), [0, 2]),
    aten.gather.default: (g(2, 3, 4), 1, i(2, 3, 4, below=3)),
    aten.index.Tensor: (g(2, 3, 4), [None, i(5, below=3)]),
    aten.index_add.default: (g(2, 3, 4), 1, i(5, below=3), g(2, 5, 4, seed=1)),
    aten.index_put.default: (g(2, 3, 4), [None, i(5, below=3)], g(2, 5, 4, seed=1), True),
    aten.index_select.default: (g(2, 3, 4), 1, i(5, below=3)),
    aten.max_pool2d_with_indices_backward.default: (
        *(torch.ones_like(_POOLED) * 3, _PICTURE, [2, 2], [2, 2], [0, 0], [1, 1], False, _PLACES),
    ),
    aten.mean.default: (g(2, 3, 4),),
    aten.mean.dim: (g(2, 3, 4), [1]),
    aten.mm.default: (g(3, 4), g(4, 5)),
    aten.native_batch_norm_backward.default: (g(2, 3, 4), g(2, 3, 4, seed=1), *_STATISTICS, True, 1e-5, [True] * 3),
    aten.native_layer_norm_backward.default: (
        *(g(2, 3, 4), g(2, 3, 4, seed=1), [4], g(2, 3, 1), g(2, 3, 1, seed=2), g(4), g(4, seed=2), [True] * 3),
    ),
    aten.new_zeros.default: (g(2, 3, 4), [2, 5]),
    aten.repeat.default: (g(2, 3, 4), [2, 1, 3]),
    aten.roll.default: (g(2, 3, 4), [1, 2], [0, 1]),
    aten.scatter.src: (g(2, 3, 4), 1, torch.arange(3).view(1, 3, 1).expand(2, 3, 4), g(2, 3, 4, seed=1)),
    aten.scatter_add.default: (g(2, 3, 4), 1, i(2, 5, 4, below=3), g(2, 5, 4, seed=1)),
    aten.select_backward.default: (g(2, 3, 4), [2, 5, 3, 4], 1, 2),
    aten.slice_backward.default: (g(2, 3, 4), [2, 7, 4], 1, 1, 6, 2),
    aten.sum.default: (g(2, 3, 4),),
    aten.sum.dim_IntList: (g(2, 3, 4), [1]),
    aten.tril.default: (g(2, 3, 4),),
    aten.triu.default: (g(2, 3, 4), 1),
    aten.upsample_bilinear2d_backward.default: (g(2, 3, 12, 12), [12, 12], [2, 3, 6, 6], False),
    aten.upsample_nearest2d_backward.default: (g(2, 3, 12, 12), [12, 12], [2, 3, 6, 6]),
    aten.zeros_like.default: (g(2, 3, 4),),
    aten._prelu_kernel_backward.default: (g(2, 3, 4), g(2, 3, 4, seed=1), g(1, 3, 1, seed=2)),
    aten._softmax.default: (g(2, 3, 4), 1, False),
    aten.amax.default: (g(2, 3, 4), [1]),
    aten.binary_cross_entropy_backward.default: (
        g(2, 3, 4),
        g(2, 3, 4, seed=1).sigmoid(),
        g(2, 3, 4, seed=2).sigmoid(),
    ),
    aten.copy.default: (g(2, 3, 4), g(2, 3, 4, seed=1)),
    aten.diagonal_backward.default: (g(2, 3), [2, 4, 3], 0, 1, 2),
    aten.diagonal_scatter.default: (g(2, 3, 4), g(2, 3, seed=1), 0, 1, 2),
    aten.dot.default: (g(5), g(5, seed=1)),
    aten.elu_backward.default: (g(2, 3, 4), 1.0, 1.0, 1.0, False, g(2, 3, 4, seed=1)),
    aten.fill.Scalar: (g(2, 3, 4), 2.0),
    aten.full_like.default: (g(2, 3, 4), 2.0),
    aten.glu_backward.default: (g(2, 2, 4), g(2, 4, 4, seed=1), 1),
    aten.hardsigmoid_backward.default: (g(2, 3, 4), g(2, 3, 4, seed=1)),
    aten.hardswish_backward.default: (g(2, 3, 4), g(2, 3, 4, seed=1)),
    aten.hardtanh_backward.default: (g(2, 3, 4), g(2, 3, 4, seed=1), -1.0, 1.0),
    aten.huber_loss_backward.default: (g(2, 3, 4), g(2, 3, 4, seed=1), g(2, 3, 4, seed=2), 0, 1.0),
    aten.leaky_relu_backward.default: (g(2, 3, 4), g(2, 3, 4, seed=1), 0.1, False),
    aten.linalg_vector_norm.default: (g(2, 3, 4), 2, [1]),
    aten.log_sigmoid_backward.default: (g(2, 3, 4), _X, aten.log_sigmoid_forward.default(_X)[1]),
    aten.masked_scatter.default: (g(2, 3, 4), g(2, 3, 4, seed=1) > 0, g(30, seed=2)),
    aten.mish_backward.default: (g(2, 3, 4), g(2, 3, 4, seed=1)),
    aten.mse_loss_backward.default: (g(2, 3, 4), g(2, 3, 4, seed=1), g(2, 3, 4, seed=2), 0),
    aten.mv.default: (g(3, 4), g(4, seed=1)),
    aten.new_full.default: (g(2, 3, 4), [2, 5], 3.0),
    aten.new_ones.default: (g(2, 3, 4), [2, 5]),
    aten.ones_like.default: (g(2, 3, 4),),
    aten.select_scatter.default: (g(2, 3, 4), g(2, 4, seed=1), 1, 2),
    aten.slice_scatter.default: (g(2, 3, 4), g(2, 2, 4, seed=1), 1, 1, 3),
    aten.smooth_l1_loss_backward.default: (g(2, 3, 4), g(2, 3, 4, seed=1), g(2, 3, 4, seed=2), 0, 1.0),
    aten.softplus_backward.default: (g(2, 3, 4), g(2, 3, 4, seed=1), 1.0, 20.0),
    aten.unfold_backward.default: (g(2, 3, 4), [2, 8], 1, 4, 2),
    aten.var.correction: (g(2, 3, 4), [1]),
}

# The values of these do not matter.
EMPTY = {aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default}


def layouts(value: Any) -> list[Any]:
    """Return a tensor with its dims in other memory orders."""
    if isinstance(value, list):
        return [list(each) for each in zip(*map(layouts, value))]
    dims = range(value.dim())
    orders = [tuple(dims), tuple(reversed(dims)), (*dims[1:], 0)]
    return [value.permute(o).contiguous().permute(sorted(dims, key=o.__getitem__)) for o in orders]


def test_each_operator_has_a_call() -> None:
    assert {*CALLS, *EMPTY} == ANY_STRIDES


@pytest.mark.parametrize("operator", CALLS, ids=str)
def test_results_do_not_depend_on_strides(operator: OpOverload) -> None:
    given, *rest = CALLS[operator]
    first, *others = (operator(value, *rest) for value in layouts(given))
    if isinstance(given, list) or given.dim() > 1:
        assert len({str(value) for value in map(_strides, layouts(given))}) > 1
    for other in others:
        torch.testing.assert_close(other, first)


@pytest.mark.parametrize("operator", CALLS, ids=str)
def test_expanded_gradients_are_as_good(operator: OpOverload) -> None:
    """The gradient of a sum has strides of 0."""
    given, *rest = CALLS[operator]
    full = [torch.ones_like(each) for each in given] if isinstance(given, list) else torch.ones_like(given)
    expanded = [_expanded(each) for each in full] if isinstance(full, list) else _expanded(full)
    torch.testing.assert_close(operator(expanded, *rest), operator(full, *rest))


def _expanded(like: Tensor) -> Tensor:
    return torch.ones(()).expand_as(like)


def _strides(value: Any) -> Any:
    return [each.stride() for each in value] if isinstance(value, list) else value.stride()
