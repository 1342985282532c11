"""Shapes of results for operators that torch does not know without their values, or without a GPU.

Of some operators that only CUDA has torch finds out the shapes by running them, where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphshard.torch_compat.fake_tensors import FakeTensorMode
from graphshard.torch_compat.operators import (
    OpOverload,
    compute_elementwise_output_strides,
    make_channels_last_strides_for,
    make_contiguous_strides_for,
    suggest_memory_format,
)
from graphshard.torch_compat.symbolic_sizes import new_unknown_size

aten = torch.ops.aten


def _ctc_loss(mode: Any, _: Any, log_probs: torch.Tensor, *rest: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    """Losses, and what backward needs: as long as the longest target, which is a value."""
    time, batch, _ = log_probs.shape
    with mode:
        return log_probs.new_empty([batch]), log_probs.new_empty([batch, time, new_unknown_size(mode)])


def _ctc_loss_backward(mode: Any, _: Any, grad: torch.Tensor, log_probs: torch.Tensor, *rest: Any) -> torch.Tensor:
    with mode:
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _margin_loss_backward(mode: Any, _: Any, grad: torch.Tensor, scores: torch.Tensor, *rest: Any) -> torch.Tensor:
    with mode:
        return torch.empty_like(scores, memory_format=torch.contiguous_format)


MISSING: dict[OpOverload, Callable[..., Any]] = {
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    aten.multi_margin_loss_backward.default: _margin_loss_backward,
    aten.multilabel_margin_loss_backward.default: _margin_loss_backward,
}


def _grid_sampler(mode: Any, _: Any, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    with mode:
        return x.new_empty([*x.shape[:2], *grid.shape[1:3]])


def _grid_sampler_backward(
    mode: Any, _: Any, x: torch.Tensor, grid: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    with mode:
        return x.new_empty(x.shape), grid.new_empty(grid.shape)


# The reset gate, the update gate, the new state, the old one, and the new state's part by the old one.
_GRU_WORKSPACE = 5


def _gru_cell(
    mode: Any, _: Any, of_input: torch.Tensor, of_state: torch.Tensor, state: torch.Tensor, *biases: Any
) -> tuple[torch.Tensor, ...]:
    rows, size = state.shape
    with mode:
        return state.new_empty([rows, size]), state.new_empty([rows, _GRU_WORKSPACE * size])


def _gru_cell_backward(
    mode: Any, _: Any, grad: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    rows, size = grad.shape
    with mode:
        gates = [workspace.new_empty([rows, 3 * size]) for _ in range(2)]
        biases = [workspace.new_empty([3 * size]) if has_bias else None for _ in range(2)]
        return *gates, grad.new_empty(grad.shape), *biases


def _no_library(mode: Any, _: Any, *given: Any, **named: Any) -> bool:
    """Whether a library computes a CTC loss.

    MIOpen is AMD's. cuDNN does if targets are on the host, which tensors of a captured forward are not, or if all are
    integers of 32 bits in one row; then the program has torch's own kernel all the same.
    """
    return False


# Of a GPU that is not here.
WITHOUT_GPU: dict[OpOverload, Callable[..., Any]] = {
    aten.cudnn_grid_sampler.default: _grid_sampler,
    aten.cudnn_grid_sampler_backward.default: _grid_sampler_backward,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten._use_cudnn_ctc_loss.default: _no_library,
    aten._use_cudnn_ctc_loss.Tensor: _no_library,
}
# Of releases of torch that ask for AMD's library, too.
if hasattr(aten, "_use_miopen_ctc_loss"):
    WITHOUT_GPU |= dict.fromkeys((aten._use_miopen_ctc_loss.default, aten._use_miopen_ctc_loss.Tensor), _no_library)


def _like(index: int) -> Callable[..., Any]:
    """Contiguous, or in the channels-last format if the argument at this index is."""

    def strides(shape: torch.Size, args: Any) -> Any:
        if suggest_memory_format(args[index]) is torch.contiguous_format:
            return make_contiguous_strides_for(shape)
        return make_channels_last_strides_for(shape)

    return strides


def _contiguous(shape: torch.Size, args: Any) -> Any:
    return make_contiguous_strides_for(shape)


def _elementwise(shape: torch.Size, args: Any) -> Any:
    """In the order of the tensors that have all dims, the first ones first, as TensorIterator decides it."""
    return compute_elementwise_output_strides(*(arg.expand(shape) for arg in args if isinstance(arg, torch.Tensor)))


# Rules of torch that lay out results in another way than kernels for the CPU do.
_ON_CPU: dict[OpOverload, Callable[..., Any]] = {
    aten.native_batch_norm.default: _like(0),
    aten._native_batch_norm_legit.default: _like(0),
    aten._native_batch_norm_legit.no_stats: _like(0),
    aten._native_batch_norm_legit_functional.default: _like(0),
    aten._native_batch_norm_legit_no_training.default: _like(0),
    aten._batch_norm_with_update.default: _like(0),
    aten._batch_norm_with_update_functional.default: _like(0),
    aten._batch_norm_no_update.default: _like(0),
    aten.native_batch_norm_backward.default: _like(1),
    aten.batch_norm_backward.default: _like(1),
    aten.native_layer_norm_backward.default: _contiguous,
    aten._log_softmax_backward_data.default: _contiguous,
    aten.binary_cross_entropy.default: lambda shape, args: compute_elementwise_output_strides(args[0]),
    aten.binary_cross_entropy_backward.default: lambda shape, args: compute_elementwise_output_strides(args[1]),
    aten.huber_loss_backward.default: _contiguous,
    aten.mse_loss_backward.default: _contiguous,
    aten.smooth_l1_loss_backward.default: _contiguous,
    aten.log_sigmoid_forward.default: _contiguous,
    aten.normal.Tensor_Tensor: _contiguous,
    aten.reflection_pad2d.default: _like(0),  # with torch 2.11
    aten.reflection_pad3d.default: _like(0),
    aten.replication_pad3d.default: _like(0),
    aten.reflection_pad2d_backward.default: _like(1),
    aten.reflection_pad3d_backward.default: _like(1),
    aten.replication_pad2d_backward.default: _like(1),
    aten.replication_pad3d_backward.default: _like(1),
    aten.max_unpool2d.default: _like(0),
    aten.channel_shuffle.default: _like(0),
}
# And those that do so on every device.
_ANYWHERE: dict[OpOverload, Callable[..., Any]] = {
    aten.copysign.Tensor: _elementwise,
    aten.div.Tensor_mode: _elementwise,
    aten.floor_divide.default: _elementwise,
    aten.hardswish_backward.default: _elementwise,
    aten.hardtanh_backward.default: _elementwise,
    aten.heaviside.default: _elementwise,
    aten.logaddexp.default: _elementwise,
    aten.logical_and.default: _elementwise,
    aten.logical_or.default: _elementwise,
    aten.logical_xor.default: _elementwise,
    aten.logit_backward.default: _elementwise,
    aten.native_dropout_backward.default: _elementwise,
    aten.pow.Scalar: _contiguous,
    aten.special_xlog1py.default: _elementwise,
    aten.xlogy.Tensor: _elementwise,
}
# For these torch computes fake results in float32 where the dtype has half the bits, and forgets strides of 0 first.
_IN_HALF = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
_RULED = {*_ON_CPU, *_ANYWHERE, *_IN_HALF}


def new_tracing_mode(sizes: ShapeEnv | None = None) -> FakeTensorMode:
    """Return a mode to trace a forward with, whose tensors have the strides of the kernels.

    Args:
        sizes: where dynamic sizes live that are known already.
    """
    env = ShapeEnv(tracked_fakes=[]) if sizes is None else sizes
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True, export=True)
    dispatch = mode.dispatch

    # Of the instance, not of a subclass: rules of higher-order operators are found by the class of the mode.
    def dispatch_with_strides(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any = dispatch(func, types, args, kwargs)
        if func not in _RULED:
            return result
        if isinstance(result, tuple):
            return tuple(_laid_out(mode, func, args, each) for each in result)
        return _laid_out(mode, func, args, result)

    mode.dispatch = dispatch_with_strides  # type: ignore[method-assign]
    return mode


def _laid_out(mode: FakeTensorMode, func: OpOverload, args: Any, result: torch.Tensor | None) -> torch.Tensor | None:
    """A result of an operator, or one that has the strides that it should have."""
    rule = None if result is None or result.dim() < 2 else _rule(func, result)
    if result is None or rule is None:
        return result
    with mode:
        stride = tuple(rule(result.shape, args))
        if stride == result.stride():
            return result
        return torch.empty_strided(result.shape, stride, dtype=result.dtype, device=result.device)


def _rule(func: OpOverload, result: torch.Tensor) -> Callable[..., Any] | None:
    if func in _IN_HALF:
        return _elementwise if result.dtype in (torch.bfloat16, torch.float16) else None
    if func in _ON_CPU:
        return _ON_CPU[func] if result.device.type == "cpu" else None
    return _ANYWHERE[func]
