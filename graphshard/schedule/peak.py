"""Bytes that a program takes with a plan, counted from operator to operator: the plan may be another rank's.

A plan's own prediction is that of the program that it was made for, and counts from one place where something is needed
or ready to the next one. What is counted is the same: see `footprint`, and `problem` for what the plan adds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from torch.fx import Node

from graphshard.cost.costs import Costs
from graphshard.ir.collective_regions import Collective, last_use
from graphshard.ir.plan import Bucket, Event, Plan
from graphshard.ir.program import Phase, Program
from graphshard.schedule.build import seconds_between
from graphshard.schedule.by_unit import first_use, is_scalar
from graphshard.schedule.copies import copied
from graphshard.schedule.footprint import base_bytes, lasting_beside
from graphshard.schedule.known import collectives_of, layout_of
from graphshard.schedule.shared import saved_memory

Left = tuple[tuple[int, float], ...]


def peak_of(plan: Plan, program: Program, costs: Costs, optimizer_states: int) -> int:
    """Most bytes alive in forward and backward that follow a plan, beside so many tensors of the optimizer.

    Args:
        program: partitioned, of all blocks; what the plan keeps gathered stays so.
    """
    state = optimizer_states * sum(row.shard_bytes(row.dtype) for row in program.params if row.trainable)
    most = 0
    left: Left = ()
    for name, phase in program.phases.items():
        counted = _Counted(program, phase, plan, name, costs, left)
        most, left = max(most, *counted.bytes()), counted.left
    return state + most


class _Counted:
    """One phase, of which each operator is an item."""

    def __init__(self, program: Program, phase: Phase, plan: Plan, name: str, costs: Costs, left: Left) -> None:
        self.program, self.layout = program, layout_of(phase)
        self.position = {**self.layout.index, phase.module.graph.output_node(): len(self.layout.compute)}
        self.of = {(c.kind, c.axis, c.params[0]): c for c in collectives_of(phase) if not is_scalar(program, c)}
        buckets = (b for b in plan.buckets if b.phase == name and (b.kind, b.axis, b.members[0]) in self.of)
        self.buckets = {bucket.name: bucket for bucket in buckets}
        self.events = [event for event in plan.events[name] if event.bucket in self.buckets]
        reduced = {param for b in self.buckets.values() if b.kind == "reduce" for param in b.members}
        self.second = {b.name for b in self.buckets.values() if b.kind == "all_reduce" and b.members[0] in reduced}
        # By launch of a first leg where it is started, and the bytes of its gradient, which are the plan's from there.
        self.started: dict[Node, int] = {}
        self.sent: dict[Node, int] = {}
        launches = []
        for event in self.events:
            bucket = self.buckets[event.bucket]
            if event.action == "start" and bucket.kind != "gather" and bucket.name not in self.second:
                members = self._collectives(bucket)
                launches += members
                self.started |= dict.fromkeys((c.node for c in members), max(event.at, 1))
                self.sent |= {c.node: self._bytes(c) for c in members}
        self.end = max(len(self.layout.compute), 1)
        cuts = range(self.end + 1)
        seconds = [seconds_between(phase.module.graph, self.layout, *item, costs) for item in pairwise(cuts)]
        copies = copied(self.layout, cuts, seconds, costs, left)
        self.left = copies.left
        saved = saved_memory(program)
        alive = base_bytes(phase, self.layout, cuts, launches, self.started, self.sent, copies.until, saved)
        beside = lasting_beside(program, phase)
        self.base = [beside + a + b for a, b in zip(alive, copies.beside)]
        self.held = 0
        self.dies: defaultdict[int, int] = defaultdict(int)  # bytes of gathered tensors by the position they die at

    def bytes(self) -> Iterator[int]:
        """Those that are alive whenever they may be most, in order."""
        due: defaultdict[int, list[Event]] = defaultdict(list)
        for event in self.events:
            due[event.at].append(event)
        made: defaultdict[int, int] = defaultdict(int)
        for node, position in self.started.items():
            made[position - 1] += self.sent[node]
        for position in range(self.end + 1):
            self.held -= self.dies.pop(position, 0)
            between = min(self.base[max(position - 1, 0)], self.base[min(position, self.end - 1)])
            for event in due[position]:
                yield between + self._event(event, self.buckets[event.bucket])
            if position < self.end:
                self.held += made[position]
                yield self.base[position] + self.held

    def _event(self, event: Event, bucket: Bucket) -> int:
        """Bytes of what the plan holds when something is started or waited for; packed tensors are there twice."""
        members = self._collectives(bucket)
        packed = sum(self._bytes(self.of[bucket.kind, bucket.axis, param]) for param in bucket.packed)
        num_bytes = sum(map(self._bytes, members))
        if bucket.kind == "gather":
            if event.action == "wait":
                return self.held + packed
            for member in members:
                last = max(first_use([member], self.layout), last_use(member.waits, self.layout, self.position))
                self.dies[min(last, self.end - 1) + 1] += self._bytes(member)
            self.held += num_bytes
            return self.held
        if event.action == "wait":  # gradients are let go of, or what was scattered of them
            self.held -= num_bytes
            return self.held
        if bucket.name in self.second:  # what was scattered is there twice meanwhile
            self.held += num_bytes
            return self.held
        return self.held + packed

    def _collectives(self, bucket: Bucket) -> list[Collective]:
        return [self.of[bucket.kind, bucket.axis, param] for param in bucket.members]

    def _bytes(self, collective: Collective) -> int:
        return self.program.params[collective.params[0]].sent_bytes(collective.kind)
