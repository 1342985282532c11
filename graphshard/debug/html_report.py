"""HTML report of one compiled program: one file that opens without a network.

Tables are written by the template, so they can be read and printed without scripts. The page draws the diff of two
stages, the timeline and the memory curve from data it carries, in seconds and bytes. Stages' texts are carried
compressed: at 126 layers they are megabytes each, and few of them are ever opened.
"""

from __future__ import annotations

import base64
import functools
import logging
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.errors import GraphshardError
from graphshard.ir.plan import Bucket
from graphshard.ir.printer import dtype_name
from graphshard.ir.program import Program, Stage
from graphshard.passes import InsertCollectives
from graphshard.schedule.fsdp2_order import PlanByUnit
from graphshard.schedule.memory_timeline import MemoryTimeline, memory_of
from graphshard.schedule.timeline import WHY, Estimate, Step, estimate
from graphshard.utils.files import file_name
from graphshard.utils.text import format_bytes, format_count, format_seconds, own_version

log = logging.getLogger(__name__)

# Colors by kind of step, for the kinds that share one.
COLORS = {"upload": "gather", "download": "reduce", "all_reduce": "reduce"}
# Lanes by link.
LANES = {
    "": "compute",
    "node": "communication",
    "network": "communication between nodes",
    "host": "copies from the host",
    "to_host": "copies to the host",
}
# Groups of memory from the bottom of the plot to its top; each has a color.
MEMORY_GROUPS = (
    *("shards", "optimizer state", "gradients of earlier microbatches", "inputs", "saved for backward"),
    *("gathered parameters", "gradients", "activations", "inside regions", "communication buffers"),
    "optimizer temporaries",
)
# Measured and predicted lanes that differ more than so many times have separate axes.
APART = 2.0
# How many causes of delay a wait lists.
_DELAYS = 3


@dataclass(frozen=True)
class Spread:
    """Least, median and most of a number measured on all ranks, in seconds or bytes."""

    least: float
    median: float
    most: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        """Summarize one value per rank."""
        ordered = sorted(values)
        return Spread(ordered[0], median(ordered), ordered[-1])

    @property
    def skew(self) -> float:
        """How much larger the largest is than the least, as a share of the median."""
        return (self.most - self.least) / self.median if self.median else 0.0


@dataclass(frozen=True)
class BucketView:
    """A bucket, and the collective in which it travels: from `start` to `wait`, hidden by the regions in between.

    `exposed_seconds` is how much of `seconds` the compute stream waits. `in_flight` is measured from launch to the end
    of the wait, an upper bound, and `waited` is the wait of compute.
    """

    bucket: Bucket
    dtype: str
    start: str
    wait: str
    hidden_by: str
    seconds: float
    exposed_seconds: float
    slack_seconds: float
    in_flight: Spread | None = None
    waited: Spread | None = None


@dataclass(frozen=True)
class Span:
    """A stretch of time on one lane, such as "compute" or "communication".

    `kind` is "compute", "gather", "reduce" or "exposed" (the compute lane is idle, waiting for a bucket). `slack` is
    None for a wait.
    """

    lane: str
    kind: str
    name: str
    start: float
    end: float
    detail: str = ""
    slack: float | None = None
    critical: bool = False


@dataclass(frozen=True)
class RankBar:
    """Seconds of one rank's measured step: compute, waits for communication, and the rest."""

    rank: int
    compute: float
    exposed: float
    other: float


@dataclass(frozen=True)
class Measured:
    """One step as it ran on all ranks; `spans` are of `rank`, `exposed` is the total wait of compute.

    `curve` is memory over the share of another step.
    """

    rank: int
    num_ranks: int
    spans: tuple[Span, ...]
    step: Spread
    compute: Spread
    exposed: Spread
    memory: Spread | None = None
    bars: tuple[RankBar, ...] = ()
    curve: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True)
