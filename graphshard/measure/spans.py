"""What a step does on one rank, in time: measured, and predicted in the same form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from graphshard.cost.costs import Costs
from graphshard.cost.model_collectives import MODEL_KINDS
from graphshard.lower.lines import Call, Start, Wait
from graphshard.runtime.gloo import as_planned
from graphshard.runtime.recording import PhaseRun, Recording, Stamp
from graphshard.schedule.memory import memory_of
from graphshard.schedule.timeline import Ends, Estimate, Step, ends_of, estimate


class Key(NamedTuple):
    """What spans are of the same thing, in a step: of a region, a bucket, or what compute waits for."""

    program: str
    phase: str
    kind: str
    name: str


@dataclass(frozen=True)
class TimedSpan:
    """A region that ran, a collective under way, or compute that waited for one.

    Attributes:
        key: its kind is "compute", that of a bucket ("gather", "reduce", "all_reduce", or "upload" and "download" of
            copies to and from the host, which are only predicted), or "exposed".
        where: the modules that a region computes.
        start, end: seconds from the start of the step. Measured, a collective ends when compute has waited for it:
            it may have arrived before.
    """

    key: Key
    where: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def measured_spans(recording: Recording, since: Stamp) -> list[TimedSpan]:
    """What a recording has seen, in the order in which it began."""
    found = [span for run in recording.runs for span in _of_run(recording, run, since)]
    return sorted(found, key=lambda span: span.start)


def _of_run(recording: Recording, run: PhaseRun, since: Stamp) -> Iterator[TimedSpan]:
    plan = run.program.plan
    kinds = {bucket.name: bucket.kind for bucket in plan.buckets} if plan else {}
    started: dict[str, TimedSpan] = {}
    for number, began, ended in run.times:
        start, end = (recording.clock.seconds(since, stamp) for stamp in (began, ended))
        line = run.executor.lines[number]
        if isinstance(line, Call):
            yield TimedSpan(Key(run.program.title, run.name, "compute", line.region), line.where, start, end)
        elif isinstance(line, Start):
            key = Key(run.program.title, run.name, kinds.get(line.bucket, "gather"), line.bucket)
            started[line.bucket] = TimedSpan(key, "", start, end)
        elif isinstance(line, Wait):
            # Several tensors of a bucket are waited for one by one; it is under way until the last has arrived.
            started[line.bucket] = replace(started[line.bucket], end=end)
            yield TimedSpan(started[line.bucket].key._replace(kind="exposed"), "", start, end)
    yield from started.values()


@dataclass(frozen=True)
class Prediction:
    """The step that was measured, as costs have it.

    Attributes:
        ends: what is exposed at the ends of the step.
        peak_bytes: None if several programs ran, as what one keeps for its backward is alive while others run.
    """

    spans: tuple[TimedSpan, ...]
    seconds: float
    ends: Ends
    peak_bytes: int | None


def predict(runs: Sequence[PhaseRun], costs: Costs) -> Prediction:
    """The phases that ran, each behind the one before."""
    phases: dict[int, tuple[Estimate, int]] = {}
    ends: list[Ends] = []
    spans: list[TimedSpan] = []
    now = 0.0
    for run in runs:
        if id(run.phase) not in phases:
            alone = as_planned(replace(run.program, phases={run.name: run.phase}))
            found = estimate(alone, costs)
            phases[id(run.phase)] = found, memory_of(alone, found).peak_bytes
        found, _ = phases[id(run.phase)]
        # What the model communicates itself is not measured by itself.
        steps = [step for step in found.steps if step.kind not in MODEL_KINDS and step.why != "model"]
        spans += (_predicted(run, step, now) for step in steps)
        now += found.seconds
        ends.append(found.ends)
    titles = {run.program.title for run in runs}
    peak = max(peak for _, peak in phases.values()) if len(titles) == 1 else None
    if len({id(run.program) for run in runs}) == 1:  # what both phases have, such as buffers of forward, is seen
        both = as_planned(runs[0].program)
        peak = memory_of(both, estimate(both, costs)).peak_bytes
    both_ends = Ends(ends[0].head, ends[-1].tail) if ends else Ends(0.0, 0.0)
    return Prediction(tuple(sorted(spans, key=lambda span: span.start)), now, both_ends, peak)


def _predicted(run: PhaseRun, step: Step, shift: float) -> TimedSpan:
    return TimedSpan(
        Key(run.program.title, run.name, step.kind, step.name), step.where, step.start + shift, step.end + shift
    )


def measured_ends(spans: Sequence[TimedSpan]) -> Ends:
    """What of a measured step is exposed at its ends."""
    kinds = {span.key._replace(kind=""): span.key.kind for span in spans if span.key.kind not in ("compute", "exposed")}
    order = [span for span in spans if span.key.kind in ("compute", "exposed")]
    return ends_of([(kinds.get(span.key._replace(kind=""), "compute"), span.seconds) for span in order])


def totals(spans: Iterable[TimedSpan]) -> dict[Key, float]:
    """Seconds of all spans of each thing."""
    found: defaultdict[Key, float] = defaultdict(float)
    for span in spans:
        found[span.key] += span.seconds
    return dict(found)
