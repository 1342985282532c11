"""From a lowered program and costs to an `Explanation`, with advice read off the critical path.

The gain of a change is exact for the same schedule: the longest path through the timeline's graph with other lengths.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.fx import Node

from graphshard.cost.costs import MODEL_KINDS, Costs
from graphshard.cost.profile import sampled
from graphshard.cost.scalars import Scalar
from graphshard.ir.plan import Plan
from graphshard.ir.program import Phase, Program
from graphshard.predict.explanation import Explanation, ExposedWait, Inside, RegionCost, training_cost
from graphshard.predict.training_config import Training
from graphshard.schedule.axis_links import axes_of, on_one_link
from graphshard.schedule.bounds import lower_bound
from graphshard.schedule.build_problem import PhaseMap, Settings, build
from graphshard.schedule.clock import HOST_LINKS, TimedCall, TimedWait, run
from graphshard.schedule.memory_timeline import memory_of
from graphshard.schedule.problem import Chain
from graphshard.schedule.timeline import Estimate, Step, estimate, timed_events
from graphshard.torch_compat.torch_ops import pytree
from graphshard.utils.text import format_bytes, format_seconds

# Up to this share of communication on the critical path, compute is what limits a step.
HIDDEN = 0.1
# Below this share no change of communication helps.
NEGLIGIBLE = 0.02
# Of the samples of a step: one in ten is below, one in ten above.
PERCENTILES = (10, 90)
# Keys of `Explanation.memory`.
OPTIMIZER_STATE, EARLIER_GRADIENTS = "optimizer state", "gradients of earlier microbatches"
OPTIMIZER_TEMPORARIES = "optimizer temporaries"


class Bound(NamedTuple):
    """Seconds that no schedule beats, and its compute with the model's synchronous communication, which stays."""

    seconds: float
    compute: float


def bound_of(program: Program, costs: Costs, plan: Plan | None, *, limit: int | None, states: int) -> Bound:
    """Return the bound of every schedule of a partitioned program that uses at most `limit` bytes.

    Parameters that the chosen plan keeps gathered are in its own bound.
    """
    built = build(program, costs, Settings(optimizer_states=states))
    problem = built.problem
    if not all(on_one_link(costs, axes_of(program, phase)) for phase in program.phases.values()):
        problem = replace(problem, chains=tuple(_without_experts(chain, built.maps) for chain in problem.chains))
    seconds = lower_bound(problem, limit=math.inf if limit is None else limit)
    if plan is not None and plan.kept and plan.prediction is not None:
        seconds = min(seconds, plan.prediction.lower_bound)
    if program.bound is not None:
        seconds = min(seconds, program.bound)
    return Bound(seconds, sum(chain.elapsed[-1] for chain in problem.chains if chain.name in program.phases))


def _without_experts(chain: Chain, maps: Mapping[str, PhaseMap]) -> Chain:
    """Drop the transfers of parameters that lie on another mesh."""
    atoms = [atom for of_kind in maps[chain.name].atoms.values() for atom in of_kind] if chain.name in maps else []
    gone = {atom.name for atom in atoms if any(row.expert for row in atom.rows)}
    gathers, reductions = (tuple(t for t in of if t.name not in gone) for of in (chain.gathers, chain.reductions))
    return replace(chain, gathers=gathers, reductions=reductions)


def range_of(samples: Scalar, middle: float) -> tuple[float, float]:
    """Return the percentiles of samples, widened to contain the value of the constants themselves."""
    low, high = np.percentile(samples, PERCENTILES)
    return min(float(low), middle), max(float(high), middle)


