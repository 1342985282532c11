"""Functions of the user (`torch.autograd.Function`) that Dynamo has traced: two graphs, which one operator calls.

When eager operators run a trace, autograd differentiates the backward again: torch would run its graph without
gradients, on what forward has saved without a graph, and gradients of its results would silently be missing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.fx import GraphModule, Node

APPLY = torch.ops.higher_order.autograd_function_apply


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


def separate_results(graph: GraphModule) -> None:
    """Copy results of functions that are the same tensor as an earlier result, in graphs within, too.

    Dynamo of torch 2.11 also returns what forward computes on the way, such as `y.mul_(2)` next to `y`. Autograd lost
    the gradient of tensors that are returned twice.
    """
    for module in [each for each in graph.modules() if isinstance(each, GraphModule)]:
        for call in module.graph.find_nodes(op="call_function", target=APPLY):
            forward: Any = module.get_submodule(call.args[0].target)
            output = forward.graph.output_node()
            results, *rest = output.args[0]
            seen: set[Node] = set()
            with forward.graph.inserting_before(output):
                for place, result in enumerate(results):
                    written = _written(result)
                    if written in seen:
                        copied = forward.graph.call_method("clone", (result,))
                        results = (*results[:place], copied, *results[place + 1 :])
                    seen.add(written)
            output.args = ((results, *rest),)
            forward.recompile()


def _written(node: Node) -> Node:
    """Return what is written by the methods that return a node."""
    while node.op == "call_method" and str(node.target).endswith("_") and isinstance(node.args[0], Node):
        node = node.args[0]
    return node
