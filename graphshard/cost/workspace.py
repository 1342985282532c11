"""Memory that a run of operators allocates while it runs, in addition to its results.

    inputs -> [ a ] -> [ b c ] -> [ d ] -> outputs        a, and the results of b and c for others, live inside

Operators that share a kernel write only values that others read. A kernel writes into the memory of a value that it is
the last to read, if both have the same size and no other result of the kernel depends on that value, as Inductor does;
operators that run one by one do not. Inputs that have no other owner make room after their last reader.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

from torch.fx import Node

from graphshard.cost.flops import is_multiplication
from graphshard.cost.kernels import kernels_of, leaves, num_bytes, producer

# Allocators of GPUs hand out blocks of this number of bytes.
BLOCK = 512


def workspace(nodes: Sequence[Node], *, fused: bool, block: int = 1, freed: Collection[Node] = ()) -> int:
    """Return the most bytes alive inside a region beyond inputs and results; negative if inputs make room.

    Args:
        block: sizes are rounded up to a multiple of it.
        freed: inputs that nothing outside of the region holds.
    """
    output = next((node for node in nodes if node.op == "output"), None)
    returned = {producer(node) for node in output.all_input_nodes} if output is not None else set[Node]()
    groups = _in_order([group for group, _ in kernels_of(nodes, fused=fused)], nodes, lazy=fused)
    made: list[list[Node]] = []
    kernel: dict[Node, int] = {}
    for number, group in enumerate(groups):
        members = set(group)
        made.append([node for node in group if not fused or leaves(node, members)])
        kernel.update(dict.fromkeys(group, number))
    last: dict[Node, int] = {}
    for node, number in kernel.items():
        for source in map(producer, node.all_input_nodes):
            last[source] = max(last.get(source, number), number)

    def size_of(node: Node) -> int:
        return -(-num_bytes(node) // block) * block

    sizes = {node: size_of(node) for values in made for node in values}
    dying: dict[int, list[Node]] = {}
    for node in sizes:
        if node not in returned:
            dying.setdefault(last.get(node, kernel[node]), []).append(node)
    room = [0] * len(made)
    for node in freed:
        if node not in returned and node in last:
            room[last[node]] += size_of(node)
    alive = most = 0
    for number, values in enumerate(made):
        new = sum(sizes[node] for node in values)
        dead = dying.get(number, ())
        reusable = [node for node in dead if kernel[node] != number]
        reused = _in_place(groups[number], values, reusable, sizes) if fused else []
        most = max(most, alive + new - sum(sizes[node] for node in reused))
        alive += new - sum(sizes[node] for node in dead) - room[number]
    return most - sum(size for node, size in sizes.items() if node in returned)


def _in_place(group: list[Node], values: list[Node], free: list[Node], sizes: Mapping[Node, int]) -> list[Node]:
    """Return the results of a kernel that are written to the memory of values that it is the last to read."""
    read: dict[Node, set[Node]] = {}
    for node in sorted(group):
        owners = list(map(producer, node.all_input_nodes))
        read[node] = {owner for owner in owners if owner in free}.union(*(read.get(owner, ()) for owner in owners))
    found = []
    for node in free:
        readers = [value for value in values if node in read.get(value, ())]
        if len(readers) == 1 and sizes[readers[0]] == sizes[node] and readers[0] not in found:
            found += readers
    return found


def _in_order(groups: list[list[Node]], nodes: Sequence[Node], *, lazy: bool) -> list[list[Node]]:
    """Return kernels in the order in which they run: after their sources, and otherwise at their last operator.

    With `lazy`, one without multiplications runs right before its first reader, as in Inductor.
    """
    order = {node: place for place, node in enumerate(nodes)}
    of = {node: number for number, group in enumerate(groups) for node in group}
    readers: list[set[int]] = [set() for _ in groups]
    missing = [0] * len(groups)
    for number, group in enumerate(groups):
        sources = {of[owner] for node in group for owner in map(producer, node.all_input_nodes) if owner in of} - {
            number
        }
        missing[number] = len(sources)
        for source in sources:
            readers[source].add(number)
    last = [float(max(order[node] for node in group)) for group in groups]
    for number in sorted(range(len(groups)), key=last.__getitem__, reverse=True) if lazy else ():
        if readers[number] and not is_multiplication(groups[number][0]):
            last[number] = max(last[number], min(last[reader] for reader in readers[number]) - 0.5)
    ready = [(last[number], number) for number, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    found = []
    while ready:
        _, number = heapq.heappop(ready)
        found.append(groups[number])
        for reader in readers[number]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (last[reader], reader))
    assert len(found) == len(groups), "kernels read each other"
    return found
