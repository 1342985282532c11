"""What limits a predicted step, and what would help, from the formulas of the schedule.

F and B are the compute of forward and backward; A, A' and R the gathers of forward, those of backward and the
reductions. A step takes at least F + B and the ends that nothing hides, and at least A + A' + R.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from graphshard.cost.costs import Costs
from graphshard.ir.program import Program
from graphshard.ir.text import format_bytes, format_seconds
from graphshard.schedule.timeline import Estimate, Step

# Exposed communication below this share of a step is not what limits it.
_NEGLIGIBLE = 0.02


def ends(timeline: Estimate) -> tuple[float, float]:
    """Seconds exposed at the head and at the tail: the first gather has no compute before it, the last reduction none
    behind it."""
    gathers, reductions = _collectives(timeline, "gather"), _collectives(timeline, "reduce")
    waited = {(s.phase, s.name): s.seconds for s in timeline.steps if s.kind == "exposed"}
    first, last = gathers[:1], reductions[-1:]
    head = sum(min(s.seconds, waited.get((s.phase, s.name), 0.0)) for s in first)
    return head, sum(min(s.seconds, waited.get((s.phase, s.name), 0.0)) for s in last)


def limit_of(timeline: Estimate) -> str:
    """ "compute", "link", "head" or "tail"."""
    exposed, communication = timeline.total("exposed"), timeline.communication
    head, tail = ends(timeline)
    compute = timeline.total("compute")
    if communication > compute + head + tail:
        return "link"
    if exposed <= _NEGLIGIBLE * timeline.seconds:
        return "compute"
    return max((("head", head), ("tail", tail), ("link", exposed - head - tail)), key=lambda item: item[1])[0]


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
    compute, communication = timeline.total("compute"), timeline.communication
    if limit == "memory":
        yield _memory(program, costs, tokens, memory)
    if communication > compute:
        rates = {dtype: costs.profile.rate(dtype) for dtype in flop}
        multiplying = sum(count / (rates[dtype].peak * rates[dtype].matmul) for dtype, count in flop.items())
        hidden = tokens * communication / max(multiplying, 1e-12)
        yield (
            f"communication takes {format_seconds(communication)} (A + A' + R) and compute {format_seconds(compute)} "
            f"(F + B) at {tokens} tokens per rank: it hides from about {hidden:,.0f} tokens per rank, "
            "where the multiplications alone take as long"
        )
    elif limit == "link":
        worst = timeline.waits_for[0]
        yield (
            f"communication ({format_seconds(communication)}) is shorter than compute ({format_seconds(compute)}), but "
            f"not where it is needed: {worst.name} is waited for {format_seconds(worst.seconds)}; other units= or more "
            "tokens per rank give it more to hide behind"
        )
    if limit == "link" or communication > compute:
        yield from _fewer_bytes(program, timeline)
    for name, step in (("head", _collectives(timeline, "gather")[:1]), ("tail", _collectives(timeline, "reduce")[-1:])):
        if limit == name and step:
            yield (
                f"the {name} is {step[0].name} ({format_bytes(step[0].num_bytes)}, {format_seconds(step[0].seconds)}), "
                "which no schedule hides: make its unit smaller with units=, or more tokens per rank"
            )
    if limit == "compute":
        share = timeline.total("exposed") / timeline.seconds
        yield f"compute is {1 - share:.1%} of forward and backward; only faster kernels or less recomputation help"


def _fewer_bytes(program: Program, timeline: Estimate) -> Iterator[str]:
    again = sum(s.seconds for s in _collectives(timeline, "gather") if s.phase == "backward")
    if again:
        kept = sum(row.sent_bytes("gather") for row in program.params if row.reshard and row.num_shards > 1)
        yield (
            f"reshard_after_forward=False drops A' = {format_seconds(again)} of gathers in backward and keeps "
            f"{format_bytes(kept)} of parameters"
        )
    wide = [row for row in program.params if row.trainable and row.reduce_dtype == torch.float32]
    if wide:
        reductions = sum(s.seconds for s in _collectives(timeline, "reduce"))
        yield f"reducing in bfloat16 instead of float32 halves R = {format_seconds(reductions)}, and rounds gradients"


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
