"""The result of `graphshard.explain`: a predicted step as numbers, a table, HTML, a trace and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_type_hints

from rich.table import Table
from rich.text import Text

from graphshard.cost.costs import Costs
from graphshard.debug.html_report import LANES, Card, render, report_of
from graphshard.debug.trace_events import trace_counter, trace_event, trace_flow, trace_name
from graphshard.ir.program import Program
from graphshard.predict._symbolic_cost import Formulas
from graphshard.predict.training_config import Training, TrainingCost
from graphshard.schedule.clock import TimedWait
from graphshard.schedule.memory_timeline import MemoryTimeline
from graphshard.schedule.timeline import Estimate
from graphshard.utils.argument_validation import write_given
from graphshard.utils.json_dataclasses import write
from graphshard.utils.text import format_bytes, format_seconds, html_table, plain_table

# How many waits, and how many collectives of the critical path, the table names.
_SHOWN = 3
_LINKS = {
    "node": "link in the node",
    "network": "link between nodes",
    "host": "link from the host",
    "to_host": "link to the host",
}


@dataclass(frozen=True)
class RegionCost:
    """A distinct region: seconds of one call, calls in a step, and whether the time was measured."""

    name: str
    key: str
    where: str
    calls: int
    seconds: float
    measured: bool


@dataclass(frozen=True)
class ExposedWait:
    """Exposed communication: compute waits for a bucket.

    Attributes:
        why: "head" (the phase's first collective), "tail" (its last), "link" (it queued for the link, `behind` another
            bucket), "late" (it was launched too late, or is longer than the compute that could hide it) or "model"
            (it is the model's own collective, which runs where the model has it).
        without: for the longest waits, by the name of a cause, including the bucket: seconds that the wait would be
            shorter if the cause took no time.
    """

    bucket: str
    phase: str
    seconds: float
    why: str
    behind: str
    without: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        more = f", behind {self.behind}" if self.behind else ""
        others = [name for name in self.without if name != self.bucket]
        if others:
            more = f", {format_seconds(self.without[others[0]])} less without {others[0]}"
        return f"{format_seconds(self.seconds)} for {self.bucket} ({self.why}{more})"


@dataclass(frozen=True)
class StageCost:
    """A stage of a pipeline.

    Attributes:
        blocks: how many it has.
        forward_s, backward_s: of one microbatch in the middle of a step, without gathers and reductions.
        gathers_s, reductions_s: by how much longer the first forward and the last backward are.
        alive: microbatches that its rank holds at once, where that needs the most memory.
    """

    blocks: int
    forward_s: float
    backward_s: float
    gathers_s: float
    reductions_s: float
    alive: int


@dataclass(frozen=True)
class PipelineCost:
    """A step of a pipeline. Rank i has every stage i + j * ranks.

    Attributes:
        bubble_s: idle time of the slowest rank, waiting for other stages.
        model_comm_s: its compute waits for what the model itself communicates.
        sent_bytes, sending_s: of one microbatch from stage to stage, over the border where that takes longest.
        rank_s: busy seconds by rank, with the optimizer.
        rank_bytes: peak memory by rank.
    """

    schedule: str
    stages: tuple[StageCost, ...]
    bubble_s: float
    model_comm_s: float
    sent_bytes: int
    sending_s: float
    rank_s: tuple[float, ...]
    rank_bytes: tuple[int, ...]

    @property
    def slowest(self) -> int:
        """The rank that is busy longest."""
        return self.rank_s.index(max(self.rank_s))

    @property
    def largest(self) -> int:
        """The rank that needs the most memory."""
        return self.rank_bytes.index(max(self.rank_bytes))

    def __str__(self) -> str:
        counts = [stage.blocks for stage in self.stages]
        blocks = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
        return (
            f"{self.schedule}, {len(counts)} stages of {blocks} blocks; bubble {format_seconds(self.bubble_s)}; "
            f"slowest {self.named(self.slowest)}; most memory {format_bytes(max(self.rank_bytes))} in "
            f"{self.named(self.largest)}, least {format_bytes(min(self.rank_bytes))}; {format_bytes(self.sent_bytes)} "
            f"sent in {format_seconds(self.sending_s)}"
        )

    def named(self, rank: int) -> str:
        """Name the stages of a rank: "stage 3", "stages 3 and 7"."""
        stages = list(map(str, range(rank, len(self.stages), len(self.rank_s))))
        return f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(stages[:-1])} and {stages[-1]}"

    def memory_by_stage(self) -> Mapping[str, int]:
        """Return bytes by the stages of a rank."""
        return {self.named(rank): size for rank, size in enumerate(self.rank_bytes)}


@dataclass(frozen=True)
class Inside:
    """The program that a prediction is for, its timeline, and its memory without and with the optimizer's update.

    `fsdp2` predicts the same program in FSDP2's order.
    """

    program: Program
    costs: Costs
    timeline: Estimate
    memory: MemoryTimeline
    whole_memory: MemoryTimeline
    fsdp2: Callable[[], Estimate | None]


@dataclass(frozen=True)
class Explanation:
    """A predicted training step of one rank; seconds and bytes.

    Attributes:
        label: name of the setting, in a grid.
        data_ranks: ranks with different tokens; ranks along a tensor axis have the same.
        hardware, profile_hash: the profile's name and the hash of its numbers.
        tokens: that one rank processes in a step: elements of `input_ids` or `tokens`, or else of the largest input of
            integers, or the batch size.
        microbatches: forwards and backwards of a step. Waits, the critical path, slack and formulas are of one.
        step_time_s: forward, backward and optimizer.
        step_range_s: p10 and p90 of it, as far as constants of the profile are known: assumed ones have ranges there.
            Errors of the model itself are not included.
        compute_s: regions of forward and backward, slowed down by the communication that runs at the same time.
        optimizer_s: reads and writes of the optimizer.
        communication_s: all collectives.
        exposed_comm_s: compute waits for communication.
        head_s, tail_s: the part of it that nothing can hide: the wait for the first gathers of the step, mostly the
            embedding's, and for its last reductions.
        lower_bound_s: no schedule of the same compute on the same link is faster, with the model's own collectives
            where the model has them. `gap` is step_time_s / lower_bound_s - 1.
        search_stopped: the search for a plan ended at its budget of steps, before all shorter ones were ruled out.
        peak_memory_bytes, memory: of values alive at once between regions, with gradients and optimizer state; by kind.
        flop: of the model, forward and backward without recomputation, a multiply-add as two.
        mfu: time that `flop` takes at the data sheet's peak, over step_time_s.
        limit: "compute", "link", "head", "tail", "model" (the model's own communication), "bubble" (stages of a
            pipeline wait for each other) or "memory".
        advice: what would help, from formulas.
        waits: of compute for communication, longest first.
        critical_path: seconds under "compute" and the names of collectives and copies, in order. They follow each other
            without a gap from the begin of forward to the end of backward.
        slack: by bucket, seconds by which its collective could end later without lengthening the step, apart from
            contention.
        busy: share of the step in which compute, and each link ("node", "network"), is busy.
        regions: distinct regions, the most expensive first.
        notes: what limits the prediction: the call has no loss, fewer GPUs would be as fast, what it was compared with.
        pipeline: on a mesh with a pipeline axis, the stages. Seconds are then of the rank that is busy longest, and
            memory of the one that needs the most. Numbers of one microbatch are of that rank's last one.
    """

    model: str
    label: str
    mesh: dict[str, int]
    data_ranks: int
    hardware: str
    profile_hash: str
    network: str
    plan_hash: str
    tokens: int
    microbatches: int
    step_time_s: float
    step_range_s: tuple[float, float]
    compute_s: float
    optimizer_s: float
    communication_s: float
    exposed_comm_s: float
    head_s: float
    tail_s: float
    lower_bound_s: float
    gap: float
    search_stopped: bool
    peak_memory_bytes: int
    memory: dict[str, int]
    memory_capacity_bytes: float
    flop: float
    mfu: float
    limit: str
    advice: tuple[str, ...]
    waits: tuple[ExposedWait, ...]
    critical_path: dict[str, float]
    slack: dict[str, float]
    busy: dict[str, float]
    regions: tuple[RegionCost, ...]
    _make: Callable[[], Inside] | None = field(repr=False, compare=False)
    formulas: Formulas | None = field(default=None, repr=False, compare=False)
    cost: TrainingCost | None = None
    pipeline: PipelineCost | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def _inside(self) -> Inside:
        assert self._make is not None, "the program is in another process"
        return self._make()

    @property
    def _program(self) -> Program:
        return self._inside.program

    @property
    def _costs(self) -> Costs:
        return self._inside.costs

    @property
    def _timeline(self) -> Estimate:
        return self._inside.timeline

    @property
    def _memory(self) -> MemoryTimeline:
        return self._inside.memory

    def numbers(self) -> Explanation:
        """Return a copy without the program, for another process."""
        return replace(self, _make=None)

    def made_by(self, explain: Callable[..., Explanation], *where: Any) -> Explanation:
        """Return a copy whose program is made again by `explain(*where)` when it is used."""
        return replace(self, _make=lambda: explain(*where)._inside)

    @property
    def num_ranks(self) -> int:
        """Ranks of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def step_tokens(self) -> int:
        """Tokens of all ranks in a step."""
        return self.tokens * self.data_ranks

    @property
    def seconds_per_token(self) -> float:
        """Seconds that the whole mesh takes per token."""
        return self.step_time_s / self.step_tokens

    @property
    def model_comm_s(self) -> float:
        """The part of `exposed_comm_s` in which compute waits for what the model itself communicates."""
        if self.pipeline:
            return self.pipeline.model_comm_s
        return self.microbatches * sum(wait.seconds for wait in self.waits if wait.why == "model")

    @property
    def bubble_s(self) -> float:
        """Seconds in which stages of a pipeline wait for each other."""
        return self.pipeline.bubble_s if self.pipeline else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all ranks."""
        return self.step_tokens / self.step_time_s

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Throughput per rank of the mesh."""
        return self.tokens_per_second / self.num_ranks

    @property
    def range_in_words(self) -> str:
        """The step's range, "10.1 ms to 12.2 ms", if assumed constants give it one."""
        low, high = self.step_range_s
        return f"{format_seconds(low)} to {format_seconds(high)}" if low < high else ""

    def __str__(self) -> str:
        lines = [f"* {line}" for line in (*self.advice, *self.notes)]
        return "\n".join([plain_table(self._table()), *lines, *self._formula_lines()])

    def _repr_html_(self) -> str:
        """Return the table for notebooks; `save_html` writes the whole report."""
        return html_table(f"{self.model}, predicted", self._table(), (*self.advice, *self.notes))

    def _table(self) -> Table:
        table = Table(box=None, show_header=False)
        for name, value in self._facts():
            table.add_row(name, Text(value))
        return table

    def metrics(self) -> dict[str, float]:
        """Return the main numbers for a logger of experiments: seconds, bytes, shares and tokens per second."""
        names = [name for name, kind in get_type_hints(type(self)).items() if kind in (int, float)]
        found = {name: float(getattr(self, name)) for name in names}
        found |= {f"memory_{what.replace(' ', '_')}_bytes": float(size) for what, size in self.memory.items()}
        speeds = ("tokens_per_second", "tokens_per_second_per_gpu")
        return {**found, **{name: float(getattr(self, name)) for name in speeds}}

    def _facts(self) -> Iterator[tuple[str, str]]:
        seconds, size = format_seconds, format_bytes
        exposed = f"exposed {seconds(self.exposed_comm_s)} ({self.exposed_comm_s / self.step_time_s:.1%}; "
        exposed += f"head {seconds(self.head_s)}, tail {seconds(self.tail_s)})"
        between = f" ({self.range_in_words})" if self.range_in_words else ""
        speed = f"{self.tokens_per_second:,.0f} tokens/s, {self.tokens_per_second_per_gpu:,.0f} per GPU"
        stopped = ", as the search for a shorter plan ended at its budget" if self.search_stopped else ""
        memory = ", ".join(f"{name} {size(count)}" for name, count in self.memory.items())
        yield "model", f"{self.model}{f' ({self.label})' if self.label else ''}, {self.tokens:,} tokens per rank"
        yield "mesh", shown_mesh(self.mesh)
        yield "hardware", f"{self.hardware}, network {self.network}"
        yield "step", f"{seconds(self.step_time_s)}{between}, {speed}, MFU {self.mfu:.1%}"
        yield "compute", f"{seconds(self.compute_s)}, optimizer {seconds(self.optimizer_s)}"
        yield "communication", f"{seconds(self.communication_s)}, {exposed}"
        yield "longest waits", ", ".join(map(str, self.waits[:_SHOWN])) or "none"
        yield "critical path", _path(self.critical_path)
        yield "slack", _slack(self.slack)
        yield "busy", ", ".join(f"{_LINKS.get(name, name)} {share:.1%}" for name, share in self.busy.items())
        yield "lower bound", f"{seconds(self.lower_bound_s)}, gap {self.gap:.1%}{stopped}"
        yield "memory", f"{size(self.peak_memory_bytes)} of {size(self.memory_capacity_bytes)}: {memory}"
        if self.pipeline:
            yield "pipeline", str(self.pipeline)
        yield "limited by", self.limit
        if self.cost:
            yield "training", str(self.cost)

    def _formula_lines(self) -> Iterator[str]:
        """Yield how the step grows around its sizes, and from where communication is hidden."""
        if self.formulas is None:
            return
        yield f"formulas around {shown_mesh(self.formulas.at)}:"
        for name in ("compute_s", "communication_s", "saved_bytes", "state_bytes"):
            yield f"  {name} = {self.formulas.smooth(name)}"
        symbol = next(iter(self.formulas.at))
        crossover = self.formulas.crossover(symbol)
        if crossover is not None:
            yield f"  communication_s <= compute_s from {symbol} {crossover.value} on: {crossover.formula}"

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report with timeline, memory curve, buckets and regions: one file that needs no network."""
        inside = self._inside
        report = report_of(
            inside.program, costs=inside.costs, files=False, memory=inside.whole_memory, fsdp2=inside.fsdp2
        )
        found = replace(report, cards=tuple(self._cards()), advice=(*self.advice, *self.notes))
        write_given("path", path, render(found))

    def _cards(self) -> Iterator[Card]:
        """Yield the main numbers of the report; memory and times are those of `str(self)`."""
        seconds = format_seconds
        speed, fits = self.tokens_per_second_per_gpu, self.peak_memory_bytes <= self.memory_capacity_bytes
        room = f"of {format_bytes(self.memory_capacity_bytes)}{'' if fits else ': it does not fit'}, with "
        yield Card("Step", seconds(self.step_time_s), self.range_in_words or "forward, backward and optimizer")
        yield Card("Tokens/s", f"{self.tokens_per_second:,.0f}", f"{speed:,.0f} per GPU")
        yield Card("MFU", f"{self.mfu:.1%}", f"of the data sheet's peak of {self.hardware}")
        included = f"{room}{format_bytes(self.memory.get('optimizer state', 0))} of optimizer state"
        yield Card("Memory of a GPU", format_bytes(self.peak_memory_bytes), included, warn=not fits)
        share = f"{self.exposed_comm_s / self.step_time_s:.1%} of the step; head {seconds(self.head_s)}, "
        exposed = seconds(self.exposed_comm_s)
        yield Card("Exposed", exposed, f"{share}tail {seconds(self.tail_s)}", warn=self.exposed_comm_s > 0)
        stopped = ", the search ended at its budget" if self.search_stopped else ""
        yield Card("Gap to the bound", f"{self.gap:.1%}", f"no schedule beats {seconds(self.lower_bound_s)}{stopped}")

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline for ui.perfetto.dev or chrome://tracing (Trace Event Format, JSON)."""
        tracks = {link: track for track, link in enumerate(LANES, start=1)}
        used = {step.link for step in self._timeline.steps}
        events = [trace_name("process_name", 0, f"{self.model} on {self.num_ranks} x {self.hardware}")]
        events += [trace_name("thread_name", tracks[link], lane) for link, lane in LANES.items() if link in used]
        for step in self._timeline.steps:
            arguments: dict[str, Any] = {"phase": step.phase, "modules": step.where}
            if step.num_bytes:
                arguments["bytes"] = step.num_bytes
            if step.why:
                arguments |= {"why": step.why, "behind": step.behind}
            name = step.name if step.kind == "exposed" else f"{step.name} {step.where}".strip()
            event = trace_event(name, step.kind, 1, tracks[step.link], step.start, step.seconds)
            events.append({**event, "args": arguments})
        launches = {step.event: step for step in self._timeline.steps if step.link}
        for number, step in enumerate(step for step in self._timeline.steps if step.kind == "exposed"):
            waited = self._timeline.events[step.event]
            assert isinstance(waited, TimedWait)
            sent = launches[waited.launch]
            launch, wait = (tracks[sent.link], sent.start), (tracks[""], step.start)
            events += trace_flow(step.name, number, 1, launch, wait)
        memory = self._inside.whole_memory
        events += [trace_counter("memory", 1, point.time, {"bytes": point.num_bytes}) for point in memory.points]
        for what, points in memory.groups.items():
            events += [trace_counter(f"memory: {what}", 1, point.time, {"bytes": point.num_bytes}) for point in points]
        write_given("path", path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers as plain data."""
        shown = (field.name for field in dataclasses.fields(self) if not field.name.startswith("_"))
        data = {name: write(getattr(self, name)) for name in shown if name != "formulas"}
        formulas = str(self.formulas) if self.formulas else None
        return {**data, "formulas": formulas, "tokens_per_second": self.tokens_per_second}

    def to_json(self) -> str:
        """Return all numbers as JSON."""
        return json.dumps(self.to_dict(), indent=1)


def training_cost(training: Training, step: Explanation) -> TrainingCost | None:
    """Return the cost of a training by a predicted step; None if no tokens are given."""
    if training.tokens is None:
        return None
    steps, (low, high) = training.tokens / step.step_tokens, step.step_range_s
    hours = steps * step.step_time_s / 3600 * step.num_ranks
    return TrainingCost(
        tokens=training.tokens,
        steps=steps,
        days=steps * step.step_time_s / 86400,
        gpu_hours=hours,
        price=training.price,
        money=None if training.price is None else hours * training.price,
        range=(low / step.step_time_s, high / step.step_time_s),
    )


def shown_mesh(mesh: Mapping[str, int]) -> str:
    """Return axes and sizes in words: "replicate 8, shard 8"."""
    return ", ".join(f"{name} {size}" for name, size in mesh.items())


def _path(seconds: Mapping[str, float]) -> str:
    """Return compute and the longest of the rest, as shares."""
    whole = sum(seconds.values())
    rest = sorted((name for name in seconds if name != "compute"), key=lambda name: -seconds[name])
    shown = [name for name in ("compute", *rest[:_SHOWN]) if name in seconds]
    parts = [f"{name} {seconds[name] / whole:.1%}" for name in shown]
    if more := rest[_SHOWN:]:
        parts.append(f"{len(more)} more {sum(seconds[name] for name in more) / whole:.1%}")
    return ", ".join(parts) or "nothing"


def _slack(seconds: Mapping[str, float]) -> str:
    """Return how many buckets have no slack, and the least and the most of the others."""
    loose = sorted((name for name in seconds if seconds[name]), key=lambda name: seconds[name])
    tight = f"none for {len(seconds) - len(loose)} of {len(seconds)} buckets"
    if not loose:
        return tight
    least, most = (f"{format_seconds(seconds[name])} for {name}" for name in (loose[0], loose[-1]))
    return f"{tight}, {least}" + (f" to {most}" if len(loose) > 1 else "")
