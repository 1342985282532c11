"""Between which seconds a step lies, as far as constants of the machine are not known well.

The schedule is fixed. Each number of the profile that has a range is replaced by samples, and regions, collectives and
the clock are evaluated once for all of them. What the model leaves out is not in it: docs/explain.md says how far
predictions of published steps were off.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from graphshard.cost.costs import Costs
from graphshard.cost.profile import sampled
from graphshard.cost.scalars import Scalar
from graphshard.ir.plan import Plan
from graphshard.ir.program import Program
from graphshard.predict.advice import advise, limit_of
from graphshard.predict.explanation import Explanation, Inside, RegionCost, Wait
from graphshard.predict.training_config import Training, training_cost
from graphshard.schedule.bounds import lower_bound
from graphshard.schedule.build import PhaseMap, Settings, build
from graphshard.schedule.clock import HOST_LINKS, run
from graphshard.schedule.memory import memory_of
from graphshard.schedule.problem import Chain
from graphshard.schedule.timeline import Estimate, estimate, timed_events
from graphshard.schedule.ways import on_one_link, ways_of

# Of the samples: one in ten is below, one in ten is above.
PERCENTILES = (10, 90)


def step_range(
    program: Program, costs: Costs, *, trained: int, training: Training, middle: float, microbatches: int = 1
) -> tuple[float, float]:
    """Seconds between which four of five samples of a step lie; `middle` twice if no constant has a range.

    Args:
        trained: bytes of the shards of trained parameters.
        training: the optimizer, and what it follows.
        middle: what the constants themselves give.
        microbatches: forwards and backwards of a step.
    """
    if not costs.profile.ranges:
        return middle, middle
    drawn = replace(costs, profile=sampled(costs.profile))
    events = timed_events(program, costs, drawn)
    step = microbatches * run(events, drawn.profile.contention).step(events)
    step += (microbatches - 1) * drawn.addition(trained) + training.update_seconds(drawn, program.mesh, trained)
    return between(step, middle)


def between(samples: Scalar, middle: float) -> tuple[float, float]:
    """The percentiles of samples, and what the constants themselves give between them."""
    low, high = np.percentile(samples, PERCENTILES)
    return min(float(low), middle), max(float(high), middle)


@dataclass(frozen=True)
class Bound:
    """Seconds that no schedule of a step beats, and those of the forward and backward compute it was found for.

    What the model communicates at once is compute here: it is done where it stands.
    """

    seconds: float
    compute: float


def bound_of(program: Program, costs: Costs, plan: Plan | None, *, limit: int | None, states: int) -> Bound:
    """The bound of every schedule of a partitioned program, whatever travels together.

    Args:
        plan: the one that was made; what it keeps gathered is in its own bound.
        limit: bytes that schedules may use.
        states: tensors like a parameter that the optimizer keeps.
    """
    built = build(program, costs, Settings(optimizer_states=states))
    problem = built.problem
    if not all(on_one_link(costs, ways_of(program, phase)) for phase in program.phases.values()):
        problem = replace(problem, chains=tuple(_without_experts(chain, built.maps) for chain in problem.chains))
    seconds = lower_bound(problem, limit=math.inf if limit is None else limit)
    if plan is not None and plan.kept and plan.prediction is not None:
        seconds = min(seconds, plan.prediction.lower_bound)
    if program.bound is not None:
        seconds = min(seconds, program.bound)
    return Bound(seconds, sum(chain.elapsed[-1] for chain in problem.chains if chain.name in program.phases))


def _without_experts(chain: Chain, maps: Mapping[str, PhaseMap]) -> Chain:
    """A chain without the transfers of parameters that lie on another mesh."""
    if chain.name not in maps:
        return chain
    atoms = [atom for of_kind in maps[chain.name].atoms.values() for atom in of_kind]
    gone = {atom.name for atom in atoms if any(row.expert for row in atom.rows)}
    gathers = tuple(transfer for transfer in chain.gathers if transfer.name not in gone)
    reductions = tuple(transfer for transfer in chain.reductions if transfer.name not in gone)
    return replace(chain, gathers=gathers, reductions=reductions)


def explained(
    program: Program,
    costs: Costs,
    flop: Mapping[str, float],
    bound: Bound,
    *,
    tokens: int,
    training: Training,
    label: str = "",
    mesh: Mapping[str, int] | None = None,
    microbatches: int = 1,
) -> Explanation:
    """Predict the step of a lowered program.

    Args:
        flop: of the model, by dtype.
        bound: what no schedule beats, see `bound_of`.
        tokens: of one rank, in a microbatch.
        training: the optimizer, and what it follows.
        mesh: sizes by axis, where some were made one for the program.
        microbatches: forwards and backwards of a step, each of which gathers and reduces; gradients are added up.
    """
    prediction = program.plan.prediction if program.plan else None
    timeline = estimate(program, costs)
    memory = memory_of(program, timeline)
    trained = program.params.trained_bytes
    optimizer = training.update_seconds(costs, program.mesh, trained)
    adding = (microbatches - 1) * costs.addition(trained)
    unknown = optimizer - costs.optimizer(trained, training.optimizer_states)  # to the problem of the bound
    alive = Counter[str]()
    for value in memory.alive:
        alive[value.what] += value.num_bytes
    held_here = 0 if program.offloaded else training.optimizer_states * trained
    alive["optimizer state"] = held_here
    before = trained if microbatches > 1 and not program.offloaded else 0
    if before:
        alive["gradients of earlier microbatches"] = before
    temporary = 0 if program.offloaded else training.temporary_bytes(trained)
    at_update = {"shards": alive["shards"], "gradients": trained, "optimizer state": held_here}
    if temporary and sum(at_update.values()) + temporary > alive.total():
        alive = Counter({**at_update, "optimizer temporaries": temporary})
    held, peak = dict(alive.most_common()), alive.total()
    compute, communication = timeline.total("compute"), timeline.communication
    step = microbatches * timeline.seconds + adding + optimizer
    # Schedules are no shorter than the bound less what regions save beside the items that it was found for.
    busy = timeline.compute + timeline.at_once
    least = max(bound.seconds + unknown - max(0.0, bound.compute - busy), busy + optimizer)
    least += (microbatches - 1) * (least - optimizer) + adding
    ideal = microbatches * sum(count / costs.profile.rate(dtype).peak for dtype, count in flop.items())
    limit = "memory" if peak > costs.profile.memory_capacity else limit_of(timeline)
    size = dict(mesh or program.mesh.shape)
    stages = program.mesh.pipeline
    same = [axis.size for axis in (*program.mesh.tensors, *([stages] if stages else []))]
    data_ranks = program.mesh.size // math.prod(same)
    between = step_range(program, costs, trained=trained, training=training, middle=step, microbatches=microbatches)
    return Explanation(
        model=program.model,
        label=label,
        mesh=size,
        data_ranks=data_ranks,
        hardware=costs.profile.name,
        profile_hash=costs.profile.hash,
        network=costs.network,
        plan_hash=program.plan.hash if program.plan else "",
        tokens=microbatches * tokens,
        microbatches=microbatches,
        step_time_s=step,
        step_range_s=between,
        compute_s=microbatches * compute + adding,
        optimizer_s=optimizer,
        communication_s=microbatches * communication,
        exposed_comm_s=microbatches * timeline.total("exposed"),
        head_s=microbatches * timeline.ends.head,
        tail_s=microbatches * timeline.ends.tail,
        lower_bound_s=least,
        gap=step / least - 1,
        search_stopped=prediction is not None and prediction.stopped,
        peak_memory_bytes=peak,
        memory=held,
        memory_capacity_bytes=costs.profile.memory_capacity,
        flop=microbatches * float(sum(flop.values())),
        mfu=ideal / step,
        limit=limit,
        advice=tuple(advise(program, costs, timeline, limit=limit, tokens=tokens, flop=flop, memory=held)),
        waits=tuple(
            Wait(w.name, w.phase, w.seconds, str(w.why), w.behind, timeline.delays.get(w.event, {}))
            for w in timeline.waits_for
        ),
        critical_path=_critical_path(timeline),
        slack=_slack(timeline),
        busy={
            what: microbatches * seconds / step for what, seconds in (("compute", compute), *timeline.by_link().items())
        },
        regions=_regions(program, costs, timeline),
        cost=training_cost(
            training,
            step_tokens=microbatches * tokens * data_ranks,
            seconds=step,
            between=between,
            ranks=math.prod(size.values()),
        ),
        _make=lambda: Inside(program, costs, timeline, memory),
    )


def _critical_path(timeline: Estimate) -> dict[str, float]:
    """Seconds by what they are, compute as one."""
    found = defaultdict[str, float](float)
    for step in timeline.critical:
        found["compute" if step.kind == "compute" else step.name] += step.seconds
    return dict(found)


def _slack(timeline: Estimate) -> dict[str, float]:
    """By name; of what the model communicates the least, as several have one name."""
    found: dict[str, float] = {}
    for step in timeline.steps:
        if step.link not in ("", *HOST_LINKS):
            slack = timeline.dag.slack[step.event]
            found[step.name] = min(slack, found.get(step.name, slack))
    return found


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