def _step_range(
    program: Program, costs: Costs, *, trained: int, training: Training, middle: float, microbatches: int
) -> tuple[float, float]:
    """Return the range of a step's seconds from samples of the profile's numbers; the schedule is fixed."""
    if not costs.profile.ranges:
        return middle, middle
    drawn = replace(costs, profile=sampled(costs.profile))
    events = timed_events(program, costs, drawn)
    step = microbatches * run(events, drawn.profile.contention).step(events)
    step += (microbatches - 1) * drawn.addition(trained) + training.update_seconds(drawn, program.mesh, trained)
    return range_of(step, middle)


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
    fsdp2: Callable[[], Estimate | None] = lambda: None,
) -> Explanation:
    """Predict the step of a lowered program.

    Args:
        flop: of the model, by dtype.
        tokens: of one rank, in a microbatch.
        mesh: sizes by axis, where the program has several axes merged into one.
        fsdp2: predicts the same program in FSDP2's order, for reports.
    """
    profile = costs.profile
    prediction = program.plan.prediction if program.plan else None
    timeline = estimate(program, costs)
    trained = program.params.trained_bytes
    lasting = {OPTIMIZER_STATE: 0, EARLIER_GRADIENTS: 0}
    if not program.offloaded:
        lasting = {
            OPTIMIZER_STATE: training.optimizer_states * trained,
            EARLIER_GRADIENTS: trained if microbatches > 1 else 0,
        }
    memory = whole = memory_of(program, timeline, lasting)
    optimizer = training.update_seconds(costs, program.mesh, trained)
    adding = (microbatches - 1) * costs.addition(trained)
    step = microbatches * timeline.seconds + adding + optimizer

    if not program.offloaded:
        update = {"shards": memory.by_kind()["shards"], "gradients": trained, OPTIMIZER_STATE: lasting[OPTIMIZER_STATE]}
        temporary = training.temporary_bytes(trained)
        whole = memory.then(timeline.seconds, {**update, **({OPTIMIZER_TEMPORARIES: temporary} if temporary else {})})
    alive = whole.by_kind()
    alive[OPTIMIZER_STATE] = lasting[OPTIMIZER_STATE]
    held, peak = dict(alive.most_common()), alive.total()

    # Schedules are no shorter than the bound, minus the compute that regions save compared with its items.
    busy = timeline.compute + timeline.at_once
    not_bounded = optimizer - costs.optimizer(trained, training.optimizer_states)
    least = max(bound.seconds + not_bounded - max(0.0, bound.compute - busy), busy + optimizer)
    least += (microbatches - 1) * (least - optimizer) + adding
    limit = "memory" if peak > profile.memory_capacity else limit_of(timeline)
    ideal = microbatches * sum(count / profile.rate(dtype).peak for dtype, count in flop.items())
    compute = timeline.total("compute")
    links = {"compute": compute, **timeline.by_link()}
    critical_path = defaultdict[str, float](float)
    for item in timeline.critical:
        critical_path["compute" if item.kind == "compute" else item.name] += item.seconds
    sizes = dict(mesh or program.mesh.shape)
    not_data = filter(None, (*program.mesh.tensors, program.mesh.pipeline))
    data_ranks = program.mesh.size // math.prod(axis.size for axis in not_data)
    between = _step_range(program, costs, trained=trained, training=training, middle=step, microbatches=microbatches)
    found = Explanation(
        model=program.model,
        label=label,
        mesh=sizes,
        data_ranks=data_ranks,
        hardware=profile.name,
        profile_hash=profile.hash,
        network=costs.network,
        plan_hash=program.plan.hash if program.plan else "",
        tokens=microbatches * tokens,
        microbatches=microbatches,
        step_time_s=step,
        step_range_s=between,
        compute_s=microbatches * compute + adding,
        optimizer_s=optimizer,
        communication_s=microbatches * timeline.communication,
        exposed_comm_s=microbatches * timeline.total("exposed"),
        head_s=microbatches * timeline.ends.head,
        tail_s=microbatches * timeline.ends.tail,
        lower_bound_s=least,
        gap=step / least - 1,
        search_stopped=prediction is not None and prediction.stopped,
        peak_memory_bytes=peak,
        memory=held,
        memory_capacity_bytes=profile.memory_capacity,
        flop=microbatches * float(sum(flop.values())),
        mfu=ideal / step,
        limit=limit,
        advice=tuple(advise(program, costs, timeline, limit=limit, tokens=tokens, flop=flop, memory=held)),
        waits=tuple(
            ExposedWait(w.name, w.phase, w.seconds, str(w.why), w.behind, timeline.delays.get(w.event, {}))
            for w in timeline.waits_for
        ),
        critical_path=dict(critical_path),
        slack=_slack(timeline),
        busy={name: microbatches * seconds / step for name, seconds in links.items()},
        regions=_regions(program, costs, timeline),
        _make=lambda: Inside(program, costs, timeline, memory, whole, fsdp2),
    )
    notes = tuple(_notes(program, costs, found, training, trained))
    return replace(found, cost=training_cost(training, found), notes=notes)


