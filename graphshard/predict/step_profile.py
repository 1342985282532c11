"""The result of `graphshard.profiling.profile_step`: a measured step next to the predicted one."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from graphshard.cost.costs import MODEL_KINDS, Costs
from graphshard.debug.html_report import COLORS, Measured, RankBar, Span, Spread, Spreads, render, report_of
from graphshard.debug.trace_events import trace_counter, trace_event, trace_flow, trace_name
from graphshard.errors import ArgumentError, visible
from graphshard.ir.collective_regions import moves_data
from graphshard.ir.program import Program
from graphshard.lower.executor import CallLine, Start, WaitLine
from graphshard.runtime.collective_launches import as_planned
from graphshard.runtime.step_recorder import PhaseRun, Recording, Stamp
from graphshard.schedule.memory_timeline import memory_of
from graphshard.schedule.timeline import Ends, Estimate, ends_of, estimate
from graphshard.utils.argument_validation import write_given
from graphshard.utils.text import brief, format_bytes, format_seconds, html_table, new_table, plain_table

# How many regions, collectives and waits a table has.
_SHOWN = 8
# Lanes of a trace, and how many tracks each may have.
_LANES, _MOST_TRACKS = ("compute", "communication"), 1000


class TimedSpan(NamedTuple):
    """A region that ran, a collective in flight, or compute that waited for one.

    `kind` is "compute", a bucket's kind, "upload" or "download" (only predicted), or "exposed": compute waits for it.
    A measured collective ends when compute has waited for it.
    """

    program: str
    phase: str
    kind: str
    name: str
    where: str
    start: float
    end: float

    @property
    def key(self) -> tuple[str, ...]:
        """Program, phase, kind and name."""
        return self[:4]

    @property
    def seconds(self) -> float:
        return self.end - self.start


def measured_spans(recording: Recording, since: Stamp) -> list[TimedSpan]:
    """Return the spans of a recording, ordered by start."""
    found: list[TimedSpan] = []
    for run in recording.runs:
        plan = run.program.plan
        kinds = {bucket.name: bucket.kind for bucket in plan.buckets} if plan else {}
        started: dict[str, TimedSpan] = {}
        for number, began, ended in run.times:
            start, end = (recording.clock.seconds(since, stamp) for stamp in (began, ended))
            line, phase = run.executor.lines[number], (run.program.title, run.name)
            if isinstance(line, CallLine):
                found.append(TimedSpan(*phase, "compute", line.region, line.where, start, end))
            elif isinstance(line, Start):
                kind = kinds.get(line.bucket, "gather")
                started[line.bucket] = TimedSpan(*phase, kind, line.bucket, "", start, end)
            elif isinstance(line, WaitLine):
                # A bucket may have several waits; it is in flight until the last tensor has arrived.
                started[line.bucket] = started[line.bucket]._replace(end=end)
                found.append(started[line.bucket]._replace(kind="exposed", start=start))
        found += started.values()
    return sorted(found, key=lambda span: span.start)


@dataclass(frozen=True)
class RankStep:
    """The step on one rank, or its prediction, of rank -1.

    `peak_bytes` of a prediction is None if several programs ran, as one's saved tensors are alive while others run.
    `memory` is over the share of a step, measured on a CPU in one more step, which takes longer.
    """

    rank: int
    seconds: float
    spans: tuple[TimedSpan, ...]
    peak_bytes: int | None
    memory: tuple[tuple[float, int], ...] = ()

    def total(self, *kinds: str) -> float:
        """Return the seconds of all spans of the given kinds."""
        return sum(span.seconds for span in self.spans if span.kind in kinds)

    def totals(self) -> Mapping[tuple[str, ...], float]:
        """Return seconds by key."""
        found = defaultdict[tuple[str, ...], float](float)
        for span in self.spans:
            found[span.key] += span.seconds
        return found

    def ends(self, casts: Collection[tuple[str, ...]]) -> Ends:
        """Return the waits at the ends of the step; `casts` are the keys of regions that only move data."""
        order = [span for span in self.spans if span.kind in ("compute", "exposed")]
        sent = [span for span in self.spans if span.kind not in ("compute", "exposed")]
        kinds = {span._replace(kind="exposed").key: span.kind for span in sent} | dict.fromkeys(casts, "cast")
        return ends_of([(kinds.get(span.key, "compute"), span.seconds) for span in order])


def _predict(runs: Sequence[PhaseRun], costs: Costs) -> RankStep:
    """Predict the phases that ran, one after the other."""
    phases: dict[int, tuple[Estimate, int]] = {}
    spans: list[TimedSpan] = []
    now = 0.0
    for run in runs:
        if id(run.phase) not in phases:
            alone = as_planned(replace(run.program, phases={run.name: run.phase}))
            found = estimate(alone, costs)
            phases[id(run.phase)] = found, memory_of(alone, found).peak_bytes
        found, _ = phases[id(run.phase)]
        for step in found.steps:
            # The model's own communication is not measured separately.
            if step.kind not in MODEL_KINDS and step.why != "model":
                phase = run.program.title, run.name
                spans.append(TimedSpan(*phase, step.kind, step.name, step.where, step.start + now, step.end + now))
        now += found.seconds
    peak = None
    if len({run.program.title for run in runs}) == 1:
        peak = max(peak for _, peak in phases.values())
        if len({id(run.program) for run in runs}) == 1:  # tensors that both phases have count once
            both = as_planned(runs[0].program)
            peak = memory_of(both, estimate(both, costs)).peak_bytes
    return RankStep(-1, now, tuple(sorted(spans, key=lambda span: span.start)), peak)


@dataclass(frozen=True)
class Timing:
    """A part of a step: its prediction, None where there is none, and its measurement on all ranks.

    `kind` is as in `TimedSpan`, or the name of a sum. `where` are the modules that a region computes.
    """

    kind: str
    predicted: float | None
    measured: Spread
    name: str = ""
    program: str = ""
    phase: str = ""
    where: str = ""
    calls: int = 1

    def cells(self, show: Callable[[float], str] = format_seconds) -> list[str]:
        """Return predicted, median, least and most, as text."""
        predicted = "" if self.predicted is None else show(self.predicted)
        return [predicted, *map(show, (self.measured.median, self.measured.least, self.measured.most))]


@dataclass(frozen=True)
class StepProfile:
    """One training step as it ran on all ranks, and its prediction. Seconds, and bytes of memory; prints as a table.

    Attributes:
        hardware: title of the profile that the prediction is for.
        step: from its start until the device was done; all ranks leave a barrier before.
        exposed: compute waits for collectives.
        head, tail: the part of it that nothing can hide: the wait for the first gathers, and the last reductions.
        other: the rest of the step: work between regions, such as views, launches and Python, the loss, and autograd.
        memory: the most bytes of tensors alive at once; None if not measured.
        regions: by program, phase and region, the longest first.
        collectives: each from its launch until compute had waited for it. That is an upper bound: where compute did not
            wait, it had arrived before.
        waits: how long compute waited for each.
    """

    model: str
    hardware: str
    step: Timing
    compute: Timing
    exposed: Timing
    head: Timing
    tail: Timing
    other: Timing
    memory: Timing | None
    regions: tuple[Timing, ...]
    collectives: tuple[Timing, ...]
    waits: tuple[Timing, ...]
    ranks: tuple[RankStep, ...]
    _prediction: RankStep = field(repr=False, compare=False)
    _programs: dict[str, Program] = field(repr=False, compare=False)
    _others: frozenset[tuple[str, str]] = field(repr=False, compare=False)
    _costs: Costs = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{plain_table(self._table())}\npredicted for {visible(self.hardware, lines=False)}"

    def _repr_html_(self) -> str:
        """Return the table for notebooks; `save_report` writes the whole report."""
        return html_table(f"A measured step of {self.model}", self._table(), [f"predicted for {self.hardware}"])

    def metrics(self) -> dict[str, float]:
        """Return the main numbers for a logger of experiments: seconds, bytes of memory, and the skew of ranks.

        Of each there is the median over ranks, and the prediction as "predicted_...".
        """
        sums = (self.step, self.compute, self.exposed, self.head, self.tail, self.other)
        timings = {f"{timing.kind}_s": timing for timing in sums}
        timings |= {} if self.memory is None else {"peak_memory_bytes": self.memory}
        found = {name: float(timing.measured.median) for name, timing in timings.items()}
        known = {name: timing.predicted for name, timing in timings.items() if timing.predicted is not None}
        found["skew"] = self.step.measured.skew
        return {**found, **{f"predicted_{name}": float(value) for name, value in known.items()}}

    def _table(self) -> Table:
        numbers = ("calls", "predicted", "median", "least", "most")
        table = new_table([f"{self.model} on {len(self.ranks)} ranks"], numbers)
        for timing in (self.step, self.compute, self.exposed, self.head, self.tail, self.other):
            title = f"  of it {timing.kind}" if timing.kind in ("head", "tail") else timing.kind
            table.add_row(title, "", *timing.cells())
        if self.memory is not None:
            table.add_row("peak memory", "", *self.memory.cells(format_bytes))
        parts = (("regions", self.regions), ("waits", self.waits), ("collectives, at most", self.collectives))
        for title, timings in parts:
            if timings:
                table.add_row(f"{title}:")
            for timing in timings[:_SHOWN]:
                name = visible(f"  {timing.name} {timing.where}".rstrip(), lines=False)
                table.add_row(Text(name), str(timing.calls), *timing.cells())
            if len(timings) > _SHOWN:
                table.add_row(f"  {len(timings) - _SHOWN} more")
        return table

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write all ranks for ui.perfetto.dev or chrome://tracing (Trace Event Format, JSON).

        Each rank is a process with the lanes "compute" and "communication", and so is the prediction. An arrow leads
        from a collective's launch to the wait of compute for it, and a counter has the collectives in flight. A rank's
        time counts from when it left the barrier before the step.

        Raises:
            ArgumentError: the file cannot be written.
        """
        processes = [(f"rank {step.rank}", step.spans) for step in self.ranks]
        processes.append((f"predicted for {self.hardware}", self._prediction.spans))
        events: list[dict[str, Any]] = []
        for process, (title, spans) in enumerate(processes):
            events.append(trace_name("process_name", 0, title, process))
            ends: dict[str, list[float]] = {lane: [] for lane in _LANES}
            launched: dict[str, tuple[int, float]] = {}
            changes: list[tuple[float, int]] = []
            for span in map(_shown, spans):
                rows = ends[span.lane]
                row = next((row for row, end in enumerate(rows) if end <= span.start), len(rows))
                # Tracks are sorted by number, so the rows of a lane stay together.
                track = _LANES.index(span.lane) * _MOST_TRACKS + row + 1
                if row == len(rows):
                    rows.append(span.end)
                    events.append(trace_name("thread_name", track, span.lane, process))
                rows[row] = span.end
                events.append(trace_event(span.name, span.kind, process, track, span.start, span.end - span.start))
                if span.lane != "compute":
                    launched[span.name] = track, span.start
                    changes += (span.start, 1), (span.end, -1)
                elif span.kind == "exposed" and span.name in launched:
                    events += trace_flow(span.name, len(events), process, launched[span.name], (track, span.start))
            flying = itertools.accumulate(sorted(changes), lambda before, change: (change[0], before[1] + change[1]))
            events += [trace_counter("collectives in flight", process, time, {"count": n}) for time, n in flying]
        write_given("path", path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def save_report(self, path: str | os.PathLike[str], program: str | None = None) -> None:
        """Write the HTML report of a program, with measured lanes under the predicted ones.

        The lanes show the rank whose step was the median; each span has its spread over all ranks. The prediction is of
        the likely backward, without microbatches. Where another one ran, only its lanes are shown.

        Args:
            program: its title, such as "Llama-0"; needed where several programs ran in the step.

        Raises:
            ArgumentError: there is no such program, or the file cannot be written.
        """
        titles = list(self._programs)
        if program is None and len(titles) > 1:
            raise ArgumentError(f"program: the step ran {', '.join(titles)}. Give one of these.")
        if program is not None and program not in titles:
            raise ArgumentError(f"program must be one of {', '.join(map(repr, titles))}, got {brief(program)}.")
        chosen = self._programs[titles[0] if program is None else program]
        measured, spreads = self._of_program(chosen.title)
        report = report_of(as_planned(chosen), costs=self._costs, measured=measured, spreads=spreads, files=False)
        write_given("path", path, render(report))

    def _of_program(self, title: str) -> tuple[Measured, Spreads]:
        """Return the lanes of the median rank, and the times of regions and buckets."""
        middle = sorted(self.ranks, key=lambda step: step.seconds)[len(self.ranks) // 2]
        timings = [t for t in (*self.regions, *self.collectives, *self.waits) if t.program == title]
        of: dict[tuple[str, ...], Timing] = {(t.program, t.phase, t.kind, t.name): t for t in timings}
        spans = []
        for span in middle.spans:
            if span.program == title:
                _, median, least, most = of[span.key].cells()
                spans.append(_shown(span, f"all ranks, in a step: {median}, {least} to {most}"))
        sums = (self.step.measured, self.compute.measured, self.exposed.measured)
        memory = None if self.memory is None else self.memory.measured
        spreads: dict[tuple[str, str], Spread] = {}
        for timing in timings:
            # Another backward than the likely one, which the report is of, has different regions of the same names.
            if (title, timing.phase) in self._others:
                continue
            key = timing.kind if timing.kind in ("compute", "exposed") else "in flight", timing.name
            # Of a region in both phases the sum, whose bounds are no wider.
            known, new = spreads.get(key, Spread(0.0, 0.0, 0.0)), timing.measured
            spreads[key] = Spread(known.least + new.least, known.median + new.median, known.most + new.most)
        bars = tuple(RankBar(step.rank, *_parts(step)) for step in self.ranks)
        curve = middle.memory if len(self._programs) == 1 else ()
        return Measured(middle.rank, len(self.ranks), tuple(spans), *sums, memory, bars, curve), spreads


def profile_of(model: str, ranks: Sequence[RankStep], runs: Sequence[PhaseRun], costs: Costs) -> StepProfile:
    """Combine the measurements of all ranks; the runs are of this rank, and the same on others."""
    prediction = _predict(runs, costs)
    programs: dict[str, Program] = {}
    for run in runs:
        programs.setdefault(run.program.title, run.program)  # the first has a forward
    compute, exposed, rest = zip(*map(_parts, ranks))
    casts = {
        (run.program.title, run.name, "compute", name)
        for run in runs
        for name, key in run.program.region_names.items()
        if moves_data(run.program.regions[key])
    }
    ends, foretold = [step.ends(casts) for step in ranks], prediction.ends(casts)
    peaks = [step.peak_bytes for step in ranks if step.peak_bytes is not None]
    timings = sorted(_timings(ranks, prediction), key=lambda timing: -timing.measured.median)
    return StepProfile(
        model=model,
        hardware=costs.profile.title,
        step=Timing("step", prediction.seconds, Spread.of(step.seconds for step in ranks)),
        compute=Timing("compute", prediction.total("compute"), Spread.of(compute)),
        exposed=Timing("exposed", prediction.total("exposed"), Spread.of(exposed)),
        head=Timing("head", foretold.head, Spread.of(found.head for found in ends)),
        tail=Timing("tail", foretold.tail, Spread.of(found.tail for found in ends)),
        other=Timing("other", None, Spread.of(rest)),
        memory=Timing("memory", prediction.peak_bytes, Spread.of(peaks)) if len(peaks) == len(ranks) else None,
        regions=tuple(t for t in timings if t.kind == "compute"),
        collectives=tuple(t for t in timings if t.kind not in ("compute", "exposed")),
        waits=tuple(t for t in timings if t.kind == "exposed"),
        ranks=tuple(ranks),
        _prediction=prediction,
        _programs=programs,
        _others=frozenset((r.program.title, r.name) for r in runs if programs[r.program.title] is not r.program),
        _costs=costs,
    )


def _parts(step: RankStep) -> tuple[float, float, float]:
    """Return the seconds of compute, of its waits, and of the rest."""
    busy, waited = step.total("compute"), step.total("exposed")
    return busy, waited, step.seconds - busy - waited


def _timings(ranks: Sequence[RankStep], prediction: RankStep) -> Iterator[Timing]:
    seconds, predicted = [step.totals() for step in ranks], prediction.totals()
    calls = Counter(span.key for span in ranks[0].spans)
    places: dict[tuple[str, ...], dict[str, None]] = {}
    for span in ranks[0].spans:
        places.setdefault(span.key, {})[span.where] = None
    for key, where in places.items():
        first, *others = where
        program, phase, kind, name = key
        yield Timing(
            kind=kind,
            predicted=predicted.get(key, 0.0),  # a wait that is not predicted takes no time
            measured=Spread.of(found.get(key, 0.0) for found in seconds),
            name=name,
            program=program,
            phase=phase,
            where=f"{first} to {others[-1]}" if others else first,
            calls=calls[key],
        )


def _shown(span: TimedSpan, detail: str = "") -> Span:
    lane = "compute" if span.kind in ("compute", "exposed") else "communication"
    kind = COLORS.get(span.kind, span.kind)
    # The page finds a bucket's spans by its name, so nothing is appended to it.
    return Span(lane, kind, f"{span.name} {span.where}".strip(), span.start, span.end, detail)
