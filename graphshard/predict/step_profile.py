"""What a step does on one rank, in time: measured, and predicted in the same form."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from graphshard.cost.collectives import MODEL_KINDS
from graphshard.cost.costs import Costs
from graphshard.debug.html_report import COLORS, Measured, MeasuredProgram, Span, Spread, render, report_of
from graphshard.debug.perfetto import process_events
from graphshard.errors import ArgumentError, visible
from graphshard.ir.program import Program
from graphshard.lower.executor_lines import Call, Start, Wait
from graphshard.runtime.gloo import as_planned
from graphshard.runtime.step_recorder import PhaseRun, Recording, Stamp
from graphshard.schedule.memory import memory_of
from graphshard.schedule.timeline import Ends, Estimate, Step, ends_of, estimate
from graphshard.utils.argument_validation import write_given
from graphshard.utils.text import brief, format_bytes, format_seconds, plain_table


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


# How many regions, collectives and waits a table has.
_SHOWN = 8


@dataclass(frozen=True)
class RankStep:
    """The step on one rank.

    Attributes:
        seconds: from its start until the device was done.
        peak_bytes: most bytes of tensors that were alive at once; None where that was not measured.
    """

    rank: int
    seconds: float
    spans: tuple[TimedSpan, ...]
    peak_bytes: int | None

    def total(self, *kinds: str) -> float:
        """Seconds of all spans of the given kinds."""
        return sum(span.seconds for span in self.spans if span.key.kind in kinds)


@dataclass(frozen=True)
class Timing:
    """A part of a step: what was predicted, None where nothing can be, and what was measured on all ranks.

    Attributes:
        kind: "compute" for a region, "gather", "reduce" or "all_reduce" for a collective, "exposed" for what compute
            waited for one; or what the number is of, for sums and for memory.
        name: of the region or the bucket.
        phase: "forward" or "backward".
        where: modules that a region computes.
        calls: in the step.
    """

    kind: str
    predicted: float | None
    measured: Spread
    name: str = ""
    program: str = ""
    phase: str = ""
    where: str = ""
    calls: int = 1


@dataclass(frozen=True)
class StepProfile:
    """One training step as it ran on all ranks, beside its prediction. Seconds, and bytes of memory; prints as a table.

    Attributes:
        model: class of the module.
        hardware: title of the profile that the prediction is for.
        step: from its start until the device was done; all ranks leave a barrier before.
        compute: all regions.
        exposed: what compute waits for collectives.
        head, tail: of that, what it waits where nothing hides it: for the first gathers, and the last reductions.
        other: the rest of the step: what lies between regions, such as views, launches and Python, the loss, and
            autograd.
        memory: the most bytes of tensors alive at once; None where that could not be measured.
        regions: by program, phase and region, the longest first.
        collectives: each from its launch until compute had waited for it. That is what it took at most: where compute
            did not wait, it had arrived before.
        waits: how long compute waited for each.
        ranks: what ran, on each rank.
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
    _prediction: Prediction = field(repr=False, compare=False)
    _programs: dict[str, Program] = field(repr=False, compare=False)
    _others: frozenset[tuple[str, str]] = field(repr=False, compare=False)
    _costs: Costs = field(repr=False, compare=False)

    def __str__(self) -> str:
        """The table: sums, then the longest regions, waits and collectives."""
        table = Table(box=None)
        table.add_column(f"{self.model} on {len(self.ranks)} ranks")
        for heading in ("calls", "predicted", "median", "least", "most"):
            table.add_column(heading, justify="right")
        for timing in (self.step, self.compute, self.exposed, self.head, self.tail, self.other):
            title = f"  of it {timing.kind}" if timing.kind in ("head", "tail") else timing.kind
            table.add_row(title, "", *_cells(timing))
        if self.memory is not None:
            table.add_row("peak memory", "", *_cells(self.memory, format_bytes))
        parts = (("regions", self.regions), ("waits", self.waits), ("collectives, at most", self.collectives))
        for title, timings in parts:
            for number, timing in enumerate(timings[:_SHOWN]):
                if not number:
                    table.add_row(f"{title}:")
                name = visible(f"  {timing.name} {timing.where}".rstrip(), lines=False)
                table.add_row(Text(name), str(timing.calls), *_cells(timing))
            if len(timings) > _SHOWN:
                table.add_row(f"  {len(timings) - _SHOWN} more")
        return f"{plain_table(table)}\npredicted for {visible(self.hardware, lines=False)}"

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write all ranks for ui.perfetto.dev or chrome://tracing (Trace Event Format, JSON).

        Each rank is a process with the lanes "compute" and "communication", and so is the prediction. A rank's time
        counts from when it left the barrier before the step.

        Raises:
            ArgumentError: the file cannot be written.
        """
        processes = [(f"rank {step.rank}", step.spans) for step in self.ranks]
        processes.append((f"predicted for {self.hardware}", self._prediction.spans))
        events = [
            event
            for number, (title, spans) in enumerate(processes)
            for event in process_events(number, title, map(_shown, spans))
        ]
        write_given("path", path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def save_report(self, path: str | os.PathLike[str], program: str | None = None) -> None:
        """Write the HTML report of a program, with measured lanes under the predicted ones.

        The lanes are those of the rank whose step was the median; each span says what it took on all ranks. What is
        predicted is the likely backward: for gradients of the outputs that the capture took for the ones that are used,
        without microbatches. Where another one ran, only its lanes are shown.

        Args:
            path: the file.
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
        report = report_of(as_planned(chosen), costs=self._costs, measured=self._of_program(chosen.title), files=False)
        write_given("path", path, render(report))

    def _of_program(self, title: str) -> MeasuredProgram:
        """What the report of one program shows."""
        middle = sorted(self.ranks, key=lambda step: step.seconds)[len(self.ranks) // 2]
        timings = [t for t in (*self.regions, *self.collectives, *self.waits) if t.program == title]
        # Another backward than the likely one, which the report is of, has regions of its own by the same names.
        tables = [t for t in timings if (title, t.phase) not in self._others]
        of = {(t.kind, t.phase, t.name): t for t in timings}
        spans = []
        for span in middle.spans:
            if span.key.program == title:
                spread = of[span.key.kind, span.key.phase, span.key.name].measured
                spans.append(_shown(span, f"all ranks, in a step: {_in_words(spread)}"))
        measured = Measured(
            middle.rank,
            len(self.ranks),
            tuple(spans),
            self.step.measured,
            self.compute.measured,
            self.exposed.measured,
            None if self.memory is None else self.memory.measured,
        )
        calls: defaultdict[str, list[Spread]] = defaultdict(list)  # of a region in both phases
        for timing in tables:
            if timing.kind == "compute":
                calls[timing.name].append(timing.measured)
        return MeasuredProgram(
            measured,
            {name: _sum(spreads) for name, spreads in calls.items()},
            {t.name: t.measured for t in tables if t.kind not in ("compute", "exposed")},
            {t.name: t.measured for t in tables if t.kind == "exposed"},
        )


def profile_of(model: str, ranks: Sequence[RankStep], runs: Sequence[PhaseRun], costs: Costs) -> StepProfile:
    """Put together what the ranks measured.

    Args:
        runs: of this rank, in order; those of the others are alike.
    """
    prediction = predict(runs, costs)
    programs: dict[str, Program] = {}
    for run in runs:
        programs.setdefault(run.program.title, run.program)  # the first has a forward
    compute, exposed = ([step.total(kind) for step in ranks] for kind in ("compute", "exposed"))
    guessed = {kind: sum(s.seconds for s in prediction.spans if s.key.kind == kind) for kind in ("compute", "exposed")}
    ends = [measured_ends(step.spans) for step in ranks]
    rest = [step.seconds - busy - waited for step, busy, waited in zip(ranks, compute, exposed)]
    peaks = [step.peak_bytes for step in ranks if step.peak_bytes is not None]
    timings = sorted(_timings(ranks, prediction), key=lambda timing: -timing.measured.median)
    return StepProfile(
        model=model,
        hardware=costs.profile.title,
        step=Timing("step", prediction.seconds, Spread.of(step.seconds for step in ranks)),
        compute=Timing("compute", guessed["compute"], Spread.of(compute)),
        exposed=Timing("exposed", guessed["exposed"], Spread.of(exposed)),
        head=Timing("head", prediction.ends.head, Spread.of(found.head for found in ends)),
        tail=Timing("tail", prediction.ends.tail, Spread.of(found.tail for found in ends)),
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


def _timings(ranks: Sequence[RankStep], prediction: Prediction) -> Iterator[Timing]:
    """One for each thing that ran."""
    seconds = [totals(step.spans) for step in ranks]
    predicted = totals(prediction.spans)
    calls = Counter(span.key for span in ranks[0].spans)
    places: dict[Key, dict[str, None]] = {}
    for span in ranks[0].spans:
        places.setdefault(span.key, {})[span.where] = None
    for key, where in places.items():
        first, *others = where
        yield Timing(
            kind=key.kind,
            # What is predicted not to wait is predicted to wait for no time.
            predicted=predicted.get(key, 0.0),
            measured=Spread.of(found.get(key, 0.0) for found in seconds),
            name=key.name,
            program=key.program,
            phase=key.phase,
            where=f"{first} to {others[-1]}" if others else first,
            calls=calls[key],
        )


def _cells(timing: Timing, show: Callable[[float], str] = format_seconds) -> list[str]:
    spread = timing.measured
    predicted = "" if timing.predicted is None else show(timing.predicted)
    return [predicted, *map(show, (spread.median, spread.least, spread.most))]


def _in_words(spread: Spread) -> str:
    least, middle, most = map(format_seconds, (spread.least, spread.median, spread.most))
    return f"{middle}, {least} to {most}"


def _sum(spreads: Sequence[Spread]) -> Spread:
    """Of a region in both phases; the bounds of a sum are no wider."""
    return Spread(sum(s.least for s in spreads), sum(s.median for s in spreads), sum(s.most for s in spreads))


def _shown(span: TimedSpan, detail: str = "") -> Span:
    """As reports and traces have it."""
    lane = "compute" if span.key.kind in ("compute", "exposed") else "communication"
    kind = COLORS.get(span.key.kind, span.key.kind)
    # A bucket's spans are found by its name, so that nothing is added to it.
    return Span(lane, kind, f"{span.key.name} {span.where}".strip(), span.start, span.end, detail)
