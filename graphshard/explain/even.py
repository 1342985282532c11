"""Sizes that depend on values, for estimates: experts get equally many tokens, and ranks send and receive as many.

exchanged(f32[24, 8], [u0, u1], [u2, u3], ep) -> f32[u0 + u1, 8]        12 from each of two ranks
split_with_sizes(f32[u0 + u1, 8], [u4, u5])                             12 for each of two experts
"""

from __future__ import annotations

from torch.fx import Graph

from graphshard.ir.graph import aten, fake
from graphshard.ir.operators import EXCHANGED
from graphshard.torch_compat.symbolic_sizes import assume_total, hint


def assume_even(graph: Graph) -> None:
    """Let estimates assume of a graph's exchanges and splits that parts are equal."""
    for node in graph.nodes:
        if node.target is EXCHANGED:
            given, made = fake(node.all_input_nodes[0]).shape[0], fake(node).shape[0]
            assume_total([given], hint(made))
            assume_total([made], hint(given))
        elif node.target is aten.split_with_sizes.default:
            dim = node.args[2] if len(node.args) > 2 else 0
            parts = [part.shape[dim] for part in node.meta["val"]]
            assume_total(parts, hint(fake(node.all_input_nodes[0]).shape[dim]))
