"""Constants scattered into constants, which Inductor would write to memory and read again, as comparisons to fuse.

%full = full([rows, columns], 0)                        %columns = arange(columns)
%made = scatter.value(%full, 1, %index, -1)             %made = where(%index == %columns, -1, 0)

The gradient of a loss over a vocabulary is such a one: as many numbers as there are logits. torch.compile does the same
in a pass over the joint graph, which regions do not go through.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from graphshard.ir.graph import aten
from graphshard.ir.sizes import expression


def has_one_hots(graph: Graph) -> bool:
    """Whether a graph scatters a constant into a constant, one number to each row."""
    return any(map(_is_one_hot, graph.find_nodes(op="call_function", target=aten.scatter.value)))


class OneHots(Interpreter):
    """Runs a graph, to be traced again, with comparisons in the place of such scatters."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)

    def run_node(self, n: Node) -> Any:
        """Run an operator."""
        if n.target is not aten.scatter.value or not _is_one_hot(n):
            return super().run_node(n)
        full, dim, index, value = cast(Any, n.args)
        made, background = self.env[full], full.args[1]
        size = [1] * made.dim()
        size[dim] = made.shape[dim]
        places = torch.arange(made.shape[dim], device=made.device).view(size)
        return torch.where(self.env[index] == places, value, background).to(made.dtype)


def _is_one_hot(node: Node) -> bool:
    full, dim, index, _ = cast(Any, node.args)
    if not isinstance(full, Node) or full.target is not aten.full.default:
        return False
    made, chosen = ([expression(size) for size in each.meta["val"].shape] for each in (full, index))
    return bool(made) and chosen == [*made[:dim], 1, *made[dim % len(made) + 1 :]]
