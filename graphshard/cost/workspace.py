"""What a run of operators allocates while it runs, besides what it returns.

    inputs -> [ a ] -> [ b c ] -> [ d ] -> outputs        a, and what b and c write for others, live inside

Operators that share a kernel write only what others read. A kernel writes into the memory of a value that it is the
last to read, if both have as many bytes, as Inductor does; operators that run one by one do not. Inputs that nobody
else has make room behind what is the last to read them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.fx import Node

from graphshard.cost.kernels import kernels_of, leaves, num_bytes
from graphshard.ir.graph import base_of, is_part, is_view

# Allocators of GPUs hand out blocks of so many bytes.
BLOCK = 512


def workspace(nodes: Sequence[Node], *, fused: bool, block: int = 1, freed: Collection[Node] = ()) -> int:
    """Most bytes alive inside a region beyond all that goes in and all that it returns.

    Args:
        nodes: of the region's graph, in order.
        fused: its operators share kernels.
        block: sizes are rounded up to so many bytes.
        freed: inputs that nothing outside of the region has.
    """
    output = next((node for node in nodes if node.op == "output"), None)
    returned = {_owner(node) for node in output.all_input_nodes} if output is not None else set[Node]()
    order = {node: place for place, node in enumerate(nodes)}
    groups = [group for group, _ in kernels_of(nodes, fused=fused)]
    groups.sort(key=lambda group: max(order[node] for node in group))
    made: list[list[Node]] = []
    kernel: dict[Node, int] = {}
    for number, group in enumerate(groups):
        members = set(group)
        made.append([node for node in group if not fused or leaves(node, members)])
        kernel.update(dict.fromkeys(group, number))
    last: dict[Node, int] = {}
    for node, number in kernel.items():
        for source in map(_owner, node.all_input_nodes):
            last[source] = max(last.get(source, number), number)
    sizes = {node: -(-num_bytes(node) // block) * block for values in made for node in values}
    everything = sum(size for node, size in sizes.items() if node in returned)
    dying: dict[int, list[Node]] = {}
    for node in sizes:
        if node not in returned:
            dying.setdefault(last.get(node, kernel[node]), []).append(node)
    room = [0] * len(made)
    for node in freed:
        if node not in returned and node in last:
            room[last[node]] += -(-num_bytes(node) // block) * block
    alive = most = 0
    for number, values in enumerate(made):
        ends = [sizes[node] for node in dying.get(number, ())]
        free = [size for node, size in ((n, sizes[n]) for n in dying.get(number, ())) if kernel[node] != number]
        new = 0
        for size in (sizes[node] for node in values):
            if fused and size in free:
                free.remove(size)  # written in place
            else:
                new += size
        most = max(most, alive + new)
        alive += sum(sizes[node] for node in values) - sum(ends) - room[number]
    return max(0, most - everything)


def _owner(node: Node) -> Node:
    """The operator whose memory a value has."""
    return base_of(node, lambda each: is_view(each) or is_part(each))
