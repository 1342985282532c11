"""What is alive on a predicted timeline."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import graphshard
from graphshard.cost.costs import Costs
from graphshard.ir.program import Program
from graphshard.schedule.memory import Memory, memory_of, tensors
from graphshard.schedule.timeline import estimate
from tests.explain.test_explain import BF16, TOKENS, meta_net


def groups(memory: Memory) -> Counter[str]:
    """Bytes at the peak by what they are."""
    found = Counter[str]()
    for value in memory.alive:
        found[value.what] += value.num_bytes
    return found


def renamed(program: Program) -> Program:
    """The same, with buckets whose names say nothing."""
    assert program.plan is not None
    names = {bucket.name: f"{number}" for number, bucket in enumerate(program.plan.buckets)}
    for phase in program.phases.values():
        for node in phase.module.graph.nodes:
            if "bucket" in node.meta:
                node.meta["bucket"] = names[node.meta["bucket"]]
    buckets = tuple(replace(bucket, name=names[bucket.name]) for bucket in program.plan.buckets)
    return replace(program, plan=replace(program.plan, buckets=buckets))


def test_what_buckets_hold_is_read_from_their_kind() -> None:
    """Gathered parameters and gradients, whatever the bucket is called; the peak is the sum of what is alive."""
    found = graphshard.explain(meta_net(width=64), (8,), example_inputs=(TOKENS,), mp_policy=BF16)
    program, costs = found._program, Costs(graphshard.load_profile("h100"))
    memory = memory_of(program, estimate(program, costs))
    program = renamed(program)
    other = memory_of(program, estimate(program, costs))
    assert groups(other) == groups(memory)
    assert groups(memory)["gathered parameters"] > 0
    assert sum(groups(memory).values()) == memory.peak_bytes == max(point.num_bytes for point in memory.points)


def test_parameters_that_stay_gathered_are_alive_between_the_phases() -> None:
    """Under the name of their shards, which are alive, too."""
    options = {"example_inputs": (TOKENS,), "mp_policy": BF16}
    found = graphshard.explain(meta_net(width=64), (8,), reshard_after_forward=False, **options)
    program, costs = found._program, Costs(graphshard.load_profile("h100"))
    step = estimate(program, costs)
    began = step.phases["backward"][0]
    alive = [tensor for tensor in tensors(program, step) if tensor.start <= began < tensor.end]
    read = {slot.name for slot in program.phases["backward"].inputs if slot.of == "gathered"}
    assert len(read) > 2
    gathered = {tensor.name: tensor.num_bytes for tensor in alive if tensor.what == "gathered parameters"}
    rows = [program.params[name] for name in read]
    assert gathered == {row.name: math.prod(row.shape) * row.compute_dtype.itemsize for row in rows}
    assert read <= {tensor.name for tensor in alive if tensor.what == "shards"}
