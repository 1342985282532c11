"""Subgraphs: graph arguments of higher-order operators (`torch.cond`, `while_loop`, `scan`, `map`, `flex_attention`).

    %true = get_attr[true_graph_0]                      %8: (f32[4]) = cond(%5, graph_3f0c, graph_81aa, [%1, %2])
    %8 = cond(%5, %true, %false, (%1, %2))
                                                        graph_3f0c:  # argument of a call
                                                          %0: f32[4] = f32[4] (1)

In FX they are attributes of the module. Here each is an argument of the node, so a node can be copied to another graph,
moved to a region or written to a file without its module. Equal graphs have equal names. FX needs attributes to
generate Python code: `with_attributes` adds them.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from graphshard.torch_compat.torch_ops import HigherOrderOperator

# Supported operators with graph arguments, by name; torch 2.11 lacks some.
_NAMES = (
    *("cond", "while_loop", "while_loop_stack_output", "scan", "map_impl", "invoke_subgraph"),
    *("flex_attention", "flex_attention_backward"),
)
HIGHER_ORDER: dict[str, HigherOrderOperator] = {
    name: getattr(torch.ops.higher_order, name) for name in _NAMES if hasattr(torch.ops.higher_order, name)
}


@dataclass(frozen=True, repr=False)
class Subgraph:
    """Immutable graph argument of a higher-order operator.

    Attributes:
        name: identifier; equal graphs have equal names.
        text: printed graph.
        graph: the operator passes its placeholders; no node reads an attribute.
    """

    name: str
    text: str = field(compare=False)
    graph: Graph = field(compare=False)

    def __repr__(self) -> str:
        return self.name

    def __deepcopy__(self, memo: Any) -> Subgraph:
        return self

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    @functools.cached_property
    def module(self) -> GraphModule:
        """Module of the graph, with nested subgraphs as attributes."""
        return with_attributes(GraphModule(nn.Module(), copy.deepcopy(self.graph)))


def subgraph_of(graph: Graph, print_graph: Callable[..., str]) -> Subgraph:
    """Return the subgraph of a graph, with the text that `print_graph` gives."""
    inputs = [_input(node.meta.get("val")) for node in graph.find_nodes(op="placeholder")]
    results = graph.output_node().args[0]
    num_results = len(results) if isinstance(results, (tuple, list)) else 1
    text = print_graph(graph, inputs, [""] * num_results, canonical=True)
    return Subgraph(f"graph_{hashlib.sha256(text.encode()).hexdigest()[:12]}", text, graph)


def _input(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    stride = ", ".join(map(str, value.stride()))
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} ({stride}) {value.device.type}"


def is_higher_order(node: Node) -> bool:
    """Return whether a node calls an operator with subgraphs."""
    return isinstance(node.target, HigherOrderOperator) and any(True for _ in subgraphs_in(node))


def subgraphs_in(node: Node) -> Iterator[Subgraph]:
    """Yield the subgraph arguments of a node, in order, without nested ones."""
    found: list[Subgraph] = []
    map_aggregate((node.args, node.kwargs), lambda arg: found.append(arg) if isinstance(arg, Subgraph) else arg)
    yield from found


def subgraphs_of(graph: Graph) -> dict[str, Subgraph]:
    """Return the subgraphs of a graph by name, each before its nested ones."""
    found: dict[str, Subgraph] = {}
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            for subgraph in subgraphs_in(node):
                found.setdefault(subgraph.name, subgraph)
                found.update(subgraphs_of(subgraph.graph))
    return found


def calls_in(graph: Graph) -> list[Node]:
    """Return the calls of a graph, in order."""
    return [node for node in graph.nodes if node.op == "call_function"]


def with_attributes(module: GraphModule) -> GraphModule:
    """Return a module with subgraphs as attributes; the module itself if it has none."""
    if not subgraphs_of(module.graph):
        return module
    found = GraphModule(nn.Module(), copy.deepcopy(module.graph))
    give_attributes(found)
    found.recompile()
    return found


def give_attributes(module: GraphModule) -> dict[str, Subgraph]:
    """Turn subgraph arguments into attributes, in place; return them by name."""
    found: dict[str, Subgraph] = {}
    for node in list(module.graph.nodes):
        if isinstance(node.target, HigherOrderOperator):
            reads = {each: _read(module, node, each) for each in subgraphs_in(node)}
            found |= {each.name: each for each in reads}
            node.args, node.kwargs = map_aggregate(
                (node.args, node.kwargs),
                lambda arg: reads.get(arg, arg) if isinstance(arg, Subgraph) else arg,  # noqa: B023
            )
    return found


def _read(module: GraphModule, node: Node, subgraph: Subgraph) -> Node:
    setattr(module, subgraph.name, subgraph.module)
    with module.graph.inserting_before(node):
        read = module.graph.get_attr(subgraph.name)
    read.meta = {key: node.meta[key] for key in ("partitioner_tag",) if key in node.meta}
    return read


def take_attributes(module: GraphModule, known: Mapping[str, Subgraph]) -> None:
    """Turn attributes (`known`, by name) back into subgraph arguments, in place."""
    for node in list(module.graph.find_nodes(op="get_attr")):
        subgraph: Any = known.get(str(node.target))
        if subgraph is None:
            continue
        for user in list(node.users):
            given = user.args, user.kwargs
            user.args, user.kwargs = map_aggregate(given, lambda arg: subgraph if arg is node else arg)  # noqa: B023
        module.graph.erase_node(node)
    for name in known:
        if hasattr(module, name):
            delattr(module, name)
