"""Merge collectives into the plan's buckets.

  * %g1 = all_gather_into_tensor(%a)           * %g = all_gather_into_tensor_coalesced([%a, %b])
    %w1 = wait_tensor(%g1)                       %w1 = wait_tensor(getitem(%g, 0))
  * %g2 = all_gather_into_tensor(%b)             %w2 = wait_tensor(getitem(%g, 1))
    %w2 = wait_tensor(%g2)

A coalesced bucket launches several tensors as one group and copies nothing. Small tensors of a bucket are packed:
flattened into one buffer, one more tensor of the group, at the price of a copy on either side. A packed reduction has
the buffer that FSDP2 would make: one row per rank, and in it each gradient's chunk in order.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphshard.errors import PassError
from graphshard.ir.collective_regions import COMPUTE, Collective, CollectiveRegions, collectives
from graphshard.ir.graph import WAIT, aten, base_of, emit, erase_dead, fake, start_together, trace
from graphshard.ir.param_table import ParamTable
from graphshard.ir.plan import Bucket, CollectiveKind
from graphshard.ir.program import Phase, Program
from graphshard.passes.base import Pass


@dataclass(frozen=True)
class Bucketing(Pass):
    """Requires: a plan that names every collective once; one collective per parameter.
    Preserves: the compute order, numerics."""

    name: ClassVar[str] = "bucket"
    runs: ClassVar = "planned"
    establishes: ClassVar[frozenset[str]] = frozenset({"planned_buckets"})

    def requires(self, program: Program) -> None:
        super().requires(program)
        assert program.plan is not None
        for phase_name, phase in program.phases.items():
            found = sorted((c.kind, c.axis, p) for c in collectives(phase) for p in c.params)
            buckets = [bucket for bucket in program.plan.buckets if bucket.phase == phase_name]
            planned = sorted((b.kind, b.axis, p) for b in buckets for p in b.members)
            if found != planned:
                odd = sorted(set(found) ^ set(planned)) or found
                raise PassError(f"{self.name}: plan and {phase_name} graph disagree about {odd[:5]}")

    def rewrite(self, program: Program) -> int:
        assert program.plan is not None
        count = 0
        for phase_name, phase in program.phases.items():
            single = {(c.kind, c.axis, p): c for c in collectives(phase) if len(c.params) == 1 for p in c.params}
            layout = CollectiveRegions.of(phase)
            buckets = [bucket for bucket in program.plan.buckets if bucket.phase == phase_name]
            # All-reduces read what reduce-scatters made: those buckets come first.
            for bucket in sorted(buckets, key=lambda bucket: bucket.kind == "all_reduce"):
                members = [single.get((bucket.kind, bucket.axis, name)) for name in bucket.members]
                if len(members) > 1 and None not in members:
                    _merge(phase.module.graph, bucket, [m for m in members if m is not None], layout)
            # Nodes that now look like a part of a bucket were compute when the plan counted positions.
            now = CollectiveRegions.of(phase).index
            for node in set(layout.compute).intersection(phase.module.graph.nodes).difference(now):
                node.meta[COMPUTE] = True
            count += _tag(phase, buckets, program.params)
        return count


def _tag(phase: Phase, buckets: list[Bucket], params: ParamTable) -> int:
    """Write the names of bucket and unit on every launch and wait; return how many launches had another or none."""
    found = {(bucket.kind, bucket.axis, param): bucket for bucket in buckets for param in bucket.members}
    count = 0
    for collective in collectives(phase):
        bucket = found[collective.kind, collective.axis, collective.params[0]]
        units = {params[param].unit for param in bucket.members}
        count += collective.node.meta.get("bucket") != bucket.name
        for node in (collective.node, *collective.waits):
            node.meta["bucket"] = bucket.name
            if bucket.exchanged:
                node.meta["exchanged"] = True
            if len(units) == 1:
                (node.meta["unit"],) = units
    return count


def _merge(graph: Graph, bucket: Bucket, members: list[Collective], layout: CollectiveRegions) -> None:
    """Replace collectives with one launch: of gathers at the first, of reductions at the last."""
    is_gather, num_packed = bucket.kind == "gather", len(bucket.packed)
    anchor = (min if is_gather else max)(member.node for member in members)
    if is_gather:
        for member in members:
            for node in layout.before[member.node]:
                anchor.prepend(node)
    given = [member.node.all_input_nodes[0] for member in members]
    packed, tensors = given[:num_packed], given[num_packed:]
    args = members[0].node.args[1:]
    size = 1 if bucket.kind == "all_reduce" else args[-2]
    assert isinstance(size, int)
    if packed:
        common = _common_buffer(packed) if bucket.kind == "all_reduce" else None
        tensors = [common or trace(anchor, partial(_pack, bucket.kind, size), packed), *tensors]
    with graph.inserting_before(anchor):
        target: Any = members[0].node.target
        starts = start_together(graph, target.overloadpacket, tensors, *args, like=anchor)
        values = [emit(graph, WAIT, start, like=anchor) for start in starts]
    if packed:
        unpack = _unpack_gathered if is_gather else _unpack_reduced
        shapes = [list(fake(node).shape) for node in packed]
        values = [*trace(anchor, partial(unpack, shapes, size), values[0]), *values[1:]]
    for member, value in zip(members, values, strict=True):
        (wait,) = member.waits
        # Replace each member's result with its part of the bucket, and move dependent nodes after the launch.
        for node in () if is_gather else layout.after[wait]:
            anchor.append(node)
            anchor = node
        wait.replace_all_uses_with(value)
        graph.erase_node(wait)
        graph.erase_node(member.node)
    if bucket.kind == "all_reduce":
        erase_dead(graph)


def _pack(kind: CollectiveKind, size: int, tensors: list[Tensor]) -> Tensor:
    if kind == "reduce":
        return torch.cat([tensor.view([size, -1]) for tensor in tensors], 1).view([-1])
    return torch.cat([tensor.view([-1]) for tensor in tensors])


def _common_buffer(shards: list[Node]) -> Node | None:
    """Return the buffer that the shards are the parts of, if one reduction made them all."""
    parts = [node for shard in shards for node in shard.all_input_nodes[:1]]  # an input of the phase has none
    one = len({base_of(shard) for shard in shards}) == 1 and len(parts) == len(shards)
    if not one or any(part.target is not operator.getitem for part in parts):
        return None
    buffer = base_of(shards[0])
    whole = fake(buffer).numel() == sum(fake(shard).numel() for shard in shards)
    return buffer if whole and [part.args[1] for part in parts] == list(range(len(parts))) else None


def _unpack_gathered(shapes: list[list[int]], size: int, buffer: Tensor) -> list[Tensor]:
    parts = buffer.view([size, -1]).split_with_sizes([math.prod(shape) for shape in shapes], 1)
    # A column of the buffer is not contiguous: this is the copy out.
    copies = map(aten.contiguous.default, parts)
    return [part.view([size * shape[0], *shape[1:]]) for part, shape in zip(copies, shapes)]


def _unpack_reduced(shapes: list[list[int]], size: int, buffer: Tensor) -> list[Tensor]:
    shapes = [[shape[0] // size, *shape[1:]] if shape else [] for shape in shapes]
    parts = buffer.split_with_sizes([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes)]
