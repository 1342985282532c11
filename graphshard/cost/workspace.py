"""What a run of operators allocates while it runs, besides what it returns.

    inputs -> [ a ] -> [ b c ] -> [ d ] -> outputs        a, and what b and c write for others, live inside

Operators that share a kernel write only what others read. A kernel writes into the memory of a value that it is the
last to read, if both have as many bytes and nothing else that it writes is made of that value, as Inductor does;
operators that run one by one do not. Inputs that nobody else has make room behind what is the last to read them.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

from torch.fx import Node

from graphshard.cost.kernels import kernels_of, leaves, num_bytes
from graphshard.cost.multiplications import is_multiplication
from graphshard.ir.graph import base_of, is_alias, is_part

# Allocators of GPUs hand out blocks of so many bytes.
BLOCK = 512


def workspace(nodes: Sequence[Node], *, fused: bool, block: int = 1, freed: Collection[Node] = ()) -> int:
    """Most bytes alive inside a region beyond all that goes in and all that it returns; negative if inputs make room.

    Args:
        nodes: of the region's graph, in order.
        fused: its operators share kernels.
        block: sizes are rounded up to so many bytes.
        freed: inputs that nothing outside of the region has.
    """
    output = next((node for node in nodes if node.op == "output"), None)
    returned = {_owner(node) for node in output.all_input_nodes} if output is not None else set[Node]()
    groups = _in_order([group for group, _ in kernels_of(nodes, fused=fused)], nodes, lazy=fused)
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
        free = [node for node in dying.get(number, ()) if kernel[node] != number]
        new = sum(sizes[node] for node in values)
        if fused:
            new -= sum(sizes[node] for node in _in_place(groups[number], values, free, sizes))
        most = max(most, alive + new)
        alive += sum(sizes[node] for node in values) - sum(ends) - room[number]
    return most - everything


def _in_place(group: list[Node], values: list[Node], free: list[Node], sizes: Mapping[Node, int]) -> list[Node]:
    """Values of a kernel that are written where another one was that nothing reads any more, nor any other of them.

    Args:
        values: what the kernel writes.
        free: what it is the last to read.
    """
    read: dict[Node, set[Node]] = {}
    for node in sorted(group):
        owners = list(map(_owner, node.all_input_nodes))
        read[node] = {owner for owner in owners if owner in free}.union(*(read.get(owner, ()) for owner in owners))
    found = []
    for node in free:
        readers = [value for value in values if node in read.get(value, ())]
        if len(readers) == 1 and sizes[readers[0]] == sizes[node] and readers[0] not in found:
            found += readers
    return found


def _in_order(groups: list[list[Node]], nodes: Sequence[Node], *, lazy: bool) -> list[list[Node]]:
    """Kernels as they run: each behind those that it reads, and else where its last operator stands.

    Args:
        lazy: one that multiplies nothing runs right before the first that reads it, as Inductor has it.
    """
    order = {node: place for place, node in enumerate(nodes)}
    of = {node: number for number, group in enumerate(groups) for node in group}
    readers: list[set[int]] = [set() for _ in groups]
    missing = [0] * len(groups)
    for number, group in enumerate(groups):
        sources = {of[owner] for node in group for owner in map(_owner, node.all_input_nodes) if owner in of} - {number}
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


def _owner(node: Node) -> Node:
    """The operator whose memory a value has."""
    return base_of(node, lambda each: is_alias(each) or is_part(each))