class Order:
    """A step by another plan of the same program, to compare with; without `spans` it is the same plan."""

    spans: tuple[Span, ...]
    phases: tuple[tuple[str, float, float], ...]
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class Timeline:
    """One step as the cost model sees it, and as it ran. `phases` are (name, start, end).

    `critical_seconds` is the communication on the critical path; `assumptions` is one sentence. `fsdp2` is the step in
    FSDP2's order, one unit ahead, with the same costs.
    """

    spans: tuple[Span, ...]
    phases: tuple[tuple[str, float, float], ...]
    seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    critical_seconds: float
    assumptions: str
    measured: Measured | None = None
    fsdp2: Order | None = None

    @property
    def apart(self) -> float:
        """Factor between the measured and the predicted step, at least 1; 1 without a measurement."""
        if self.measured is None or not self.seconds or not self.measured.step.median:
            return 1.0
        ratio = self.measured.step.median / self.seconds
        return max(ratio, 1 / ratio)


@dataclass(frozen=True)
class RegionView:
    """A distinct compiled region: `seconds` of one call, `measured` for all calls of a step.

    `kernels` are registers and the like of kernels compiled for absent GPUs; None without a file of generated kernels.
    """

    name: str
    key: str
    calls: int
    ops: int
    modules: str
    seconds: float
    kernels: Sequence[str] | None = None
    measured: Spread | None = None


@dataclass(frozen=True)
class Layer:
    """A unit's compute in forward and backward, and how long compute waits for its buckets."""

    name: str
    forward: float
    backward: float
    exposed: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.exposed


@dataclass(frozen=True)
class Card:
    """A main number of a report, with a note under it; `warn` marks one that needs attention."""

    name: str
    value: str
    note: str = ""
    warn: bool = False


