"""What is computed of stored shards alone belongs to a gather, and stands where the gathered parameter is needed.

    %s = mul(%part, 2)                    %y = mm(%x, %v)
    %g = join([%s], 2, w)                 %s = mul(%part, 2)
    %w = _to_copy(%g[0], float32)         %g = join([%s], 2, w)
    %y = mm(%x, %v)                       %w = _to_copy(%g[0], float32)
    %z = mm(%y, %w)                       %z = mm(%y, %w)

Methods of all parameters are traced before the forward; left there, every parameter would be gathered first.
"""

from __future__ import annotations

from torch.fx import Node

from graphshard.frontend.extensions import COMMUNICATION
from graphshard.ir.errors import CaptureError
from graphshard.ir.graph import c10d, emit, is_backward
from graphshard.ir.mesh import Axis
from graphshard.ir.operators import REDUCED
from graphshard.ir.program import Phase
from graphshard.ir.subclasses import PRE


def settle_gathers(phase: Phase, axis: Axis, group: str) -> None:
    """Move what is computed of shards to where it is used, and let it name the mesh axis that it reduces over.

    Args:
        group: name of the process group of the axis.

    Raises:
        CaptureError: something else is communicated, or a shard is written to.
    """
    own = _of_parts(phase)
    for node in [n for n in own if getattr(n.target, "namespace", "") == "_c10d_functional"]:
        if node.target is c10d.all_reduce.default and node.args[2] == group:
            _name_axis(node, axis)
        elif node.target is not c10d.wait_tensor.default:
            raise CaptureError(f"{PRE}: {COMMUNICATION.format(node.target)}.")
    for slot in phase.outputs:
        if slot.of == "part":
            raise CaptureError(
                f"{PRE} of parameter {slot.name} writes to its shard. Keep what changes from step to "
                "step in an attribute, and set it between the calls of the model."
            )
    for node in reversed(_of_parts(phase)):
        if node.users:
            min(node.users).prepend(node)


def _of_parts(phase: Phase) -> list[Node]:
    """Calls of forward whose inputs are parts of shards, and what is made of those alone; in order."""
    known = {node for node, slot in phase.slot_of().items() if slot.kind == "part"}
    found = []
    for node in phase.module.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and inputs and known.issuperset(inputs) and not is_backward(node):
            known.add(node)
            found.append(node)
    return found


def _name_axis(reduction: Node, axis: Axis) -> None:
    value, op, _ = reduction.args
    (wait,) = reduction.users
    graph = reduction.graph
    with graph.inserting_before(reduction):
        reduced = emit(graph, REDUCED, value, op, axis.name, like=reduction)
    for old in (wait, reduction):
        old.replace_all_uses_with(reduced)
        graph.erase_node(old)
