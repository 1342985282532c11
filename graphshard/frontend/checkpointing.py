"""Checkpointed regions of the joint graph, from torch's marks to the partitioner's.

Dynamo keeps `torch.utils.checkpoint` as an operator with a graph. AOTAutograd marks the nodes of such a graph with the
region (`ac_graph_id`) and with what the policy of a selective checkpoint says of them (`recompute`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from graphshard.ir.errors import CaptureError
from graphshard.ir.graph import is_backward, is_part
from graphshard.ir.recomputed import BACKWARD_OF, RECOMPUTE, REPEATED, SAVE, maker_of, save_leaving
from graphshard.ir.torch_internals import CheckpointPolicy

_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def mark_regions(graph: Graph, traced: GraphModule) -> None:
    """Make each operator of a region saved or recomputed for certain, as eager mode does; in place.

    Torch's partitioner may save what a full checkpoint merely prefers to recompute. What leaves a region is saved.
    Torch counts regions in the process; here they are counted in the graph, so that equal traces have equal graphs.

    Args:
        traced: by Dynamo, with a graph for each region.
    """
    known = sorted({node.meta["ac_graph_id"] for node in graph.nodes if "ac_graph_id" in node.meta})
    for node in graph.nodes:
        if "ac_graph_id" in node.meta and not is_backward(node):
            node.meta["ac_graph_id"] = known.index(node.meta["ac_graph_id"])
            node.meta["recompute"] = SAVE if node.meta.get("recompute") in _SAVED else RECOMPUTE
        else:
            node.meta.pop("recompute", None)
            node.meta.pop("ac_graph_id", None)
    _count_repeats(graph, traced)
    save_leaving(graph)


def _count_repeats(graph: Graph, traced: GraphModule) -> None:
    """Mark what eager mode runs again in backward, and backward's nodes with the region that they belong to.

    Eager mode stops to run a region again where autograd has saved the last of its tensors, unless it is reentrant.
    Autograd's numbers tell which node of forward has saved what a node of backward reads.

    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if not any("ac_graph_id" in node.meta for node in calls):
        return
    place = {node: index for index, node in enumerate(calls)}
    # Operators without a gradient have the number of the last one with a gradient before them.
    first: dict[int, Node] = {}
    for node in calls:
        first.setdefault(node.meta.get("seq_nr", 0), node)
    last_saved: dict[int, int] = {}
    for node in filter(is_backward, calls):
        saved_by = first[node.meta.get("seq_nr", 0)]
        region = saved_by.meta.get("ac_graph_id")
        if region is not None and not is_backward(saved_by):
            node.meta[BACKWARD_OF] = region
            if not all(map(is_backward, node.all_input_nodes)):
                last_saved[region] = max(last_saved.get(region, -1), place[saved_by])
    regions = sorted({node.meta["ac_graph_id"] for node in calls if "ac_graph_id" in node.meta})
    whole = dict(zip(regions, _run_to_the_end(traced, len(regions)) if last_saved else (), strict=bool(last_saved)))
    for node in calls:
        region = node.meta.get("ac_graph_id")
        if region in last_saved and node.meta["recompute"] != SAVE:
            maker = maker_of(node) if is_part(node) else node
            if whole[region] or place[maker] <= last_saved[region]:
                node.meta[REPEATED] = 1


def _run_to_the_end(traced: GraphModule, num_regions: int) -> list[bool]:
    """Return for each region whether eager mode runs all of it again, in the order in which they run."""
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    regions = [node for node in _calls(traced) if node.target is checkpoint]
    found = [bool(node.kwargs.get("use_reentrant")) or node.kwargs.get("early_stop") is False for node in regions]
    if len(found) != num_regions:  # some compute nothing; which is only known if all are alike
        if len(set(found)) > 1:
            raise CaptureError(
                "graphshard cannot capture checkpoints of which some are reentrant, some are not, and some compute "
                "nothing. Give all of them use_reentrant=False."
            )
        found = [found[0]] * num_regions
    return found


def _calls(traced: GraphModule) -> Iterator[Node]:
    """Yield the calls of a graph and of those that it calls, in the order in which they run."""
    for node in traced.graph.nodes:
        yield node
        for read in node.all_input_nodes if node.op == "call_function" else ():
            if read.op == "get_attr" and isinstance(body := traced.get_submodule(str(read.target)), GraphModule):
                yield from _calls(body)