@dataclass(frozen=True)
class Report:
    """Contents of a report. With `files` it is in a dump, and links to its files.

    `error` is the traceback of the pass that failed; later parts may be missing then. `cards` are main numbers and
    `advice` sentences of a prediction; without `cards` the report shows those of the timeline. `compiled` has
    the compiler's seconds of regions.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    stages: Sequence[Stage]
    buckets: tuple[BucketView, ...] = ()
    timeline: Timeline | None = None
    memory: MemoryTimeline | None = None
    regions: tuple[RegionView, ...] = ()
    error: str = ""
    files: bool = False
    cards: tuple[Card, ...] = ()
    advice: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()
    compiled: tuple[tuple[str, float], ...] = ()

    @property
    def bucket_groups(self) -> list[list[BucketView]]:
        """Buckets, alike ones together: of one phase, axis, dtype and size, whose names differ in numbers only."""
        groups: dict[tuple[object, ...], list[BucketView]] = {}
        for view in self.buckets:
            bucket = view.bucket
            key = bucket.phase, bucket.axis, view.dtype, bucket.num_bytes, _without_numbers(bucket.name)
            groups.setdefault(key, []).append(view)
        return list(groups.values())


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)


# Measured times on all ranks: of a region's calls in a step, or of a bucket from its launch until compute had waited
# for it ("in flight") or of that wait, by kind ("compute", "in flight", "exposed") and name.
Spreads = Mapping[tuple[str, str], Spread]


@functools.cache
def template_environment(*, html: bool = True) -> Environment:
    """Return the jinja environment of all templates; `asset(name)` includes a style sheet or a script."""
    loader = PackageLoader("graphshard.debug", "")
    env = Environment(loader=loader, autoescape=html, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.keep_trailing_newline = not html
    env.globals["asset"] = lambda name: Markup(loader.get_source(env, name)[0])
    return env


def render(data: Report) -> str:
    """Return the report as the text of one HTML file; equal data give equal text."""
    env = template_environment()
    env.filters |= {
        "size": format_bytes,
        "time": format_seconds,
        "pack": lambda text: base64.b64encode(zlib.compress(text.encode())).decode(),
    }
    env.globals |= {"stage_stem": stage_stem, "format_bytes": format_bytes, "format_seconds": format_seconds}
    env.globals |= {"group_colors": {what: number for number, what in enumerate(MEMORY_GROUPS)}, "apart": APART}
    groups = data.memory.by_kind().most_common() if data.memory else []
    return env.get_template("page.html.j2").render(report=data, page=_script_data(data), groups=groups)


def stage_stem(index: int, stage: Stage) -> str:
    """Return the file name of a stage in a dump, without its suffix: "09-bucket"."""
    return f"{index:02d}-{file_name(stage.name)}"


def _script_data(data: Report) -> dict[str, Any]:
    """Return the data that the page's scripts need, apart from stages' texts."""
    texts = [stage.text for stage in data.stages]
    differ = [i for i in range(1, len(texts)) if texts[i - 1] != texts[i]]
    telling = [i for i in differ if data.stages[i].name == InsertCollectives.name]
    after = (telling or differ or [len(texts) - 1])[-1]
    return {
        "compare": [max(after - 1, 0), after],
        "timeline": data.timeline and asdict(data.timeline),
        "apart": bool(data.timeline and data.timeline.apart > APART),
        "memory": data.memory and _memory_data(data.memory),
    }


def _memory_data(memory: MemoryTimeline) -> dict[str, Any]:
    """Return the curve, and the groups in the order in which they are stacked."""
    order = sorted(memory.groups, key=lambda what: MEMORY_GROUPS.index(what) if what in MEMORY_GROUPS else -1)
    groups = [
        {
            "name": what,
            "color": MEMORY_GROUPS.index(what) if what in MEMORY_GROUPS else 0,
            "points": [(point.time, point.num_bytes) for point in memory.groups[what]],
        }
        for what in order
    ]
    return {**asdict(replace(memory, alive=(), groups={})), "groups": groups}


def report_of(
    program: Program,
    *,
    error: str = "",
    kernels: Mapping[str, Sequence[str]] = MappingProxyType({}),
    costs: Costs | None = None,
    measured: Measured | None = None,
    spreads: Spreads = MappingProxyType({}),
    files: bool = True,
    memory: MemoryTimeline | None = None,
    fsdp2: Callable[[], Estimate | None] | None = None,
) -> Report:
    """Build the report of a program; before it is lowered, or with an error, only its stages.

    Args:
        kernels: by name of a region that has a file of generated kernels, their resources for each kind of GPU.
        costs: of the estimated timeline; None is an H100 node.
        memory: the curve; None is one with the state of Adam.
        fsdp2: predicts the step in FSDP2's order; by default from the captured program, if that can be had.
    """
    costs = costs or Costs(load_profile("h100"), mesh=program.mesh)
    facts = [
        ("mesh", ", ".join(f"{axis.size} ranks, axis {axis.name}" for axis in program.mesh.every_axis)),
        ("device", program.device.type),
        ("torch", str(torch.__version__)),
        ("times and memory", f"estimated for {costs.profile.title}"),
    ]
    if program.reason:  # a program that was not called has none
        facts.insert(0, ("captured because", program.reason))
    count = format_count(sum(math.prod(row.shape) for row in program.params))
    title = f"{program.title}, {count} parameters, graphshard {own_version()}"
    report = Report(title, tuple(facts), tuple(program.history), error=error, files=files)
    if not program.regions or error:
        return report
    found = estimate(program, costs)
    regions = []
    for name, key in program.region_names.items():
        region, calls = program.regions[key], program.region_calls.count(key)
        where = list(dict.fromkeys(step.where or "the root" for step in found.steps if step.name == name))
        modules = ", ".join(where) if len(where) < 4 else f"{where[0]} to {where[-1]}"
        operators = sum(node.op == "call_function" for node in region.module.graph.nodes)
        seconds, ran = costs.region(region), spreads.get(("compute", name))
        regions.append(RegionView(name, key, calls, operators, modules, seconds, kernels.get(name), ran))
    if memory is None:
        state = 0 if program.offloaded or measured else 2 * program.params.trained_bytes
        memory = memory_of(program, found, {"optimizer state": state})
    names = {key: name for name, key in program.region_names.items()}
    timeline = _timeline(found, costs, measured)
    other = _in_fsdp2_order(program, costs) if fsdp2 is None else fsdp2()
    return replace(
        report,
        buckets=tuple(_buckets(program, found, spreads)),
        timeline=timeline if other is None else replace(timeline, fsdp2=_order(other, timeline.spans)),
        memory=memory,
        regions=tuple(regions),
        layers=tuple(_layers(program, found)),
        compiled=tuple((names[key], seconds) for key, seconds in program.region_seconds.items() if key in names),
    )


def _in_fsdp2_order(program: Program, costs: Costs) -> Estimate | None:
    """Predict the same program in FSDP2's order; return None if it cannot be captured again, or planned so."""
    try:
        other = program.replanned(PlanByUnit())
        return None if other is None else estimate(other, costs)
    except GraphshardError as error:
        log.info("FSDP2's order: %s", error)
        return None


