"""Shapes and strides of fake results where torch has no rule, needs a GPU, or differs from the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphshard.ir.gpus import is_pretended
from graphshard.torch_compat.fake_tensors import FakeTensorMode
from graphshard.torch_compat.symbolic_sizes import new_unknown_size
from graphshard.torch_compat.torch_ops import (
    OpOverload,
    compute_elementwise_output_strides,
    make_channels_last_strides_for,
    make_contiguous_strides_for,
    pytree,
    suggest_memory_format,
)

aten = torch.ops.aten


def _ctc_loss(mode: Any, _: Any, log_probs: torch.Tensor, *rest: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    """Return losses and saved values; the length of the longest target is data-dependent."""
    time, batch, _ = log_probs.shape
    with mode:
        return log_probs.new_empty([batch]), log_probs.new_empty([batch, time, new_unknown_size(mode)])


def _loss_backward(mode: Any, _: Any, grad: torch.Tensor, scores: torch.Tensor, *rest: Any) -> torch.Tensor:
    with mode:
        return torch.empty_like(scores, memory_format=torch.contiguous_format)


MISSING: dict[OpOverload, Callable[..., Any]] = {
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.Tensor: _loss_backward,
    aten.multi_margin_loss_backward.default: _loss_backward,
    aten.multilabel_margin_loss_backward.default: _loss_backward,
}


def _grid_sampler(mode: Any, _: Any, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    with mode:
        return x.new_empty([*x.shape[:2], *grid.shape[1:3]])


def _grid_sampler_backward(
    mode: Any, _: Any, x: torch.Tensor, grid: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    with mode:
        return x.new_empty(x.shape), grid.new_empty(grid.shape)


# Reset gate, update gate, new state, old state, and the contribution of the old state to the new one.
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
    """Return False: MIOpen is AMD's, and cuDNN requires targets on the host, or 32-bit integers in one row."""
    return False


# For tracing with a GPU that is absent: torch would run the kernel to find the shape.
WITHOUT_GPU: dict[OpOverload, Callable[..., Any]] = {
    aten.cudnn_grid_sampler.default: _grid_sampler,
    aten.cudnn_grid_sampler_backward.default: _grid_sampler_backward,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten._use_cudnn_ctc_loss.default: _no_library,
    aten._use_cudnn_ctc_loss.Tensor: _no_library,
}
# Only some releases of torch also query AMD's library.
if hasattr(aten, "_use_miopen_ctc_loss"):
    WITHOUT_GPU |= dict.fromkeys((aten._use_miopen_ctc_loss.default, aten._use_miopen_ctc_loss.Tensor), _no_library)


def missing_kernels() -> dict[OpOverload, Callable[..., Any]]:
    """Return the kernels for fake tensors that torch lacks here."""
    return MISSING | WITHOUT_GPU if is_pretended() else MISSING


def _like(index: int) -> Callable[..., Any]:
    """Return a rule: channels-last if the argument at `index` is, else contiguous."""

    def strides(shape: torch.Size, args: Any) -> Any:
        if suggest_memory_format(args[index]) is torch.contiguous_format:
            return make_contiguous_strides_for(shape)
        return make_channels_last_strides_for(shape)

    return strides


def _contiguous(shape: torch.Size, args: Any) -> Any:
    return make_contiguous_strides_for(shape)


def _elementwise(shape: torch.Size, args: Any) -> Any:
    """Return the strides that TensorIterator chooses, by the strides of the inputs in order."""
    return compute_elementwise_output_strides(*(arg.expand(shape) for arg in args if isinstance(arg, torch.Tensor)))


# Operators whose fake results have other strides than the CPU kernels' results.
_ON_CPU: dict[OpOverload, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            *(aten.native_batch_norm.default, aten._native_batch_norm_legit.default),
            *(aten._native_batch_norm_legit.no_stats, aten._native_batch_norm_legit_functional.default),
            *(aten._native_batch_norm_legit_no_training.default, aten._batch_norm_with_update.default),
            *(aten._batch_norm_with_update_functional.default, aten._batch_norm_no_update.default),
            *(aten.reflection_pad2d.default, aten.reflection_pad3d.default, aten.replication_pad3d.default),
            *(aten.max_unpool2d.default, aten.channel_shuffle.default),
        ),
        _like(0),
    ),
    **dict.fromkeys(
        (
            *(aten.native_batch_norm_backward.default, aten.batch_norm_backward.default),
            *(aten.reflection_pad2d_backward.default, aten.reflection_pad3d_backward.default),
            *(aten.replication_pad2d_backward.default, aten.replication_pad3d_backward.default),
        ),
        _like(1),
    ),
    **dict.fromkeys(
        (
            *(aten.native_layer_norm_backward.default, aten._log_softmax_backward_data.default),
            *(aten.huber_loss_backward.default, aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default),
            *(aten.log_sigmoid_forward.default, aten.normal.Tensor_Tensor),
        ),
        _contiguous,
    ),
    aten.binary_cross_entropy.default: lambda shape, args: compute_elementwise_output_strides(args[0]),
    aten.binary_cross_entropy_backward.default: lambda shape, args: compute_elementwise_output_strides(args[1]),
}
# The same on every device.
_ANYWHERE: dict[OpOverload, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            *(aten.copysign.Tensor, aten.div.Tensor_mode, aten.floor_divide.default, aten.hardswish_backward.default),
            *(aten.hardtanh_backward.default, aten.heaviside.default, aten.logaddexp.default, aten.logical_and.default),
            *(aten.logical_or.default, aten.logical_xor.default, aten.logit_backward.default),
            *(aten.native_dropout_backward.default, aten.special_xlog1py.default, aten.xlogy.Tensor),
        ),
        _elementwise,
    ),
    aten.pow.Scalar: _contiguous,
}
# With 16-bit dtypes, torch computes their fake results in float32 and loses strides of 0.
_IN_HALF = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
_RULED = {*_ON_CPU, *_ANYWHERE, *_IN_HALF}


def new_tracing_mode(sizes: ShapeEnv | None = None) -> FakeTensorMode:
    """Return a fake mode for tracing whose tensors have the strides of the kernels; `sizes` has known dynamic sizes."""
    env = ShapeEnv(tracked_fakes=[]) if sizes is None else sizes
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True, export=True)
    dispatch = mode.dispatch

    # Patch the instance, not a subclass: rules of higher-order operators are registered by the class of the mode.
    def dispatch_with_strides(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any = dispatch(func, types, args, kwargs)
        if func not in _RULED:
            return result
        return pytree.tree_map_only(torch.Tensor, lambda each: _laid_out(mode, func, args, each), result)

    mode.dispatch = dispatch_with_strides  # type: ignore[method-assign]
    return mode


def _laid_out(mode: FakeTensorMode, func: OpOverload, args: Any, result: torch.Tensor) -> torch.Tensor:
    """Return a result of an operator with the strides of its rule."""
    rule = _rule(func, result) if result.dim() >= 2 else None
    if rule is None:
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
