"""What the model itself communicates: functional collectives along axes of the mesh.

They become operators that run at once and name the axis, not a process group:

    %a = all_reduce(%y, sum, 7)                   %w = reduced(%y, sum, tp)
    %w = wait_tensor(%a)

To plans they are compute: what gathers and reduces parameters is moved around them, and they stay where they are.

A group of the user's that is no axis of the mesh may be one of neighbours on the sharding axis, as those are that send
keys and values around a ring. It becomes an axis of the program's mesh, which is bound to the group itself.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.fx import Graph, Node

from graphshard.ir.distributed_internals import process_group
from graphshard.ir.errors import CaptureError
from graphshard.ir.graph import WAIT, c10d, emit
from graphshard.ir.mesh import Mesh
from graphshard.ir.operators import EXCHANGED, JOINED, REDUCED, SCATTERED

_AT_ONCE = {
    c10d.all_reduce.default: REDUCED,
    c10d.all_gather_into_tensor.default: JOINED,
    c10d.reduce_scatter_tensor.default: SCATTERED,
    c10d.all_to_all_single.default: EXCHANGED,
}


def settle_collectives(graph: Graph, mesh: Mesh, groups: dict[str, str], model: str) -> Mesh:
    """Let what the model communicates run at once, and name an axis.

    Args:
        groups: names of the process groups of this rank by the names of the axes; those that are found are added.

    Returns:
        The mesh, with the axes that were found.

    Raises:
        CaptureError: it communicates otherwise, or with other ranks.
    """
    for node in list(graph.nodes):
        if getattr(node.target, "namespace", "") in ("_c10d_functional", "_dtensor") and node.target is not WAIT:
            ranks = _ranks(str(node.args[-1]))
            found = _with_axis(mesh, ranks, str(node.args[-1]), groups)
            if found is None or node.target not in _AT_ONCE:
                raise CaptureError(_refusal(node, ranks, mesh, groups, model))
            mesh, name = found
            _run_at_once(node, _AT_ONCE[node.target], name)
    for wait in graph.find_nodes(op="call_function", target=WAIT):  # of what was waited for before
        wait.replace_all_uses_with(wait.all_input_nodes[0])
        graph.erase_node(wait)
    return mesh


def _with_axis(mesh: Mesh, ranks: list[int], group: str, groups: dict[str, str]) -> tuple[Mesh, str] | None:
    """The mesh with an axis along which this rank has these ranks, and its name; None if there can be none.

    A group is known by its ranks: DTensor keeps plans for meshes that are equal, of whichever was there first.
    """
    known = {name: _ranks(of) for name, of in groups.items()}
    for name in sorted(known, key=lambda name: name == mesh.shard.name):  # axes of one rank are all alike
        if known[name] == ranks:
            return (mesh if name in [axis.name for axis in mesh.every_axis] else mesh.with_inner(len(ranks))), name
    around, size = known.get(mesh.shard.name, []), len(ranks)
    if size == 0 or len(around) % size or ranks not in [around[i : i + size] for i in range(0, len(around), size)]:
        return None
    mesh = mesh.with_inner(size)
    groups[mesh.axes[-1].name] = group
    return mesh, mesh.axes[-1].name


def _ranks(group: str) -> list[int]:
    return dist.get_process_group_ranks(process_group(group))


def _refusal(node: Node, ranks: list[int], mesh: Mesh, groups: dict[str, str], model: str) -> str:
    axes = "; ".join(f"{name!r}: {_ranks(group)}" for name, group in groups.items())
    return (
        f"graphshard cannot capture {model}.forward, because it communicates by {node.target} with ranks {ranks}. "
        "Collectives of the model are all-reduces, all-gathers, reduce-scatters and all-to-alls along an axis of the "
        f"mesh, or among neighbours on {mesh.shard.name!r}, one behind the other. This rank's axes are "
        f"{axes or 'not known, as there are no process groups: compile it in process'}."
    )


def _run_at_once(launch: Node, target: torch._ops.OpOverload, axis: str) -> None:
    graph = launch.graph
    with graph.inserting_before(launch):
        value = emit(graph, target, *launch.args[:-1], axis, like=launch)
    value.meta.update({key: launch.meta[key] for key in launch.meta if key != "val"})
    for user in list(launch.users):
        if user.target is WAIT:
            user.replace_all_uses_with(value)
            graph.erase_node(user)
    launch.replace_all_uses_with(value)  # of the sizes of what arrives, say
    graph.erase_node(launch)