def _layers(program: Program, found: Estimate) -> list[Layer]:
    """Divide the seconds of regions and waits among the units that they serve, equally where there are several."""
    units = [unit or "(root)" for unit in program.all_params.units]
    places = {unit: place for place, unit in enumerate(units)}
    members = {bucket.name: bucket.members for bucket in program.plan.buckets} if program.plan else {}
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for step in found.steps:
        if step.kind == "compute":
            first, to, last = step.where.partition(" to ")
            named = first.split(", ") if not to else [first, last]
            served = [name if name in places else "(root)" for name in named]
            if to:
                low, high = sorted(places.get(name, 0) for name in served)
                served = units[low : high + 1]
        elif step.kind == "exposed" and step.name in members:
            served = list(dict.fromkeys(program.params[name].unit or "(root)" for name in members[step.name]))
        else:
            continue
        for name in served:
            seconds[name, step.phase if step.kind == "compute" else step.kind] += step.seconds / len(served)
    named = [name for name in dict.fromkeys((*units, "(root)")) if any(key[0] == name for key in seconds)]
    return [Layer(name, *(seconds[name, what] for what in ("forward", "backward", "exposed"))) for name in named]


def _buckets(program: Program, found: Estimate, spreads: Spreads) -> Iterator[BucketView]:
    exposed = defaultdict[str, float](float)
    for step in found.waits_for:
        exposed[step.name] += step.seconds
    for step in found.steps:
        if program.plan is None or step.kind not in ("gather", "reduce", "all_reduce"):
            continue
        bucket = program.plan.bucket(step.name)
        calls = [s for s in found.steps if s.kind == "compute" and s.phase == step.phase]
        waited = found.waits[step.name]
        yield BucketView(
            bucket,
            dtype=dtype_name(program.params[bucket.members[0]].sent_dtype(bucket.kind)),
            start=_place(calls, step.order),
            wait=_place(calls, waited),
            hidden_by=", ".join(f"{s.name} of {s.where or 'the root'}" for s in calls[step.order : waited]),
            seconds=step.seconds,
            exposed_seconds=exposed[step.name],
            slack_seconds=found.dag.slack[step.event],
            in_flight=spreads.get(("in flight", bucket.name)),
            waited=spreads.get(("exposed", bucket.name)),
        )


def _place(calls: list[Step], order: int) -> str:
    following = calls[order].where if order < len(calls) else "the end"
    return f"after {order} of {len(calls)} regions, before {following or 'the root'}"


def _order(found: Estimate, planned: tuple[Span, ...]) -> Order:
    phases = tuple((name, start, end) for name, (start, end) in found.phases.items())
    spans = _spans(found)
    return Order(() if spans == planned else spans, phases, found.seconds, found.total("exposed"))


def _spans(found: Estimate) -> tuple[Span, ...]:
    critical = {step.event for step in found.critical}
    return tuple(
        Span(
            lane=LANES[step.link],
            kind=COLORS.get(step.kind, step.kind),
            name=f"{step.name} {step.where}".strip(),
            start=step.start,
            end=step.end,
            detail=_detail(step, found),
            slack=None if step.kind == "exposed" else found.dag.slack[step.event],
            critical=step.event in critical,
        )
        for step in found.steps
    )


def _timeline(found: Estimate, costs: Costs, measured: Measured | None) -> Timeline:
    return Timeline(
        spans=_spans(found),
        phases=tuple((name, start, end) for name, (start, end) in found.phases.items()),
        seconds=found.seconds,
        compute_seconds=found.total("compute"),
        communication_seconds=found.communication,
        exposed_seconds=found.total("exposed"),
        critical_seconds=sum(step.seconds for step in found.critical if step.kind != "compute"),
        assumptions=f"Estimated for {costs.profile.title}, network {costs.network}, whatever this program ran on: a "
        "roofline of each kernel, latency and bandwidth of each collective. Optimizer not included.",
        measured=measured,
    )


def _detail(step: Step, found: Estimate) -> str:
    if step.why:
        reason = f"{WHY[step.why]}{f', behind {step.behind}' if step.behind else ''}"
        delays = list(found.delays.get(step.event, {}).items())[:_DELAYS]
        return "\n".join([reason, *(f"{format_seconds(seconds)} less without {name}" for name, seconds in delays)])
    return format_bytes(step.num_bytes) if step.num_bytes else ""