def count_tokens(args: Any, kwargs: Any) -> int:
    """Return the elements of `input_ids` or `tokens`, or else of the largest integer tensor, or the batch size."""
    leaves = pytree.tree_flatten_with_path((args, kwargs))[0]
    tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    named = [leaf.numel() for path, leaf in tensors if getattr(path[-1], "key", None) in ("input_ids", "tokens")]
    others = [leaf.numel() for _, leaf in tensors if not leaf.is_floating_point() and leaf.dtype != torch.bool]
    return (*named, max(others, default=0) or next((leaf.shape[0] for _, leaf in tensors), 1))[0]


def _notes(program: Program, costs: Costs, found: Explanation, training: Training, trained: int) -> Iterator[str]:
    """Yield what a reader has to know of the prediction: no loss, fewer GPUs, and what it was compared with."""
    forward = program.phases.get("forward")
    mesh = program.mesh
    if "backward" in program.phases and forward is not None and mesh.pipeline is None and not _has_loss(forward):
        yield (
            "the call returns no loss: backward starts from gradients of its outputs, and the time and memory of the "
            "loss are missing. Let forward return the loss, or give the inputs that make it, such as labels"
        )
    only_shards = len(mesh.every_axis) == 1 and mesh.experts is None and not program.sizes
    if only_shards and training.global_batch is None:
        yield from _fewer_ranks(program, costs, found, training, trained)
    if costs.profile.device != "cpu" and found.num_ranks > 1:
        yield "predicted, not measured: predictions were never compared with several GPUs of ours"


def _has_loss(forward: Phase) -> bool:
    pairs = zip(forward.results, forward.outputs)
    values = (node.meta.get("val") for node, slot in pairs if slot.kind == "output" and isinstance(node, Node))
    floats = (value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point())
    return any(all(isinstance(size, int) and size == 1 for size in value.shape) for value in floats)


def _fewer_ranks(program: Program, costs: Costs, found: Explanation, training: Training, trained: int) -> Iterator[str]:
    """Yield that fewer ranks have at least the same throughput, with the same plan and the same inputs of each rank."""
    ranks = program.mesh.shard.size
    state = found.memory.get("shards", 0) + found.memory.get(OPTIMIZER_STATE, 0)
    best = 0, 0.0
    halves = {ranks >> bits for bits in range(1, ranks.bit_length() - 1)}
    for fewer in sorted(halves | {count for count in (costs.profile.ranks_per_node,) if 1 < count < ranks}):
        mesh, ratio = program.mesh.resized("shard", fewer), ranks / fewer
        fits = found.peak_memory_bytes + (ratio - 1) * state <= found.memory_capacity_bytes
        there = replace(costs, mesh=mesh)
        events = timed_events(replace(program, mesh=mesh), there, there)
        step = found.microbatches * run(events, there.profile.contention).step(events)
        step += training.update_seconds(there, mesh, int(trained * ratio))
        if fits:
            best = max(best, (fewer, found.tokens * fewer / step), key=lambda each: each[1])
    if best[1] >= found.tokens_per_second:
        yield (
            f"{best[0]} GPUs would be as fast with the same inputs of each: {best[1]:,.0f} tokens/s, and "
            f"{found.tokens_per_second:,.0f} with {ranks}"
        )


def _slack(timeline: Estimate) -> dict[str, float]:
    """Return slack by name; the least of the model's collectives that share a name."""
    found: dict[str, float] = {}
    for step in timeline.steps:
        if step.link not in ("", *HOST_LINKS):
            slack = timeline.dag.slack[step.event]
            found[step.name] = min(slack, found.get(step.name, slack))
    return found


