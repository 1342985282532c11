"""What operators with graphs run: the calls of their graphs, as often as they are run.

    map_impl(graph_3f0c, [f32[16, 8]], ...)     16 times the calls of graph_3f0c
    cond(pred, graph_3f0c, graph_81aa, ...)     the branch that has more calls
    while_loop(graph_3f0c, graph_81aa, ...)     once, as nobody knows how often

An attention of `flex_attention` is one kernel, for its calls are fused into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node

from graphshard.ir.subgraph import Subgraph, calls_in, is_higher_order, subgraphs_in
from graphshard.torch_compat.symbolic_sizes import hint

ATTENTIONS = (torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward)


def runs_graphs(node: Node) -> bool:
    """Return whether a node runs the calls of its graphs one after the other."""
    return node.target not in ATTENTIONS and is_higher_order(node)


def runs_of(node: Node) -> tuple[list[Subgraph], int]:
    """Return the graphs that a node runs, and how often each."""
    graphs = list(subgraphs_in(node))
    if node.target is torch.ops.higher_order.cond:
        return [max(graphs, key=lambda graph: len(graph.graph.nodes))], 1
    looped: Any = None
    if node.target is torch.ops.higher_order.scan:
        looped = node.args[2]
    elif node.target is torch.ops.higher_order.map_impl:
        looped = node.args[1]
    return graphs, int(hint(looped[0].meta["val"].shape[0])) if looped else 1


def calls_run(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield calls, with those of graphs in the place of the operators that run them."""
    for node in nodes:
        if node.op == "call_function" and runs_graphs(node):
            graphs, times = runs_of(node)
            calls = [call for graph in graphs for call in calls_run(calls_in(graph.graph))]
            for _ in range(times):
                yield from calls
        else:
            yield node
