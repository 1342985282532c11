"""From a lowered program and costs to an `Explanation`.

The plan and the bound are those of `graphshard.schedule`; the timeline of the regions that are left is of `estimate`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from graphshard.cost.costs import Costs
from graphshard.explain.advice import advise, limit_of
from graphshard.explain.explanation import Explanation, RegionCost, Wait
from graphshard.ir.plan import Plan
from graphshard.ir.program import Program
from graphshard.schedule.bounds import lower_bound
from graphshard.schedule.build import Settings, build
from graphshard.schedule.memory import memory_of
from graphshard.schedule.timeline import Estimate, estimate


@dataclass(frozen=True)
class Bound:
    """Seconds that no schedule of a step beats, and those of the forward and backward compute it was found for."""

    seconds: float
    compute: float


def bound_of(program: Program, costs: Costs, plan: Plan | None, *, limit: int | None, states: int) -> Bound:
    """The bound of every schedule of a partitioned program, whatever travels together.

    Args:
        plan: the one that was made; what it keeps gathered is in its own bound.
        limit: bytes that schedules may use.
        states: tensors like a parameter that the optimizer keeps.
    """
    problem = build(program, costs, Settings(optimizer_states=states)).problem
    if program.mesh.regather is not None:  # the problem has one link, and these gathers are on another
        chains = (replace(chain, gathers=()) if chain.name == "backward" else chain for chain in problem.chains)
        problem = replace(problem, chains=tuple(chains))
    seconds = lower_bound(problem, limit=math.inf if limit is None else limit)
    if plan is not None and plan.kept and plan.prediction is not None:
        seconds = min(seconds, plan.prediction.lower_bound)
    return Bound(seconds, sum(sum(chain.seconds) for chain in problem.chains if chain.name in program.phases))


def explained(
    program: Program,
    costs: Costs,
    flop: Mapping[str, float],
    bound: Bound,
    *,
    tokens: int,
    states: int,
    label: str = "",
) -> Explanation:
    """Predict the step of a lowered program.

    Args:
        flop: of the model, by dtype.
        bound: what no schedule beats, see `bound_of`.
        tokens: of one rank.
        states: tensors like a parameter that the optimizer keeps.
    """
    prediction = program.plan.prediction if program.plan else None
    timeline = estimate(program, costs)
    memory = memory_of(program, timeline)
    trained = sum(row.shard_bytes(row.dtype) for row in program.params if row.trainable)
    optimizer = costs.optimizer(trained, states)
    alive = Counter[str]()
    for value in memory.alive:
        alive[value.what] += value.num_bytes
    held_here = 0 if program.offloaded else states * trained
    alive["optimizer state"] = held_here
    held = dict(alive.most_common())
    compute, communication = timeline.total("compute"), timeline.communication
    step = timeline.seconds + optimizer
    # Schedules are no shorter than the bound less what regions save beside the items that it was found for.
    least = max(bound.seconds - max(0.0, bound.compute - timeline.compute), timeline.compute + optimizer)
    peak = memory.peak_bytes + held_here
    ideal = sum(count / costs.profile.rate(dtype).peak for dtype, count in flop.items())
    limit = "memory" if peak > costs.profile.memory_capacity else limit_of(timeline)
    return Explanation(
        model=program.model,
        label=label,
        mesh=program.mesh.shape,
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
        lower_bound_s=least,
        gap=step / least - 1,
        search_stopped=prediction is not None and prediction.stopped,
        peak_memory_bytes=peak,
        memory=held,
        memory_capacity_bytes=costs.profile.memory_capacity,
        flop=float(sum(flop.values())),
        mfu=ideal / step,
        limit=limit,
        advice=tuple(advise(program, costs, timeline, limit=limit, tokens=tokens, flop=flop, memory=held)),
        waits=tuple(
            Wait(w.name, w.phase, w.seconds, str(w.why), w.behind, timeline.delays.get(w.event, {}))
            for w in timeline.waits_for
        ),
        critical_path=_critical_path(timeline),
        slack={s.name: timeline.dag.slack[s.event] for s in timeline.steps if s.link not in ("", "host")},
        busy={"compute": compute / step, **{link: seconds / step for link, seconds in timeline.by_link().items()}},
        regions=_regions(program, costs, timeline),
        _program=program,
        _costs=costs,
        _timeline=timeline,
        _memory=memory,
    )


def _critical_path(timeline: Estimate) -> dict[str, float]:
    """Seconds by what they are, compute as one."""
    found = defaultdict[str, float](float)
    for step in timeline.critical:
        found["compute" if step.kind == "compute" else step.name] += step.seconds
    return dict(found)


def _regions(program: Program, costs: Costs, timeline: Estimate) -> tuple[RegionCost, ...]:
    found: dict[str, RegionCost] = {}
    keys = program.region_names
    for step in timeline.steps:
        if step.kind == "compute":
            key, where = keys[step.name], step.where or "the root"
            before = found.get(key)
            calls = before.calls + 1 if before else 1
            first = before.where if before else where
            seconds = step.seconds + (before.seconds * before.calls if before else 0.0)
            found[key] = RegionCost(step.name, key, first, calls, seconds / calls, key in costs.measured)
    return tuple(sorted(found.values(), key=lambda region: -region.calls * region.seconds))