def _regions(program: Program, costs: Costs, timeline: Estimate) -> tuple[RegionCost, ...]:
    names = program.region_names
    calls: dict[str, list[Step]] = defaultdict(list)
    for step in timeline.steps:
        if step.kind == "compute":
            calls[names[step.name]].append(step)
    found = [
        RegionCost(
            name=steps[-1].name,
            key=key,
            where=steps[0].where or "the root",
            calls=len(steps),
            seconds=sum(step.seconds for step in steps) / len(steps),
            measured=key in costs.measured,
        )
        for key, steps in calls.items()
    ]
    return tuple(sorted(found, key=lambda region: -region.calls * region.seconds))


def critical_parts(timeline: Estimate) -> dict[str, list[Step]]:
    """Group the critical path's steps, in order.

    They are calls of regions ("compute"); transfers that the first call waits for ("head"), that are launched after the
    last call ("tail"), and others ("link"), which could be hidden; and the model's own communication ("model").
    """
    events = timeline.events
    calls = [index for index, event in enumerate(events) if isinstance(event, TimedCall)]
    first, last = (calls[0], calls[-1]) if calls else (len(events), -1)
    before = {event.launch for event in events[:first] if isinstance(event, TimedWait)}
    parts: dict[str, list[Step]] = {name: [] for name in ("compute", "head", "tail", "link", "model")}
    for step in timeline.critical:
        if step.kind == "compute":
            parts["compute"].append(step)
        elif step.kind in MODEL_KINDS:
            parts["model"].append(step)
        elif step.event in before:
            parts["head"].append(step)
        else:
            parts["tail" if step.event > last else "link"].append(step)
    return parts


def limit_of(timeline: Estimate, share: float = HIDDEN) -> str:
    """Return the longest of "head", "tail", "link" and "model" on the critical path; "compute" below the share."""
    parts = critical_parts(timeline)
    seconds = {name: _seconds(parts[name]) for name in ("head", "tail", "link", "model")}
    if sum(seconds.values()) <= share * timeline.seconds:
        return "compute"
    return max(seconds, key=lambda name: seconds[name])


def advise(
    program: Program,
    costs: Costs,
    timeline: Estimate,
    *,
    limit: str,
    tokens: int,
    flop: Mapping[str, float],
    memory: Mapping[str, int],
) -> Iterator[str]:
    """Yield changes that would help, one sentence each; the most important first.

    `limit` is as in `limit_of`, or "memory"; `memory` are bytes at the peak.
    """
    compute = timeline.total("compute")
    communication = timeline.communication - timeline.total(*MODEL_KINDS)  # which may be hidden
    parts, gains = critical_parts(timeline), timeline.dag.gains(timeline.dag.end)
    if limit == "memory":
        yield _memory(program, costs, tokens, memory)
    if limit == "compute":
        share = _seconds(parts["compute"]) / timeline.seconds
        limit = limit_of(timeline, NEGLIGIBLE)
        most = "only faster kernels or less recomputation help" if limit == "compute" else "faster kernels help most"
        yield f"compute is {share:.1%} of the critical path; {most}"
    if communication > compute:
        rates = {dtype: costs.profile.rate(dtype) for dtype in flop}
        speeds = {dtype: rate.peak * min(rate.matmul, costs.profile.sustained) for dtype, rate in rates.items()}
        multiplying = sum(count / speeds[dtype] for dtype, count in flop.items())
        hidden = tokens * communication / max(multiplying, 1e-12)
        yield (
            f"communication takes {format_seconds(communication)} and compute {format_seconds(compute)} at "
            f"{tokens:,} tokens per rank: it hides from about {hidden:,.0f} tokens per rank, where the multiplications "
            "alone take as long"
        )
    elif limit == "link":
        worst = max(parts["link"], key=lambda step: (gains.get(step.event, 0.0), step.seconds))
        yield (
            f"communication ({format_seconds(communication)}) is shorter than compute ({format_seconds(compute)}), but "
            f"not where it is needed: {worst.name} ({format_seconds(worst.seconds)}) is on the critical path, "
            f"{_shorter(gains.get(worst.event, 0.0))} without it; other units= or more tokens per rank give it more "
            "to hide behind"
        )
    if limit == "link" or communication > compute:
        yield from _fewer_bytes(program, timeline)
    if limit == "model":
        yield _model(program, costs, timeline, parts["model"])
    if limit in ("head", "tail"):
        worst = max(parts[limit], key=lambda step: step.seconds)
        yield (
            f"the {limit} is {worst.name} ({format_bytes(worst.num_bytes)}, {format_seconds(worst.seconds)}), "
            f"which no schedule hides; {_shorter(gains.get(worst.event, 0.0))} without it: make its unit smaller "
            "with units=, or more tokens per rank"
        )


