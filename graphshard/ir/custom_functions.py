"""Functions of the user (`torch.autograd.Function`) that Dynamo has traced, run by eager operators.

torch runs the graph of a backward without gradients, on what forward has saved without a graph: gradients of its
results would silently be missing. Here autograd differentiates it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.fx import GraphModule


def apply_function(forward: GraphModule, backward: GraphModule, *inputs: Any, **described: Any) -> Any:
    """Call a function of the user.

    Args:
        described: places of results that are written inputs, or that have no gradient; whether it is differentiable
            only `once`.
    """
    return _CustomFunction.apply(forward, backward, described, *inputs)


class _CustomFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: GraphModule, backward: GraphModule, described: dict[str, Any], *inputs: Any) -> Any:
        results, saved = forward(*inputs)
        listed = results if isinstance(results, (tuple, list)) else (results,)
        ctx.mark_dirty(*(listed[place] for place in described.get("dirty_idx", ())))
        ctx.mark_non_differentiable(*(listed[place] for place in described["non_differentiable_idx"]))
        ctx.save_for_backward(*(each for each in saved if isinstance(each, torch.Tensor)))
        ctx.saved = [None if isinstance(each, torch.Tensor) else each for each in saved]

        def run(_: Any, *values: Any) -> Any:
            return backward(*values)

        ctx.run = once_differentiable(run) if described["once"] else run
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tensors = iter(ctx.saved_tensors)
        saved = [next(tensors) if each is None else each for each in ctx.saved]
        found = ctx.run(None, *grads, *saved)
        return (None, None, None, *(found if isinstance(found, (tuple, list)) else (found,)))
