"""Graphs of higher-order operators, from attributes of the captured module to arguments of its nodes."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from graphshard.ir.errors import CaptureError
from graphshard.ir.graph import is_random
from graphshard.ir.operators import NAMING_GROUPS
from graphshard.ir.printer import print_graph
from graphshard.ir.subgraph import Subgraph, calls_in, subgraph_of, take_attributes

# What nodes of subgraphs keep besides their operators.
_KEPT = ("val",)


def lift_subgraphs(module: GraphModule) -> None:
    """Make each graph that a higher-order operator is given an argument of its node, in place.

    Raises:
        CaptureError: a graph has a collective, draws random numbers, or holds a tensor.
    """
    found: dict[str, Subgraph] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        attribute = getattr(module, str(node.target))
        if isinstance(attribute, GraphModule) and node.target not in found:
            operator = next(iter(node.users)).target if node.users else None
            found[str(node.target)] = _subgraph(attribute, getattr(operator, "__name__", str(operator)))
    take_attributes(module, found)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        node.args = (node.args[0], str(node.args[0]), *node.args[2:])  # its name for the graph is one of this process


def _subgraph(module: GraphModule, operator: str) -> Subgraph:
    lift_subgraphs(module)
    for node in module.graph.find_nodes(op="get_attr"):
        _inline_constant(module, node, operator)
    for node in calls_in(module.graph):
        _check(node, operator)
    graph = module.graph
    for node in graph.nodes:
        node.meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
    return subgraph_of(graph, print_graph)


def _inline_constant(module: GraphModule, node: Node, operator: str) -> None:
    value = getattr(module, str(node.target))
    if not isinstance(value, torch.Tensor) or value.dim() or not isinstance(node.meta.get("val", value), torch.Tensor):
        raise CaptureError(
            f"a graph that {operator} is given holds a tensor of shape {list(getattr(value, 'shape', []))}. Make it "
            "outside of the function that is passed, or register it as a buffer."
        )
    with module.graph.inserting_before(node):
        made = module.graph.call_function(
            torch.ops.aten.full.default, ([], value.item()), {"dtype": value.dtype, "device": value.device}
        )
    made.meta["val"] = node.meta.get("val")
    node.replace_all_uses_with(made)
    module.graph.erase_node(node)


def _check(node: Node, operator: str) -> None:
    target = node.target
    namespace = getattr(target, "namespace", "")
    if namespace in ("_c10d_functional", "c10d_functional", "_dtensor") or target in NAMING_GROUPS:
        raise CaptureError(
            f"a function that is passed to {operator} has the collective {target}, which ranks would have to run "
            "together. Move it out of the function."
        )
    if is_random(node):
        raise CaptureError(
            f"a function that is passed to {operator} draws random numbers by {target}. Its backward computes the "
            "function again, and would draw others: draw them before, and pass them as an operand."
        )
