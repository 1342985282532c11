"""Start and wait for collectives where the plan says.

    %w0 = wait_tensor(%g0)                     %w0 = wait_tensor(%g0)
    %y0 = mm(%x, %w0)                        * %g1 = all_gather_into_tensor(%b)
  * %g1 = all_gather_into_tensor(%b)           %y0 = mm(%x, %w0)
    %w1 = wait_tensor(%g1)                     %w1 = wait_tensor(%g1)
    %y1 = mm(%y0, %w1)                         %y1 = mm(%y0, %w1)

The compute keeps its order. The casts and copies of a collective move with it: the prologue to its start, the epilogue
to its wait. Copies of its shards from the host start when the gather before it does.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from graphshard.errors import PassError
from graphshard.ir.collective_regions import Collective, CollectiveRegions, collectives, peak_gathered_bytes
from graphshard.ir.graph import arrange, with_parts
from graphshard.ir.operators import UPLOAD
from graphshard.ir.plan import Event, Plan
from graphshard.ir.program import Phase, Program
from graphshard.passes.base import Pass


@dataclass(frozen=True)
class Reorder(Pass):
    """Requires: a plan whose buckets are the graph's collectives.
    Preserves: the node set, the order of compute nodes, numerics."""

    name: ClassVar[str] = "reorder"
    runs: ClassVar = "planned"
    establishes: ClassVar[frozenset[str]] = frozenset({"planned_order", "live_memory"})

    def rewrite(self, program: Program) -> int:
        assert program.plan is not None
        moved = 0
        for name, phase in program.phases.items():
            old = [n for n in phase.module.graph.nodes if n.op == "call_function"]
            new = _schedule(phase, name, program.plan)
            _check(old, new, name)
            if old != new:
                arrange(phase, new)
                moved += sum(a is not b for a, b in zip(old, new))
        program.gathered_bytes = {name: peak_gathered_bytes(phase)[1] for name, phase in program.phases.items()}
        return moved


def _schedule(phase: Phase, phase_name: str, plan: Plan) -> list[Node]:
    layout = CollectiveRegions.of(phase)
    launches = {(c.kind, c.axis, p): c for c in collectives(phase) for p in c.params}
    due: defaultdict[int, list[Event]] = defaultdict(list)
    for event in plan.events.get(phase_name, ()):
        due[min(event.at, len(layout.compute))].append(event)
    starts = [event.bucket for event in plan.events.get(phase_name, ()) if event.action == "start"]
    gathers = [name for name in starts if plan.bucket(name).kind == "gather"]
    next_gather = dict(itertools.pairwise(gathers))

    def launch_of(name: str) -> Collective:
        bucket = plan.bucket(name)
        return launches[bucket.kind, bucket.axis, bucket.members[0]]

    def uploads(name: str) -> list[Node]:
        return [node for node in layout.before[launch_of(name).node] if node.target is UPLOAD]

    order: list[Node] = uploads(gathers[0]) if gathers else []
    for position in range(len(layout.compute) + 1):
        for event in due[position]:
            collective = launch_of(event.bucket)
            if event.action == "wait":
                order += collective.waits
                order += [node for wait in collective.waits for node in layout.after[wait]]
                continue
            order += [node for node in layout.before[collective.node] if node.target is not UPLOAD]
            sources = [wait.all_input_nodes[0] for wait in collective.waits]
            order += [collective.node, *(source for source in sources if source is not collective.node)]
            if event.bucket in next_gather:
                order += uploads(next_gather[event.bucket])
        for node in layout.compute[position : position + 1]:
            order += with_parts(node)
    return order


def _check(old: list[Node], new: list[Node], phase_name: str) -> None:
    """Check that the plan places every node once, and every node after its inputs."""
    placed: set[Node] = set()
    for node in new:
        if node in placed:
            raise PassError(f"reorder: the plan starts or waits twice for {node.name} in {phase_name}")
        late = [n.name for n in node.all_input_nodes if n.op == "call_function" and n not in placed]
        if late:
            raise PassError(f"reorder: the plan runs {node.name} in {phase_name} before its input {late[0]}")
        placed.add(node)
    missing = [n.name for n in old if n not in placed]
    if missing:
        raise PassError(f"reorder: the plan has no place for {missing[:5]} in {phase_name}")
