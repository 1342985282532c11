"""What the HTML report shows of a program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.ir.files import file_name
from graphshard.ir.plan import Bucket
from graphshard.ir.printer import dtype_name
from graphshard.ir.program import Program
from graphshard.ir.text import format_bytes, format_count, format_seconds
from graphshard.ir.version import own_version
from graphshard.report.page import BucketView, Measured, RegionView, Report, Span, Spread, StageView, Timeline
from graphshard.schedule.memory import memory_of
from graphshard.schedule.timeline import WHY, Estimate, Step, estimate

# How many things a wait says it is delayed by.
_DELAYS = 3

# How steps are coloured.
COLOURS = {"upload": "gather", "download": "reduce", "all_reduce": "reduce"}

# What the lanes of links are called.
_LANES = {
    "": "compute",
    "node": "communication",
    "network": "communication between nodes",
    "host": "copies from the host",
    "to_host": "copies to the host",
}


@dataclass(frozen=True)
class MeasuredProgram:
    """What was measured of a program, for its report.

    Attributes:
        regions: all calls of each region, by its name.
        in_flight: by bucket, from its launch until compute has waited for it.
        waits: by bucket, how long compute waited.
    """

    step: Measured
    regions: Mapping[str, Spread]
    in_flight: Mapping[str, Spread]
    waits: Mapping[str, Spread]


def report_of(
    program: Program,
    *,
    error: str = "",
    kernels: Mapping[str, Sequence[str]] = MappingProxyType({}),
    costs: Costs | None = None,
    measured: MeasuredProgram | None = None,
    files: bool = True,
) -> Report:
    """The report of a program; before it is lowered, only its stages.

    Args:
        error: text of the error that ended compilation.
        kernels: of the regions that have a file of generated kernels, what the kernels take, for each kind of GPU.
        costs: what the timeline is estimated with; None is an H100 node.
        measured: shown beside the estimate.
        files: the report lies in a dump, and links to its files.
    """
    costs = costs or Costs(load_profile("h100"), mesh=program.mesh)
    stages = tuple(
        StageView(
            *(s.name, s.rewrites, s.seconds, s.num_nodes, s.exact, s.folded, s.text),
            f"{i:02d}-{file_name(s.name)}.txt" if files else "",
        )
        for i, s in enumerate(program.history)
    )
    facts: tuple[tuple[str, str], ...] = (
        ("mesh", ", ".join(f"{axis.size} ranks, axis {axis.name}" for axis in program.mesh.every_axis)),
        ("device", program.device.type),
        ("torch", str(torch.__version__)),
        ("times and memory", f"estimated for {costs.profile.title}"),
        ("plan", program.plan.hash[:12] if program.plan else "none"),
    )
    if program.reason:  # a program that was not called has none
        facts = (("captured because", program.reason), *facts)
    if not program.regions or error:
        return Report(_title(program), facts, stages, error=error)
    found = estimate(program, costs)
    timeline = _timeline(program, found, costs)
    regions = _regions(program, found, costs, kernels, files=files)
    buckets = _buckets(program, found)
    if measured is not None:
        timeline = replace(timeline, measured=measured.step)
        regions = tuple(replace(region, measured=measured.regions.get(region.name)) for region in regions)
        buckets = tuple(
            replace(bucket, in_flight=measured.in_flight.get(bucket.name), waited=measured.waits.get(bucket.name))
            for bucket in buckets
        )
    return Report(
        title=_title(program),
        facts=facts,
        stages=stages,
        buckets=buckets,
        timeline=timeline,
        memory=memory_of(program, found),
        regions=regions,
    )


def _title(program: Program) -> str:
    """The model, how large it is, and who compiled it."""
    count = format_count(sum(math.prod(row.shape) for row in program.params))
    return f"{program.title}, {count} parameters, graphshard {own_version()}"


def _buckets(program: Program, found: Estimate) -> tuple[BucketView, ...]:
    if program.plan is None:
        return ()
    exposed: dict[str, float] = {}
    for step in found.steps:
        if step.kind == "exposed":
            exposed[step.name] = exposed.get(step.name, 0.0) + step.seconds
    compute = [step for step in found.steps if step.kind == "compute"]
    views = []
    for step in found.steps:
        if step.kind not in ("gather", "reduce", "all_reduce"):
            continue
        bucket = program.plan.bucket(step.name)
        calls = [s for s in compute if s.phase == step.phase]
        waited = found.waits[step.name]
        views.append(
            BucketView(
                name=bucket.name,
                kind=bucket.kind,
                phase=bucket.phase,
                params=bucket.params,
                packed=bucket.packed,
                num_bytes=bucket.num_bytes,
                dtype=_dtype(program, bucket),
                axis=bucket.axis,
                start=_place(calls, step.order),
                wait=_place(calls, waited),
                hidden_by=", ".join(f"{s.name} of {s.where or 'the root'}" for s in calls[step.order : waited]),
                seconds=step.seconds,
                exposed_seconds=exposed.get(step.name, 0.0),
                slack_seconds=found.dag.slack[step.event],
            )
        )
    return tuple(views)


def _dtype(program: Program, bucket: Bucket) -> str:
    row = program.params[bucket.members[0]]
    return dtype_name(row.sent_dtype(bucket.kind))


def _place(calls: list[Step], order: int) -> str:
    """A point between two region calls, in words."""
    beside = calls[order].where if order < len(calls) else "the end"
    return f"after {order} of {len(calls)} regions, before {beside or 'the root'}"


def _timeline(program: Program, found: Estimate, costs: Costs) -> Timeline:
    critical = {step.event for step in found.critical}
    spans = tuple(
        Span(
            lane=_LANES[step.link],
            kind=COLOURS.get(step.kind, step.kind),
            name=f"{step.name} {step.where}".strip(),
            start=step.start,
            end=step.end,
            detail=_detail(step, found),
            slack=None if step.kind == "exposed" else found.dag.slack[step.event],
            critical=step.event in critical,
        )
        for step in found.steps
    )
    return Timeline(
        spans=spans,
        phases=tuple((name, start, end) for name, (start, end) in found.phases.items()),
        seconds=found.seconds,
        compute_seconds=found.total("compute"),
        communication_seconds=found.communication,
        exposed_seconds=found.total("exposed"),
        critical_seconds=sum(step.seconds for step in found.critical if step.kind != "compute"),
        assumptions=f"Estimated for {costs.profile.title} (profile {costs.profile.hash[:12]}, network "
        f"{costs.network}), whatever this program ran on: a roofline of each kernel, latency and bandwidth of each "
        "collective. Optimizer not included.",
    )


def _detail(step: Step, found: Estimate) -> str:
    """What is said of a span beside its name, its time and its slack."""
    if step.why:
        reason = f"{WHY[step.why]}{f', behind {step.behind}' if step.behind else ''}"
        delays = list(found.delays.get(step.event, {}).items())[:_DELAYS]
        return "\n".join([reason, *(f"{format_seconds(seconds)} less without {name}" for name, seconds in delays)])
    return format_bytes(step.num_bytes) if step.num_bytes else ""


def _regions(
    program: Program, found: Estimate, costs: Costs, kernels: Mapping[str, Sequence[str]], *, files: bool
) -> tuple[RegionView, ...]:
    views = []
    for name, key in program.region_names.items():
        region = program.regions[key]
        where = list(dict.fromkeys(step.where or "the root" for step in found.steps if step.name == name))
        views.append(
            RegionView(
                name=name,
                key=key,
                calls=program.region_calls.count(key),
                ops=sum(node.op == "call_function" for node in region.module.graph.nodes),
                modules=", ".join(where) if len(where) < 4 else f"{where[0]} to {where[-1]}",
                seconds=costs.region(region),
                file=f"regions/{name}.py" if files else "",
                kernels=f"regions/{name}.kernels.py" if name in kernels else "",
                resources="; ".join(kernels.get(name, ())),
            )
        )
    return tuple(views)
