"""Reduce-scatter as all-to-all and a local sum, where the plan says that it is cheaper.

    %r = reduce_scatter_tensor(%g, avg, 2, shard)      %r = all_to_all_single(%g, [n, n], [n, n], shard)
    %w = wait_tensor(%r)                               %w = wait_tensor(%r)
                                                       %s = pair_sum(%w, avg)

Gloo runs a reduce-scatter as one all-reduce for each rank. On two ranks the sum of two has the same bits in either
order; on more it would have to be taken in gloo's order, so there it is not done.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from graphshard.ir.graph import REDUCES, WAIT, c10d, fake
from graphshard.ir.plan import EXCHANGE_RANKS
from graphshard.ir.program import Phase

EXCHANGE = c10d.all_to_all_single.default


def exchange_reductions(phase: Phase) -> None:
    """Rewrite the reductions that are marked `exchanged`, in place; their group is the last argument."""
    graph = phase.module.graph
    for node in list(graph.nodes):
        if node.target not in REDUCES or not node.meta.get("exchanged"):
            continue
        gradient, op, size, group = node.args
        assert isinstance(gradient, Node)
        assert size == EXCHANGE_RANKS
        (wait,) = (user for user in node.users if user.target is WAIT)
        rows = fake(node).shape[0]
        node.target, node.args = EXCHANGE, (gradient, [rows] * EXCHANGE_RANKS, [rows] * EXCHANGE_RANKS, group)
        node.meta["val"] = fake(gradient)
        with graph.inserting_after(wait):
            total = graph.call_function(pair_sum)
        total.meta.update(wait.meta)
        wait.replace_all_uses_with(total)
        total.args = (wait, op)
        wait.meta["val"] = fake(gradient)


def pair_sum(parts: torch.Tensor, op: str) -> torch.Tensor:
    """The sum, or with "avg" the mean, of the two halves along dim 0."""
    first, second = parts.chunk(EXCHANGE_RANKS)
    total = first + second
    return total.div_(EXCHANGE_RANKS) if op == "avg" else total
