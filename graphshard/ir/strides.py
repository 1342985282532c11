"""Restriding: change the strides of a value in a graph and propagate them to its users.

The strides of a gradient depend on what autograd sums. Reductions add in memory order, so strides affect the last bit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from graphshard.ir.graph import aten, following, is_communication, is_part, is_view, trace
from graphshard.ir.param_table import inverse_of, memory_order
from graphshard.ir.sizes import expression
from graphshard.torch_compat.torch_ops import OpOverload

# Operators that accept any strides, in addition to views and pointwise operators. Others may rely on strides that
# autograd guarantees: the kernel of native_group_norm_backward assumes contiguous input. `tests/ir/test_strides.py`
# tries each.
ANY_STRIDES = frozenset(
    {
        *(aten._adaptive_avg_pool2d_backward.default, aten._log_softmax_backward_data.default),
        *(aten._prelu_kernel_backward.default, aten._scaled_dot_product_flash_attention_for_cpu_backward.default),
        *(aten._softmax.default, aten._softmax_backward_data.default, aten._to_copy.default, aten.addmm.default),
        *(aten.amax.default, aten.avg_pool2d_backward.default, aten.baddbmm.default),
        *(aten.binary_cross_entropy_backward.default, aten.bmm.default, aten.cat.default, aten.clone.default),
        *(aten.constant_pad_nd.default, aten.convolution_backward.default, aten.copy.default, aten.cumsum.default),
        *(aten.diagonal_backward.default, aten.diagonal_scatter.default, aten.dot.default, aten.elu_backward.default),
        *(aten.embedding_dense_backward.default, aten.empty_like.default, aten.fill.Scalar, aten.flip.default),
        *(aten.full_like.default, aten.gather.default, aten.glu_backward.default, aten.hardsigmoid_backward.default),
        *(aten.hardswish_backward.default, aten.hardtanh_backward.default, aten.huber_loss_backward.default),
        *(aten.index.Tensor, aten.index_add.default, aten.index_put.default, aten.index_select.default),
        *(aten.leaky_relu_backward.default, aten.linalg_vector_norm.default, aten.log_sigmoid_backward.default),
        *(aten.masked_scatter.default, aten.max_pool2d_with_indices_backward.default, aten.mean.default, aten.mean.dim),
        *(aten.mish_backward.default, aten.mm.default, aten.mse_loss_backward.default, aten.mv.default),
        *(aten.native_batch_norm_backward.default, aten.native_layer_norm_backward.default, aten.new_empty.default),
        *(aten.new_empty_strided.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default),
        *(aten.ones_like.default, aten.repeat.default, aten.roll.default, aten.scatter.src, aten.scatter_add.default),
        *(aten.select_backward.default, aten.select_scatter.default, aten.slice_backward.default),
        *(aten.slice_scatter.default, aten.smooth_l1_loss_backward.default, aten.softplus_backward.default),
        *(aten.sum.default, aten.sum.dim_IntList, aten.tril.default, aten.triu.default, aten.unfold_backward.default),
        *(aten.upsample_bilinear2d_backward.default, aten.upsample_nearest2d_backward.default, aten.var.correction),
        aten.zeros_like.default,
    }
)
# Replaced by reshape if the strides do not allow a view.
_VIEWED = (aten.view.default, aten._unsafe_view.default)


def strides_without_gaps(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a copy of a tensor: its own if it is dense, else without gaps."""
    return torch.empty_like(tensor, device="meta").stride()


def restride(node: Node, value: torch.Tensor, free: Collection[Node] = ()) -> bool:
    """Give a node a fake value with other strides, and propagate these to its users; return whether this is possible.

    Communicated and returned values are copied to keep their strides; results that are `free` need not keep them.
    """
    values: dict[Node, Any] = {node: value}
    targets: dict[Node, Any] = {}
    keeping: list[Node] = []
    waiting = set(node.users)
    while waiting:
        node = node.next
        if node not in waiting:
            continue
        waiting.remove(node)
        if node.op == "output" or is_communication(node):
            keeping.append(node)
            continue
        if not _takes_any_strides(node):
            return False
        made = _made(node, node.target, values)
        if made is None and node.target in _VIEWED:
            targets[node] = aten.reshape.default
            made = _made(node, targets[node], values)
        if made is None or not _alike(made, node.meta["val"], strides=False):
            return False
        if not _alike(made, node.meta["val"]):
            values[node] = made
            waiting.update(node.users)
    before = {changed: changed.meta["val"] for changed in values}
    for changed, made in values.items():
        changed.meta["val"] = made
    for changed, target in targets.items():
        changed.target = target
    for user in keeping:
        for changed in filter(values.__contains__, user.all_input_nodes):
            if user.op == "output" and changed in free:
                continue
            user.replace_input_with(changed, laid_out(changed, memory_order(before[changed])))
    return True


def laid_out(node: Node, order: Sequence[int]) -> Node:
    """Insert a copy of a value with dims in this memory order; () is contiguous."""

    def copied(value: torch.Tensor) -> torch.Tensor:
        if not order:
            return value.clone(memory_format=torch.contiguous_format)
        return value.permute(*order).clone(memory_format=torch.contiguous_format).permute(inverse_of(order))

    return trace(following(node), copied, node, like=node)


def _takes_any_strides(node: Node) -> bool:
    if node.target is aten.as_strided.default:  # its arguments depend on the memory layout
        return False
    pointwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    return pointwise or is_part(node) or is_view(node) or node.target in ANY_STRIDES or node.target in _VIEWED


def _made(node: Node, target: Any, values: dict[Node, Any]) -> Any:
    """Return the result of a call for these fake values; None if it fails."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n] if n in values else n.meta["val"])
    try:
        return target(*args, **kwargs)
    except Exception:  # custom operators may raise anything
        return None


def _alike(one: Any, other: Any, *, strides: bool = True) -> bool:
    """Return whether fake values have equal shapes, dtypes and (optionally) strides."""
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(_alike(a, b, strides=strides) for a, b in zip(one, other))
    if not isinstance(one, torch.Tensor):
        return True
    sizes = (lambda t: (*t.shape, *t.stride())) if strides else (lambda t: t.shape)
    return one.dtype == other.dtype and [*map(expression, sizes(one))] == [*map(expression, sizes(other))]
