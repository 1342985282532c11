"""What limits a predicted step, and what would help: read off its critical path.

F and B are the compute of forward and backward; A, A' and R the gathers of forward, those of backward and the
reductions. What a step would gain is exact for the same schedule: the longest way through the timeline's graph with
other lengths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from graphshard.cost.collectives import MODEL_KINDS
from graphshard.cost.costs import Costs
from graphshard.ir.program import Program
from graphshard.schedule.clock import Call, Wait
from graphshard.schedule.timeline import Estimate, Step
from graphshard.utils.text import format_bytes, format_seconds

# Of the critical path: up to this share of communication, compute is what limits a step.
HIDDEN = 0.1
# Below this share nothing about communication helps.
NEGLIGIBLE = 0.02


@dataclass(frozen=True)
class Parts:
    """What the critical path consists of, in its order.

    Attributes:
        compute: calls of regions.
        head: what the first call waits for: no compute is there to hide it.
        tail: what is launched behind the last call.
        link: what is neither, and would be hidden if it began earlier or were shorter.
        model: what the model itself communicates, where it stands.
    """

    compute: list[Step]
    head: list[Step]
    tail: list[Step]
    link: list[Step]
    model: list[Step]


def parts_of(timeline: Estimate) -> Parts:
    """The critical path by what it is."""
    events = timeline.events
    calls = [index for index, event in enumerate(events) if isinstance(event, Call)]
    first, last = (calls[0], calls[-1]) if calls else (len(events), -1)
    before = {event.launch for event in events[:first] if isinstance(event, Wait)}
    found = Parts([], [], [], [], [])
    for step in timeline.critical:
        if step.kind == "compute":
            found.compute.append(step)
        elif step.kind in MODEL_KINDS:
            found.model.append(step)
        elif step.event in before:
            found.head.append(step)
        else:
            (found.tail if step.event > last else found.link).append(step)
    return found


def limit_of(timeline: Estimate) -> str:
    """ "link", "head", "tail" or "model": of the critical path the longest of them; "compute" if they are short."""
    return _longest(timeline, HIDDEN)


def _longest(timeline: Estimate, share: float) -> str:
    """Of the critical path what is not compute and the longest; "compute" if all of that is no more than a share."""
    parts = parts_of(timeline)
    seconds = {name: _seconds(getattr(parts, name)) for name in ("head", "tail", "link", "model")}
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
    """What would help, one sentence each; the most important first.

    Args:
        limit: see `limit_of`; or "memory".
        tokens: of one rank.
        flop: of the model, by dtype.
        memory: at the peak, by what it is.
    """
    compute = timeline.total("compute")
    communication = timeline.communication - timeline.total(*MODEL_KINDS)  # which may be hidden
    parts, gains = parts_of(timeline), timeline.dag.gains(timeline.dag.end)
    if limit == "memory":
        yield _memory(program, costs, tokens, memory)
    if limit == "compute":
        share = _seconds(parts.compute) / timeline.seconds
        limit = _longest(timeline, NEGLIGIBLE)
        most = "only faster kernels or less recomputation help" if limit == "compute" else "faster kernels help most"
        yield f"compute is {share:.1%} of the critical path; {most}"
    if communication > compute:
        rates = {dtype: costs.profile.rate(dtype) for dtype in flop}
        speeds = {dtype: rate.peak * min(rate.matmul, costs.profile.sustained) for dtype, rate in rates.items()}
        multiplying = sum(count / speeds[dtype] for dtype, count in flop.items())
        hidden = tokens * communication / max(multiplying, 1e-12)
        yield (
            f"communication takes {format_seconds(communication)} (A + A' + R) and compute {format_seconds(compute)} "
            f"(F + B) at {tokens} tokens per rank: it hides from about {hidden:,.0f} tokens per rank, "
            "where the multiplications alone take as long"
        )
    elif limit == "link":
        worst = max(parts.link, key=lambda step: (gains.get(step.event, 0.0), step.seconds))
        yield (
            f"communication ({format_seconds(communication)}) is shorter than compute ({format_seconds(compute)}), but "
            f"not where it is needed: {worst.name} ({format_seconds(worst.seconds)}) is on the critical path, "
            f"{_shorter(gains.get(worst.event, 0.0))} without it; other units= or more tokens per rank give it more "
            "to hide behind"
        )
    if limit == "link" or communication > compute:
        yield from _fewer_bytes(program, timeline)
    if limit == "model":
        yield from _model(program, costs, timeline, parts.model)
    for name, steps in (("head", parts.head), ("tail", parts.tail)):
        if limit == name:
            worst = max(steps, key=lambda step: step.seconds)
            yield (
                f"the {name} is {worst.name} ({format_bytes(worst.num_bytes)}, {format_seconds(worst.seconds)}), "
                f"which no schedule hides; {_shorter(gains.get(worst.event, 0.0))} without it: make its unit smaller "
                "with units=, or more tokens per rank"
            )


def _model(program: Program, costs: Costs, timeline: Estimate, steps: list[Step]) -> Iterator[str]:
    """What the model communicates, by the axis that takes the longest of it."""
    seconds = defaultdict[str, float](float)
    for step in steps:
        seconds[step.name.rpartition(" ")[2]] += step.seconds
    worst = max(seconds, key=lambda name: seconds[name])
    axis = program.mesh.named(worst)
    where = "in a node" if costs.link(axis) == "node" else "between nodes"
    yield (
        f"the model's own collectives over {worst} ({axis.size} ranks, {where}) are {format_seconds(seconds[worst])}, "
        f"{seconds[worst] / timeline.seconds:.1%} of forward and backward; they run where the model has them, and "
        f"nothing hides them: fewer ranks along {worst}"
        + (", which share a node, make them cheaper" if where == "between nodes" else " have fewer bytes to send each")
    )


def _fewer_bytes(program: Program, timeline: Estimate) -> Iterator[str]:
    again = [step for step in _collectives(timeline, "gather") if step.phase == "backward"]
    if again:
        kept = sum(row.sent_bytes("gather") for row in program.params if row.reshard and row.num_shards > 1)
        gain = timeline.seconds - timeline.dag.step({step.event: 0.0 for step in again})
        yield (
            f"reshard_after_forward=False drops A' = {format_seconds(_seconds(again))} of gathers in backward and "
            f"keeps {format_bytes(kept)} of parameters; {_shorter(gain)} with the rest of this schedule"
        )
    wide = [row for row in program.params if row.trainable and row.reduce_dtype == torch.float32]
    if wide:
        reductions = _collectives(timeline, "reduce")
        gain = timeline.seconds - timeline.dag.step({step.event: step.seconds / 2 for step in reductions})
        yield (
            f"reducing in bfloat16 instead of float32 halves R = {format_seconds(_seconds(reductions))}, and rounds "
            f"gradients; {_shorter(gain)} with the rest of this schedule"
        )


def _memory(program: Program, costs: Costs, tokens: int, memory: Mapping[str, int]) -> str:
    """What shrinks with ranks is the state, what shrinks with tokens the rest, but for the gathered parameters."""
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


def _collectives(timeline: Estimate, kind: str) -> list[Step]:
    return [step for step in timeline.steps if step.kind == kind]


def _seconds(steps: Iterable[Step]) -> float:
    return sum(step.seconds for step in steps)


def _shorter(seconds: float) -> str:
    """What a step would gain."""
    return f"the step would be {format_seconds(seconds)} shorter" if seconds > 0 else "the step would be no shorter"
