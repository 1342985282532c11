"""Checkpointed regions of a joint graph, which backward recomputes, as marks for the partitioner.

meta["ac_graph_id"]   region of a forward node
meta["recompute"]     RECOMPUTE or SAVE, torch's `CheckpointPolicy`
meta["random_state"]  input of backward that is a generator state, to repeat random draws
meta["in_forward"]    value that forward computes although only backward needs it
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from graphshard.errors import GraphBreak
from graphshard.ir.graph import base_of, is_backward, is_part, with_parts
from graphshard.ir.program import Phase, Slot
from graphshard.torch_compat.aot_autograd import CheckpointPolicy
from graphshard.torch_compat.autograd_state import saved_tensors_hooks

# Number of times that eager mode recomputes a node in backward.
REPEATED = "graphshard_repeated"
# Region that a backward node belongs to.
BACKWARD_OF = "graphshard_backward_of"
RANDOM_STATE = "random_state"
IN_FORWARD = "in_forward"
RECOMPUTE, SAVE = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE


def leaving(graph: Graph, regions: Mapping[Node, int]) -> set[Node]:
    """Return the operators of regions whose results are read outside in forward; `regions` adds to the marked ones."""

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
    """Mark values that leave a region as saved, so that one region is not recomputed for another.

    The partitioner would otherwise treat them as recomputed, and go back through region after region.
    """
    for maker in leaving(graph, {}):
        for node in with_parts(maker):
            node.meta["recompute"] = SAVE


def maker_of(node: Node) -> Node:
    """Return the operator that computes a value, through views and `getitem`s."""
    node = base_of(node)
    while is_part(node):
        node = base_of(node.all_input_nodes[0])
    return node


def is_in_checkpoint() -> bool:
    """Return whether a region of torch.utils.checkpoint, which backward will recompute, is running."""
    return _saving_hook("_checkpoint_hook") is not None


def is_recomputing() -> bool:
    """Return whether backward is recomputing such a region."""
    return _saving_hook("_recomputation_hook") is not None


def checkpoint_region() -> Any:
    """Return torch's frame of the running region, whose `recompute_fn` backward calls; None outside of one."""
    hook = _saving_hook("_checkpoint_hook")
    return None if hook is None else inspect.getclosurevars(hook).nonlocals["frame"]


def _saving_hook(owner: str) -> Callable[..., Any] | None:
    """Return the pack hook for saved tensors if it belongs to this class of torch.utils.checkpoint."""
    hooks = saved_tensors_hooks() if torch.is_grad_enabled() else None
    return hooks[0] if hooks is not None and getattr(hooks[0], "__qualname__", "").startswith(owner) else None


aten = torch.ops.aten


def write_again(phase: Phase, label: str) -> dict[str, tuple[str, ...]]:
    """Repeat in backward the writes of checkpointed regions to buffers, as eager mode does.

    Return the buffers, each with the outputs any of which leads backward through the region. Raise GraphBreak if the
    buffer, or gradients, would differ from eager mode.
    """
    sources = {slot.name: node for node, slot in phase.slot_of().items() if slot.kind == "buffer"}
    written: dict[str, Node] = {}
    path: set[Node] = set()
    for value, slot in zip(phase.results, phase.outputs, strict=True):
        is_buffer = slot.kind == "mutation" and slot.of == "buffer" and slot.name in sources
        if is_buffer and isinstance(value, Node):
            writes = _repeated_writes(sources[slot.name], value, slot.name, label)
            if writes:
                path |= writes
                written[slot.name] = value
    if not path:
        return {}
    through = {name: _through(phase, value.meta["ac_graph_id"]) for name, value in written.items()}
    copied: dict[Node, Node] = {}
    for name in written:  # partitioners recognize inputs of backward by their names
        buffer, stem = sources[name], f"tangents_late_{name.replace('.', '_')}"
        copied[buffer] = phase.add_input(stem, Slot("late", name), buffer.meta["val"])
        copied[buffer].meta["partitioner_tag"] = "is_backward"
    for node in sorted(path):
        first = next(n for n in node.graph.nodes if n.meta.get(BACKWARD_OF) == node.meta["ac_graph_id"])
        with node.graph.inserting_before(first):
            new = copied[node] = node.graph.node_copy(node, lambda n: copied.get(n, n))
        for mark in ("recompute", "ac_graph_id", REPEATED):
            new.meta.pop(mark, None)
        new.meta["partitioner_tag"] = "is_backward"
    phase.set_results([*phase.results, *(copied[value] for value in written.values())])
    phase.outputs = (*phase.outputs, *(Slot("mutation", name, "late") for name in written))
    return through


def overwritten_buffers(phase: Phase) -> tuple[str, ...]:
    """Return the buffers that forward writes to after it has read values that its results depend on."""
    outputs = {value for value, slot in zip(phase.results, phase.outputs, strict=True) if slot.kind == "output"}
    written = {slot.name for slot in phase.outputs if slot.kind == "mutation" and slot.of == "buffer"}
    read = {slot.name: node for node, slot in phase.slot_of().items() if slot.kind == "buffer" and slot.name in written}
    return tuple(name for name, node in read.items() if not outputs.isdisjoint([node, *_dependents(node)]))


def _through(phase: Phase, region: int) -> tuple[str, ...]:
    """Return the outputs whose gradients reach a region."""
    found = []
    for node, slot in phase.slot_of().items():
        if slot.kind == "tangent":
            known = {node}
            for other in phase.module.graph.nodes:
                if not known.isdisjoint(other.all_input_nodes):
                    known.add(other)
            if any(other.meta.get(BACKWARD_OF) == region for other in known):
                found.append(slot.name)
    return tuple(found)


def _repeated_writes(source: Node, value: Node, name: str, label: str) -> set[Node]:
    """Return the nodes between a buffer and its new value, if eager mode repeats them; else nothing."""
    dependents = _dependents(source)
    path = {node for node in dependents if node is value or value in _dependents(node)}
    repeated = {node.meta.get(REPEATED, 0) for node in path}
    if not any(repeated):
        return set()
    reason = None
    if len({node.meta.get("ac_graph_id") for node in path}) > 1:
        reason = "Several regions, or a region and other code, write it, and backward repeats that in another order"
    elif repeated != {1}:
        reason = "Backward repeats only a part of the write, or repeats it several times"
    # In training, the backward of batch norm receives running statistics and does not read them.
    elif any(
        is_backward(user) and user.target is not aten.native_batch_norm_backward.default
        for node in dependents
        for user in node.users
    ):
        reason = "Gradients depend on it, and backward would read the new value"
    if reason is not None:
        raise GraphBreak(
            f"{label}.forward",
            f"A region of torch.utils.checkpoint writes buffer {name}, which eager mode repeats in backward. {reason}.",
            "Move the write to the buffer out of the checkpoint.",
        )
    return path


def _dependents(source: Node) -> list[Node]:
    """Return the forward calls that depend on a value, in order."""
    known, found = {source}, []
    for node in source.graph.nodes:
        depends = not known.isdisjoint(node.all_input_nodes)
        if node.op == "call_function" and depends and not is_backward(node) and not _is_of_batch(node):
            known.add(node)
            found.append(node)
    return found


def _is_of_batch(node: Node) -> bool:
    """Return whether a node is a result of batch norm in training that does not depend on running statistics."""
    maker = node.args[0] if is_part(node) else None
    functional = aten._native_batch_norm_legit_functional.default
    return isinstance(maker, Node) and maker.target is functional and node.args[1] in (0, 1, 2)
