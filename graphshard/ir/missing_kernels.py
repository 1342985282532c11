"""Shapes of results for operators that torch does not know without their values, or without a GPU.

Of some operators that only CUDA has torch finds out the shapes by running them, where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphshard.torch_compat.operators import OpOverload
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
