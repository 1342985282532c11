"""Functions of the user in Dynamo's graph, whose gradients autograd differentiates again.

Dynamo traces forward and backward of a `torch.autograd.Function` as two graphs, which one operator calls. A function
that no trace looks into runs as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.autograd.function import once_differentiable
from torch.fx import GraphModule

from graphshard.frontend._opaque_functions import OpaqueFunction
from graphshard.ir.custom_functions import APPLY, apply_function
from graphshard.torch_compat.torch_ops import set_grad_enabled

# Where the decorator is that Dynamo has traced with the backward that it is on.
_DECORATOR = inspect.getsourcefile(once_differentiable) or ""


def differentiate_functions_again(graph: GraphModule) -> None:
    """Replace what calls functions of the user, in the graphs within a graph, too, in place."""
    for module in list(graph.modules()):
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.find_nodes(op="call_function", target=APPLY):
            backward = module.get_submodule(node.args[1].target)
            assert isinstance(backward, GraphModule)
            once = any(_DECORATOR in node.meta.get("stack_trace", "") for node in backward.graph.nodes)
            _leave_gradients_on(backward)
            node.target, node.kwargs = apply_function, {**node.kwargs, "once": once}
        for node in module.graph.nodes:
            if isinstance(node.target, OpaqueFunction):
                node.target = _as_it_is(node.target)
        module.recompile()


def _as_it_is(opaque: OpaqueFunction) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return opaque.function(*args, **kwargs)

    return run


def _leave_gradients_on(backward: GraphModule) -> None:
    """Erase Dynamo's lines around the graph of a backward that turn gradients off, and on again."""
    nodes = [node for node in backward.graph.nodes if node.op == "call_function"]
    for node in (nodes[0], nodes[-1]) if nodes else ():
        if node.target is set_grad_enabled:
            backward.graph.erase_node(node)
    backward.recompile()
