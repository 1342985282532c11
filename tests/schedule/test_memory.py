"""Memory on a predicted timeline."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

import graphshard
from graphshard.cost.costs import Costs
from graphshard.ir.graph import WAIT, kind_of, launch_of
from graphshard.ir.program import Program
from graphshard.schedule.memory_timeline import MemoryTimeline, memory_of, tensors
from graphshard.schedule.timeline import estimate
from tests.predict.test_explain import BF16, TOKENS, meta_net


def groups(memory: MemoryTimeline) -> Counter[str]:
    """Return the bytes at the peak by kind."""
    found = Counter[str]()
    for value in memory.alive:
        found[value.what] += value.num_bytes
    return found


def renamed(program: Program) -> Program:
    """Rename the buckets to numbers."""
    assert program.plan is not None
    names = {bucket.name: f"{number}" for number, bucket in enumerate(program.plan.buckets)}
    for phase in program.phases.values():
        for node in phase.module.graph.nodes:
            if "bucket" in node.meta:
                node.meta["bucket"] = names[node.meta["bucket"]]
    buckets = tuple(replace(bucket, name=names[bucket.name]) for bucket in program.plan.buckets)
    return replace(program, plan=replace(program.plan, buckets=buckets))


def test_kinds_of_live_tensors() -> None:
    """Gathered parameters and gradients, independent of bucket names; the peak is the sum of live tensors."""
    found = graphshard.explain(meta_net(width=64), (8,), example_inputs=(TOKENS,), mp_policy=BF16)
    program, costs = found._program, Costs(graphshard.profiling.load_profile("h100"))
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
    program, costs = found._program, Costs(graphshard.profiling.load_profile("h100"))
    step = estimate(program, costs)
    began = step.phases["backward"][0]
    alive = [tensor for tensor in tensors(program, step) if tensor.start <= began < tensor.end]
    read = {slot.name for slot in program.phases["backward"].inputs if slot.of == "gathered"}
    assert len(read) > 2
    gathered = {tensor.name: tensor.num_bytes for tensor in alive if tensor.what == "gathered parameters"}
    rows = [program.params[name] for name in read]
    assert gathered == {row.name: math.prod(row.shape) * row.compute_dtype.itemsize for row in rows}
    assert read <= {tensor.name for tensor in alive if tensor.what == "shards"}


@pytest.mark.slow
def test_intermediates_of_regions() -> None:
    """A region's intermediates are alive while it runs, more of them if each operator writes its result."""
    sizes = {}
    for backend in ("inductor", "eager"):
        found = graphshard.explain(meta_net(width=64), (8,), example_inputs=(TOKENS,), mp_policy=BF16, backend=backend)
        step = found._timeline
        inside = [tensor for tensor in tensors(found._program, step) if tensor.what == "inside regions"]
        calls = {call.end: step.events[call.event].node for call in step.steps if call.kind == "compute"}
        assert inside
        for tensor in inside:
            ran = next(node for end, node in calls.items() if math.isclose(end, tensor.end))
            assert tensor.num_bytes == step.workspace[ran]
        sizes[backend] = sum(tensor.num_bytes for tensor in inside)
    assert sizes["eager"] > sizes["inductor"]


@pytest.mark.slow
def test_gradients_are_alive_until_their_reduction_is_waited_for() -> None:
    """A reduction by exchange needs only the gradients and its result."""
    net = {"example_inputs": (TOKENS,), "mp_policy": BF16}
    found = graphshard.explain(meta_net(), (8,), **net)  # wide enough that gradients are not packed
    ends = {tensor.name.split()[-1]: tensor.end for tensor in tensors(found._program, found._timeline)}
    held = 0
    for node in found._program.phases["backward"].module.graph.nodes:
        if node.target is WAIT and kind_of(launch_of(node)) == "reduce":
            for source in launch_of(node).all_input_nodes:
                if (name := f"%{source.meta['number']}") in ends:
                    assert ends[name] >= found._timeline.node_times[node]
                    held += 1
    assert held
    pair = graphshard.explain(meta_net(width=64), (2,), hardware="cpu-gloo", **net)
    assert any(bucket.exchanged for bucket in pair._program.plan.buckets)
    three = graphshard.explain(
        meta_net(width=64), (3,), hardware="cpu-gloo", **net
    )  # gloo gathers into a separate buffer
    kinds = [{tensor.what for tensor in tensors(each._program, each._timeline)} for each in (found, pair, three)]
    assert ["communication buffers" in kind for kind in kinds] == [False, False, True]


@pytest.mark.slow
def test_tensors_of_a_gather_are_freed_one_by_one() -> None:
    """Tensors of a group have separate memory, and the first layer does not wait for the last one."""
    found = graphshard.explain(meta_net(), (8,), example_inputs=(TOKENS,), mp_policy=BF16)
    (root,) = (b for b in found._program.plan.buckets if b.phase == "forward" and "embed.weight" in b.members)
    assert len(root.members) > 1
    assert not root.packed
    held = {each.name: each for each in tensors(found._program, found._timeline) if each.name.startswith(root.name)}
    ends = [held[f"{root.name}: {name}"].end for name in root.members]
    sizes = [held[f"{root.name}: {name}"].num_bytes for name in root.members]
    rows = [found._program.params[name] for name in root.members]
    assert sizes == [math.prod(row.shape) * row.compute_dtype.itemsize for row in rows]
    first = root.members.index("embed.weight")
    assert all(end > ends[first] for place, end in enumerate(ends) if place != first)
