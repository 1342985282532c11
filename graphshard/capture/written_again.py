"""Buffers that a checkpointed region writes are written again when eager mode runs the region again, in backward.

    %new = add(%buffer, %mean)                %new = add(%buffer, %mean)
    return %new, ...                          %again = add(%new, %mean)
                                              return %again, ...

Recomputation gives the other operands the values that they had. Where it would not, because what backward needs depends
on the buffer, or where the order of several writes differs from eager mode's, there is an error.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from graphshard.capture.checkpoints import REPEATED
from graphshard.ir.errors import CaptureError
from graphshard.ir.graph import is_backward, is_part
from graphshard.ir.program import Phase

aten = torch.ops.aten


def write_again(phase: Phase, label: str) -> None:
    """Return, of buffers that a checkpointed region writes, what they are after eager mode's backward.

    Raises:
        CaptureError: what eager mode's backward makes of the buffer, or of gradients, would differ.
    """
    sources = {slot.name: node for node, slot in phase.slot_of().items() if slot.kind == "buffer"}
    results = phase.results
    copied: dict[Node, Node] = {}
    written: dict[int, Node] = {}
    path: set[Node] = set()
    for index, (value, slot) in enumerate(zip(results, phase.outputs, strict=True)):
        if slot.kind == "mutation" and slot.of == "buffer" and isinstance(value, Node):
            source = sources[slot.name]
            writes = _repeated_writes(source, value, slot.name, label)
            if writes:
                path |= writes
                copied[source] = written[index] = value
    if not path:
        return
    ordered = sorted(path)
    position = ordered[-1]
    for node in ordered:
        with phase.module.graph.inserting_after(position):
            position = copied[node] = phase.module.graph.node_copy(node, lambda n: copied.get(n, n))
    for index, value in written.items():
        results[index] = copied[value]
    phase.set_results(results)


def _repeated_writes(source: Node, value: Node, name: str, label: str) -> set[Node]:
    """What lies between a buffer and its new value, if eager mode runs that again; otherwise nothing."""
    dependents = _dependents(source)
    path = {node for node in dependents if node is value or value in _dependents(node)}
    repeated = {node.meta.get(REPEATED, 0) for node in path}
    if not any(repeated):
        return set()
    reason = None
    if len({node.meta.get("ac_graph_id") for node in path}) > 1:
        reason = "several regions, or a region and code outside, write it, and backward repeats that in another order"
    elif repeated != {1}:
        reason = "backward repeats only a part of what writes it, or repeats it several times"
    elif any(_reads_in_backward(user) for node in dependents for user in node.users):
        reason = "gradients depend on it, for which backward would read the new value"
    if reason is not None:
        raise CaptureError(
            f"graphshard cannot capture {label}.forward: a region of torch.utils.checkpoint writes buffer {name}, "
            f"which eager mode does again in backward, and {reason}. Take what writes the buffer out of the checkpoint."
        )
    return path


def _dependents(source: Node) -> list[Node]:
    """Calls of forward that depend on a value, in order."""
    known, found = {source}, []
    for node in source.graph.nodes:
        depends = not known.isdisjoint(node.all_input_nodes)
        if node.op == "call_function" and depends and not is_backward(node) and not _is_of_batch(node):
            known.add(node)
            found.append(node)
    return found


def _is_of_batch(node: Node) -> bool:
    """A result of batch norm in training that does not depend on the running statistics."""
    maker = node.args[0] if is_part(node) else None
    functional = aten._native_batch_norm_legit_functional.default
    return isinstance(maker, Node) and maker.target is functional and node.args[1] in (0, 1, 2)


def _reads_in_backward(node: Node) -> bool:
    # In training, the backward of batch norm is given the running statistics and does not read them.
    return is_backward(node) and node.target is not aten.native_batch_norm_backward.default
