"""Regions of a joint graph that backward computes again, as marks for the partitioner.

meta["ac_graph_id"]   the region a node of the forward belongs to
meta["recompute"]     RECOMPUTE or SAVE, torch's own `CheckpointPolicy`
meta["random_state"]  an input of backward is the state of a generator, with which it draws again
meta["in_forward"]    forward computes a value that only backward needs
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from graphshard.ir.graph import base_of, is_backward, is_part, with_parts
from graphshard.torch_compat.aot_autograd import CheckpointPolicy
from graphshard.torch_compat.autograd_state import saved_tensors_hooks

# How often eager mode runs a node again in backward.
REPEATED = "graphshard_repeated"
# To which region a node of backward belongs.
BACKWARD_OF = "graphshard_backward_of"
RANDOM_STATE = "random_state"
IN_FORWARD = "in_forward"
RECOMPUTE, SAVE = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE


def leaving(graph: Graph, regions: Mapping[Node, int]) -> set[Node]:
    """The operators of regions whose results other nodes of the forward read; `regions` adds to the marked ones."""

    def region(node: Node) -> int | None:
        return node.meta.get("ac_graph_id", regions.get(node))

    found: set[Node] = set()
    for node in graph.nodes:
        own, maker = region(node), maker_of(node)
        users = (user for user in node.users if user.op == "call_function" and not is_backward(user))
        if own is not None and region(maker) == own and any(region(user) != own for user in users):
            found.add(maker)
    return found


def save_leaving(graph: Graph) -> None:
    """Save what leaves a region if backward needs it, so that no region is computed again for the sake of another.

    The partitioner would take such a value as computed again anyway, and go back through region after region.
    """
    for maker in leaving(graph, {}):
        for node in with_parts(maker):
            node.meta["recompute"] = SAVE


def maker_of(node: Node) -> Node:
    """The operator that computes a value, behind views of it and the selection of one of several results."""
    node = base_of(node)
    while is_part(node):
        node = base_of(node.all_input_nodes[0])
    return node


def is_in_checkpoint() -> bool:
    """Return whether a region of torch.utils.checkpoint runs now that backward will run again."""
    return _saving_hook("_checkpoint_hook") is not None


def is_recomputing() -> bool:
    """Return whether backward runs such a region again now."""
    return _saving_hook("_recomputation_hook") is not None


def checkpoint_region() -> Any:
    """Torch's record of the region that runs now, whose `recompute_fn` backward calls; None outside of one."""
    hook = _saving_hook("_checkpoint_hook")
    return None if hook is None else inspect.getclosurevars(hook).nonlocals["frame"]


def _saving_hook(owner: str) -> Callable[..., Any] | None:
    """What is done with tensors that backward needs, if this class of torch.utils.checkpoint does it."""
    hooks = saved_tensors_hooks() if torch.is_grad_enabled() else None
    return hooks[0] if hooks is not None and getattr(hooks[0], "__qualname__", "").startswith(owner) else None