def _model(program: Program, costs: Costs, timeline: Estimate, steps: list[Step]) -> str:
    """Advise on the model's own collectives, for the axis where they take longest."""
    seconds = defaultdict[str, float](float)
    for step in steps:
        seconds[step.name.rpartition(" ")[2]] += step.seconds
    worst = max(seconds, key=lambda name: seconds[name])
    axis = program.mesh.named(worst)
    where = "in a node" if costs.link(axis) == "node" else "between nodes"
    return (
        f"the model's own collectives over {worst} ({axis.size} ranks, {where}) are {format_seconds(seconds[worst])}, "
        f"{seconds[worst] / timeline.seconds:.1%} of forward and backward; they run where the model has them, and "
        f"nothing hides them: fewer ranks along {worst}"
        + (", which share a node, make them cheaper" if where == "between nodes" else " have fewer bytes to send each")
    )


def _fewer_bytes(program: Program, timeline: Estimate) -> Iterator[str]:
    again = [step for step in timeline.steps if step.kind == "gather" and step.phase == "backward"]
    if again:
        kept = sum(row.sent_bytes("gather") for row in program.params if row.reshard and row.num_shards > 1)
        gain = timeline.seconds - timeline.dag.step({step.event: 0.0 for step in again})
        yield (
            f"reshard_after_forward=False drops the gathers of backward, {format_seconds(_seconds(again))}, and "
            f"keeps {format_bytes(kept)} of parameters; {_shorter(gain)} with the rest of this schedule"
        )
    if any(row.trainable and row.reduce_dtype == torch.float32 for row in program.params):
        reductions = [step for step in timeline.steps if step.kind == "reduce"]
        gain = timeline.seconds - timeline.dag.step({step.event: step.seconds / 2 for step in reductions})
        yield (
            f"reducing in bfloat16 instead of float32 halves the reductions, {format_seconds(_seconds(reductions))}, "
            f"and rounds gradients; {_shorter(gain)} with the rest of this schedule"
        )


def _memory(program: Program, costs: Costs, tokens: int, memory: Mapping[str, int]) -> str:
    """Advise on memory: state shrinks with ranks, and the rest with tokens, apart from gathered parameters."""
    ranks, room = program.mesh.shard.size, costs.profile.memory_capacity
    state = memory.get("shards", 0) + memory.get("gradients", 0) + memory.get("optimizer state", 0)
    gathered = memory.get("gathered parameters", 0)
    rest = sum(memory.values()) - state - gathered
    short = f"{format_bytes(sum(memory.values()))} are needed, {format_bytes(room)} are there"
    if room > gathered + rest:
        return f"{short}: sharded state fits from about {ranks * state / (room - gathered - rest):,.0f} ranks"
    if room > gathered + state and rest:
        return f"{short}: activations fit up to about {tokens * (room - gathered - state) / rest:,.0f} tokens per rank"
    return f"{short}: fewer tokens per rank and more ranks are needed, or smaller units"


def _seconds(steps: Iterable[Step]) -> float:
    return sum(step.seconds for step in steps)


def _shorter(seconds: float) -> str:
    return f"the step would be {format_seconds(seconds)} shorter" if seconds > 0 else "the step would be no shorter"
