"""Let collectives travel together as the plan's buckets say.

  * %g1 = all_gather_into_tensor(%a)           * %g = all_gather_into_tensor_coalesced([%a, %b])
    %w1 = wait_tensor(%g1)                       %w1 = wait_tensor(getitem(%g, 0))
  * %g2 = all_gather_into_tensor(%b)             %w2 = wait_tensor(getitem(%g, 1))
    %w2 = wait_tensor(%g2)

A coalesced bucket launches several tensors as one group and copies nothing. Small tensors of a bucket are packed:
flattened into one buffer that travels as one more tensor of the group, at the price of a copy on either side. A packed
reduction holds the buffer that FSDP2 would make: one row per rank, and in it each gradient's chunk in order.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from graphshard.errors import PassError
from graphshard.ir.graph import WAIT, aten, base_of, c10d, emit, erase_dead, fake, made_once, start_together
from graphshard.ir.layout import COMPUTE, Collective, Layout, collectives
from graphshard.ir.params import ParamTable
from graphshard.ir.plan import Bucket
from graphshard.ir.program import Phase, Program
from graphshard.passes.base import Pass
from graphshard.torch_compat.operators import OpOverloadPacket


@dataclass(frozen=True)
class Bucketing(Pass):
    """Requires: a plan that names every collective once; one collective per parameter.
    Preserves: the compute order, numerics."""

    name: ClassVar[str] = "bucket"
    establishes: ClassVar[frozenset[str]] = frozenset({"planned_buckets"})

    def requires(self, program: Program) -> None:
        if program.plan is None:
            raise PassError(f"{self.name}: the program has no plan; run a planner first")
        for phase_name, phase in program.phases.items():
            found = sorted((c.kind, c.axis, p) for c in collectives(phase) for p in c.params)
            buckets = [bucket for bucket in program.plan.buckets if bucket.phase == phase_name]
            planned = sorted((b.kind, b.axis, p) for b in buckets for p in b.members)
            if found != planned:
                odd = sorted(set(found) ^ set(planned)) or found
                raise PassError(f"{self.name}: plan and {phase_name} graph disagree about {odd[:5]}")

    @made_once()
    def rewrite(self, program: Program) -> int:
        assert program.plan is not None
        count = 0
        for phase_name, phase in program.phases.items():
            single = {(c.kind, c.axis, p): c for c in collectives(phase) if len(c.params) == 1 for p in c.params}
            layout = Layout.of(phase)
            # What is reduced over replicas is what was reduced over shards: those buckets come first.
            for bucket in sorted(program.plan.buckets, key=lambda bucket: bucket.kind == "all_reduce"):
                members = [single.get((bucket.kind, bucket.axis, name)) for name in bucket.members]
                if bucket.phase != phase_name or len(members) < 2 or None in members:
                    continue
                _MERGE[bucket.kind](phase.module.graph, bucket, [m for m in members if m is not None], layout)
            _stay_compute(phase, layout)
            count += _tag(phase, [b for b in program.plan.buckets if b.phase == phase_name], program.params)
        return count


def _stay_compute(phase: Phase, before: Layout) -> None:
    """Positions of the plan count what was compute before, though it may look like a part of a bucket now."""
    now = Layout.of(phase).index
    for node in set(before.compute).intersection(phase.module.graph.nodes).difference(now):
        node.meta[COMPUTE] = True


def _tag(phase: Phase, buckets: list[Bucket], params: ParamTable) -> int:
    """Write its bucket's name, and its unit's, on every launch and wait; how many launches had another or none."""
    found = {(bucket.kind, bucket.axis, param): bucket for bucket in buckets for param in bucket.members}
    count = 0
    for collective in collectives(phase):
        bucket = found[collective.kind, collective.axis, collective.params[0]]
        name, units = bucket.name, {params[param].unit for param in bucket.members}
        count += collective.node.meta.get("bucket") != name
        for node in (collective.node, *collective.waits):
            node.meta["bucket"] = name
            if bucket.exchanged:
                node.meta["exchanged"] = True
            if len(units) == 1:
                (node.meta["unit"],) = units
    return count


def _merge_gathers(graph: Graph, bucket: Bucket, members: list[Collective], layout: Layout) -> None:
    first = min(m.node for m in members)
    for member in members:
        for node in layout.before[member.node]:
            first.prepend(node)
    shards = [m.node.all_input_nodes[0] for m in members]
    launch: Any = members[0].node.args
    _, size, axis = launch
    num_packed = len(bucket.packed)
    with graph.inserting_before(first):
        tensors = shards[num_packed:]
        if num_packed:
            flats = [emit(graph, aten.view.default, s, [-1], like=first) for s in shards[:num_packed]]
            tensors = [emit(graph, aten.cat.default, flats, like=first), *tensors]
        fulls = _launch(graph, c10d.all_gather_into_tensor, tensors, size, axis, like=first)
        if num_packed:
            fulls = _unpack_gathered(graph, fulls[0], shards[:num_packed], size) + fulls[1:]
    for member, full in zip(members, fulls, strict=True):
        _replace(graph, member, full)


def _unpack_gathered(graph: Graph, buffer: Node, shards: list[Node], size: int) -> list[Node]:
    rows = emit(graph, aten.view.default, buffer, [size, -1], like=buffer)
    sizes = [fake(s).numel() for s in shards]
    pieces = emit(graph, aten.split_with_sizes.default, rows, sizes, 1, like=buffer)
    fulls = []
    for index, shard in enumerate(shards):
        shape = fake(shard).shape
        piece = emit(graph, operator.getitem, pieces, index, like=buffer)
        # A column of the buffer is not contiguous: this is the copy out.
        whole = emit(graph, aten.clone.default, piece, memory_format=torch.contiguous_format, like=buffer)
        fulls.append(emit(graph, aten.view.default, whole, [size * shape[0], *shape[1:]], like=buffer))
    return fulls


def _merge_reductions(graph: Graph, bucket: Bucket, members: list[Collective], layout: Layout) -> None:
    last = max(m.node for m in members)
    grads = [m.node.all_input_nodes[0] for m in members]
    launch: Any = members[0].node.args
    _, op, size, axis = launch
    num_packed = len(bucket.packed)
    with graph.inserting_before(last):
        tensors = grads[num_packed:]
        if num_packed:
            rows = [emit(graph, aten.view.default, g, [size, -1], like=last) for g in grads[:num_packed]]
            buffer = emit(graph, aten.cat.default, rows, 1, like=last)
            tensors = [emit(graph, aten.view.default, buffer, [-1], like=last), *tensors]
        shards = _launch(graph, c10d.reduce_scatter_tensor, tensors, op, size, axis, like=last)
        if num_packed:
            shards = _unpack_reduced(graph, shards[0], grads[:num_packed], size) + shards[1:]
    _land(graph, members, shards, last, layout)


def _merge_all_reduces(graph: Graph, bucket: Bucket, members: list[Collective], layout: Layout) -> None:
    last = max(m.node for m in members)
    shards = [m.node.all_input_nodes[0] for m in members]
    launch: Any = members[0].node.args
    _, op, axis = launch
    num_packed = len(bucket.packed)
    with graph.inserting_before(last):
        tensors = shards[num_packed:]
        if num_packed:
            tensors = [_one_buffer(graph, shards[:num_packed], last), *tensors]
        reduced = _launch(graph, c10d.all_reduce, tensors, op, axis, like=last)
        if num_packed:
            reduced = _unpack_reduced(graph, reduced[0], shards[:num_packed], 1) + reduced[1:]
    _land(graph, members, reduced, last, layout)
    erase_dead(graph)


def _one_buffer(graph: Graph, shards: list[Node], like: Node) -> Node:
    """The buffer that the shards are the pieces of, if they came out of one reduction; else a copy of them all."""
    pieces = [node for shard in shards for node in shard.all_input_nodes[:1]]  # none behind what backwards before left
    one = len({base_of(shard) for shard in shards}) == 1 and len(pieces) == len(shards)
    if one and all(piece.target is operator.getitem for piece in pieces):
        buffer = base_of(shards[0])
        whole = fake(buffer).numel() == sum(fake(shard).numel() for shard in shards)
        if whole and [piece.args[1] for piece in pieces] == list(range(len(pieces))):
            return buffer
    flats = [emit(graph, aten.view.default, shard, [-1], like=like) for shard in shards]
    return emit(graph, aten.cat.default, flats, like=like)


def _land(graph: Graph, members: list[Collective], values: list[Node], anchor: Node, layout: Layout) -> None:
    """Let what was reduced be what its bucket brings; what follows from it stands behind the launch."""
    for member, value in zip(members, values, strict=True):
        for node in layout.after[member.waits[0]]:
            anchor.append(node)
            anchor = node
        _replace(graph, member, value)


def _unpack_reduced(graph: Graph, buffer: Node, grads: list[Node], size: int) -> list[Node]:
    whole = [list(fake(grad).shape) for grad in grads]
    shapes = [[shape[0] // size, *shape[1:]] if shape else [] for shape in whole]
    sizes = [math.prod(shape) for shape in shapes]
    pieces = emit(graph, aten.split_with_sizes.default, buffer, sizes, like=buffer)
    return [
        emit(graph, aten.view.default, emit(graph, operator.getitem, pieces, i, like=buffer), shape, like=buffer)
        for i, shape in enumerate(shapes)
    ]


def _launch(graph: Graph, packet: OpOverloadPacket, tensors: list[Node], *args: object, like: Node) -> list[Node]:
    """Start one collective for all tensors and wait for each."""
    starts = start_together(graph, packet, tensors, *args, like=like)
    return [emit(graph, WAIT, start, like=like) for start in starts]


def _replace(graph: Graph, member: Collective, value: Node) -> None:
    (wait,) = member.waits
    wait.replace_all_uses_with(value)
    graph.erase_node(wait)
    graph.erase_node(member.node)


_MERGE = {"gather": _merge_gathers, "reduce": _merge_reductions, "all_reduce": _merge_all_reduces}
