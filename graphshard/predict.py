"""From a lowered program and costs to an `Explanation`.

The timeline comes from `estimate`; whatever else simulates a program takes its place here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from graphshard.advice import advise, ends, limit_of
from graphshard.cost import Costs
from graphshard.estimate import Estimate, estimate, tensors
from graphshard.explanation import Explanation, RegionCost
from graphshard.program import Program
from graphshard.report_data import memory_of


def explained(
    program: Program, costs: Costs, flop: Mapping[str, float], *, tokens: int, states: int, label: str = ""
) -> Explanation:
    """Predict the step of a lowered program.

    Args:
        flop: of the model, by dtype.
        tokens: of one rank.
        states: tensors like a parameter that the optimizer keeps.
    """
    timeline = estimate(program, costs)
    memory = memory_of(tensors(program, timeline), timeline.seconds)
    trained = sum(row.shard_bytes(row.dtype) for row in program.params if row.trainable)
    optimizer = costs.optimizer(trained, states)
    alive = Counter[str]()
    for value in memory.alive:
        alive[value.what] += value.num_bytes
    alive["optimizer state"] = states * trained
    held = dict(alive.most_common())
    compute, communication = timeline.total("compute"), timeline.total("gather", "reduce")
    step = timeline.seconds + optimizer
    first, last = ends(timeline)
    # LB1 and LB3: what is exposed at both ends and all compute, and a link that is never idle.
    bound = max(compute + first + last, communication) + optimizer
    peak = memory.peak_bytes + states * trained
    ideal = sum(count / costs.profile.rate(dtype).peak for dtype, count in flop.items())
    exposed: dict[str, float] = {}
    for wait in timeline.steps:
        if wait.kind == "exposed":
            exposed[wait.name] = exposed.get(wait.name, 0.0) + wait.seconds
    limit = "memory" if peak > costs.profile.memory_capacity else limit_of(timeline)
    return Explanation(
        model=program.model,
        label=label,
        mesh={axis.name: axis.size for axis in costs.mesh or (program.axis,)},
        hardware=costs.profile.name,
        profile_hash=costs.profile.hash,
        network=costs.network,
        plan_hash=program.plan.hash if program.plan else "",
        tokens=tokens,
        step_time_s=step,
        compute_s=compute,
        optimizer_s=optimizer,
        communication_s=communication,
        exposed_comm_s=timeline.total("exposed"),
        lower_bound_s=bound,
        gap=step / bound - 1,
        peak_memory_bytes=peak,
        memory=held,
        memory_capacity_bytes=costs.profile.memory_capacity,
        flop=float(sum(flop.values())),
        mfu=ideal / step,
        limit=limit,
        advice=tuple(advise(program, costs, timeline, limit=limit, tokens=tokens, flop=flop, memory=held)),
        exposed=dict(sorted(exposed.items(), key=lambda item: -item[1])),
        regions=_regions(program, costs, timeline),
        _program=program,
        _costs=costs,
        _timeline=timeline,
        _memory=memory,
    )


def _regions(program: Program, costs: Costs, timeline: Estimate) -> tuple[RegionCost, ...]:
    found: dict[str, RegionCost] = {}
    keys = program.region_names
    for step in timeline.steps:
        if step.kind == "compute":
            key, where = keys[step.name], step.where or "the root"
            before = found.get(key)
            calls = before.calls + 1 if before else 1
            first = before.where if before else where
            found[key] = RegionCost(step.name, key, first, calls, step.seconds, key in costs.measured)
    return tuple(sorted(found.values(), key=lambda region: -region.calls * region.seconds))
