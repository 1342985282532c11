"""Rules of a sharded program: parameters and gradients are those of the table, collectives those of the plan."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from graphshard.ir.collective_regions import collectives, peak_gathered_bytes
from graphshard.ir.graph import WAIT, fake, is_collective, is_reduced, launch_of
from graphshard.ir.printer import dtype_name
from graphshard.ir.program import Program
from graphshard.ir.transport import ROWS_REDUCED, reduced_over
from graphshard.pipeline.violations import Violation


def sharded_inputs(program: Program, phase_name: str) -> Iterator[Violation]:
    """Every parameter comes in as its padded shard."""
    for node, slot in program.phases[phase_name].slot_of().items():
        if slot.kind == "param":
            shape, wanted = tuple(fake(node).shape), program.params[slot.name].padded_shape
            if shape != wanted:
                yield Violation(f"{slot} has shape {list(shape)}, its padded shard has {list(wanted)}", node)


def stored_dtypes(program: Program, phase_name: str) -> Iterator[Violation]:
    """Parameters come in, and their gradients go out, in the dtype the shard is stored in."""
    phase = program.phases[phase_name]
    for node, slot in [*phase.slot_of().items(), *zip(phase.results, phase.outputs)]:
        if "param" in (slot.kind, slot.of) and isinstance(node, Node):
            dtype, wanted = fake(node).dtype, program.params[slot.name].dtype
            if dtype != wanted:
                yield Violation(f"{slot} is {dtype_name(dtype)}, the stored parameter is {dtype_name(wanted)}", node)


def reduced_once(program: Program, phase_name: str) -> Iterator[Violation]:
    """The gradient of every trainable parameter is reduced once over each axis, and every reduction is one's."""
    phase = program.phases[phase_name]
    owners: dict[Reduced, str] = {}
    partial = {node for node, slot in phase.slot_of().items() if slot.kind == "partial"}
    results = {value for value in phase.results if isinstance(value, Node)}
    for value, slot in zip(phase.results, phase.outputs, strict=True):
        is_grad = slot.kind == "grad" and slot.of == "param"
        axes = [axis.name for axis in reduced_over(program.params[slot.name], program)] if is_grad else []
        if not axes:
            continue
        if not isinstance(value, Node):
            if slot.name in program.differentiated:
                yield Violation(f"{slot} is None, though its parameter takes part in the result")
            continue
        ways = _reductions_behind(value, len(axes), partial)
        if not ways:  # all of it was reduced over shards in earlier microbatches
            axes = axes[1:]
            ways = _reductions_behind(value, len(axes), set())
        (way, *others) = ways
        found = [_axis_of(wait) for wait, _ in reversed(way)]
        if others:
            how = f"comes out of {len(ways)} reductions"
        elif found != axes:
            how = f"is reduced over {' and '.join(found)} alone" if found else "is not reduced"
        else:
            if way[0] in owners:
                yield Violation(f"{slot} and grad:{owners[way[0]]} come out of the same reduction", value)
            owners[way[0]] = slot.name
            continue
        over = f" over each of {', '.join(axes)}" if len(axes) > 1 else ""
        yield Violation(f"{slot} {how}, it must be reduced once{over}", value)
    for node in phase.module.graph.nodes:
        if is_reduced(node) and not _reaches(node, results):
            yield Violation("the reduction belongs to no gradient that is returned", node)


# A reduction's wait, and the part of its buffer if several tensors were packed.
Reduced = tuple[Node, Node | None]


def _reductions_behind(value: Node, most: int, partial: set[Node]) -> set[tuple[Reduced, ...]]:
    """The ways on which a gradient comes about: the reductions on each, the last first, and no more than `most`.

    What was reduced over shards in earlier microbatches is no way of its own.
    """
    found: set[tuple[Reduced, ...]] = set()
    stack: list[tuple[Node, Node | None, tuple[Reduced, ...]]] = [(value, None, ())]
    while stack:
        node, part, way = stack.pop()
        sources = node.all_input_nodes
        if is_reduced(node):
            way = (*way, (node, part))
            sources = [_sent(node)]
        elif ROWS_REDUCED in node.meta:  # the first of all reductions
            found.add((*way, (node, part)))
            continue
        elif way and part is not None and node.target is torch.ops.aten.cat.default:
            index: Any = part.args[1]  # of what was packed for this reduction
            sources, part = [sources[index]], None
        if len(way) == most or not sources:
            found.add(way)
            continue
        part = node if node.target is operator.getitem else part
        stack.extend((source, part, way) for source in sources if source not in partial)
    return found


def _axis_of(reduced: Node) -> str:
    """The axis that a sum is taken over."""
    return str(reduced.meta[ROWS_REDUCED] if ROWS_REDUCED in reduced.meta else launch_of(reduced).args[-1])


def _sent(wait: Node) -> Node:
    """What the reduction that a wait completes was given."""
    source, launch = wait.all_input_nodes[0], launch_of(wait)
    index: Any = source.args[1] if source is not launch else 0
    return launch.all_input_nodes[index]


def _reaches(node: Node, ends: set[Any]) -> bool:
    stack = [node]
    while stack:
        current = stack.pop()
        if current in ends:
            return True
        stack.extend(current.users)
    return False


def planned_buckets(program: Program, phase_name: str) -> Iterator[Violation]:
    """The collectives of the graph are the buckets of the plan, each with its parameters."""
    assert program.plan is not None
    planned = {bucket.name: bucket for bucket in program.plan.buckets if bucket.phase == phase_name}
    for collective in collectives(program.phases[phase_name]):
        bucket = planned.pop(collective.node.meta.get("bucket", ""), None)
        if bucket is None:
            carried = f"the {collective.kind} of {', '.join(collective.params)}"
            yield Violation(f"{carried} is no bucket of the plan, or one that was seen before", collective.node)
        elif sorted(bucket.members) != sorted(collective.params):
            odd = sorted(set(bucket.members) ^ set(collective.params))
            yield Violation(f"plan and graph disagree about {odd[:5]} in {bucket.name!r}", collective.node)
    for name in planned:
        yield Violation(f"the graph has no collective for {name!r}")


def planned_order(program: Program, phase_name: str) -> Iterator[Violation]:
    """Collectives of a group start, and are waited for, in the order of the plan, which is that of every rank."""
    assert program.plan is not None
    found: list[tuple[str, str, Node]] = []
    for node in program.phases[phase_name].module.graph.nodes:
        action = "start" if is_collective(node) else "wait" if node.target is WAIT else ""
        event = (action, node.meta.get("bucket", node.name))
        if action and (not found or found[-1][:2] != event):
            found.append((*event, node))
    planned = [(event.action, event.bucket) for event in program.plan.events.get(phase_name, ())]
    for (action, bucket, node), wanted in zip(found, planned):
        if (action, bucket) != wanted:
            yield Violation(f"{action} of {bucket!r} where the plan has {' of '.join(map(repr, wanted))}", node)
            return
    if len(found) != len(planned):
        yield Violation(f"the graph starts and waits {len(found)} times, the plan {len(planned)} times")


def live_memory(program: Program, phase_name: str) -> Iterator[Violation]:
    """No more bytes of gathered parameters are alive at once than the plan accounts for."""
    assert program.plan is not None
    node, found = peak_gathered_bytes(program.phases[phase_name])
    planned = program.plan.gathered_bytes.get(phase_name, 0)
    if found > planned:
        yield Violation(
            f"{found} bytes of gathered parameters are alive at once, the plan accounts for {planned}", node
        )
