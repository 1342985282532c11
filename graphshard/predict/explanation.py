"""What a prediction says of a pipeline: its stages, what they wait for each other, and what each holds."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rich.table import Table
from rich.text import Text

from graphshard.cost.costs import Costs
from graphshard.debug.html_report import render, report_of
from graphshard.debug.perfetto import trace_events
from graphshard.ir.plain import write
from graphshard.ir.program import Program
from graphshard.predict.symbolic_cost import Formulas
from graphshard.predict.training_config import TrainingCost
from graphshard.schedule.memory import Memory
from graphshard.schedule.timeline import Estimate
from graphshard.utils.argument_validation import write_given
from graphshard.utils.text import format_bytes, format_seconds, plain_table


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
class Pipelined:
    """A step of a pipeline. Rank i has every stage i + j * ranks.

    Attributes:
        schedule: "1f1b", "gpipe" or "interleaved".
        stages: in order.
        bubble_s: in which the slowest rank has nothing to do: it waits for other stages.
        model_comm_s: in which its compute waits for what the model itself communicates.
        sent_bytes, sending_s: of one microbatch from stage to stage, over the border where that takes longest.
        rank_s: by rank, seconds in which it is busy, with the optimizer.
        rank_bytes: by rank, the most memory.
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
        return max(range(len(self.rank_s)), key=self.rank_s.__getitem__)

    @property
    def largest(self) -> int:
        """The rank that needs the most memory."""
        return max(range(len(self.rank_bytes)), key=self.rank_bytes.__getitem__)

    def __str__(self) -> str:
        counts = [stage.blocks for stage in self.stages]
        blocks = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
        slowest, largest = self.named(self.slowest), self.named(self.largest)
        least = min(self.rank_bytes)
        return (
            f"{self.schedule}, {len(counts)} stages of {blocks} blocks; bubble {format_seconds(self.bubble_s)}; "
            f"slowest {slowest}; most memory {format_bytes(self.rank_bytes[self.largest])} in {largest}, least "
            f"{format_bytes(least)}; {format_bytes(self.sent_bytes)} sent in {format_seconds(self.sending_s)}"
        )

    def named(self, rank: int) -> str:
        """The stages of a rank: "stage 3", "stages 3 and 7"."""
        stages = list(map(str, range(rank, len(self.stages), len(self.rank_s))))
        return f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(stages[:-1])} and {stages[-1]}"

    def memory_by_stage(self) -> Mapping[str, int]:
        """Bytes by the stages of a rank."""
        return {self.named(rank): size for rank, size in enumerate(self.rank_bytes)}


# How many waits the table names, and what it calls the links.
_WAITS = 3
_LINKS = {
    "node": "link in the node",
    "network": "link between nodes",
    "host": "link from the host",
    "to_host": "link to the host",
}


@dataclass(frozen=True)
class RegionCost:
    """A distinct region: seconds of one call, how often a step calls it, and whether the time was measured."""

    name: str
    key: str
    where: str
    calls: int
    seconds: float
    measured: bool


@dataclass(frozen=True)
class Wait:
    """Exposed communication: compute waits for a bucket.

    Attributes:
        bucket: what it waits for.
        phase: "forward" or "backward".
        seconds: how long.
        why: "head" (the phase's first collective), "tail" (its last), "link" (the bucket queued for the link),
            "late" (it was launched too late, or is longer than what it could hide behind) or "model" (it is the model's
            own collective, which runs where the model has it).
        behind: the bucket that it queued behind, or "".
        without: of the longest waits, by the name of what makes it wait: seconds that the wait would be shorter if that
            took no time; the bucket itself is among them.
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
class Inside:
    """The program behind a prediction, and what was made of it."""

    program: Program
    costs: Costs
    timeline: Estimate
    memory: Memory


@dataclass(frozen=True)
class Explanation:
    """A predicted training step of one rank; seconds and bytes.

    Attributes:
        model: class of the module.
        label: name of the setting, in a grid.
        mesh: sizes by axis.
        data_ranks: ranks that have tokens of their own; those along a tensor axis have the same.
        hardware, profile_hash: the profile's name and the hash of its numbers.
        network: model of the network between nodes.
        plan_hash: of the schedule.
        tokens: that one rank processes in a step: elements of the first integer input, or the batch size.
        microbatches: forwards and backwards of a step. Waits, the critical path, slack and formulas are of one.
        step_time_s: forward, backward and optimizer.
        step_range_s: between which seconds it lies in four of five cases (p10 to p90), as far as constants of the
            profile are known: those that are assumed have ranges there. What the model leaves out is not in it.
        compute_s: regions of forward and backward, with what communication beside them slows them down.
        optimizer_s: reads and writes of the optimizer.
        communication_s: all collectives.
        exposed_comm_s: compute waits for communication.
        head_s, tail_s: of that, what compute waits where nothing is there to hide it: for the first gathers of the
            step, mostly the embedding's, and for its last reductions.
        lower_bound_s: no schedule of the same compute on the same link is faster, with the model's own collectives
            where the model has them.
        gap: step_time_s / lower_bound_s - 1.
        search_stopped: the search for a plan ended at its budget of steps, before all shorter ones were ruled out.
        peak_memory_bytes: of values alive at once between regions, with gradients and optimizer state.
        memory: at the peak, by what it is.
        memory_capacity_bytes: of the device.
        flop: of the model, forward and backward without recomputation, a multiply-add as two.
        mfu: time that `flop` takes at the data sheet's peak, over step_time_s.
        limit: "compute", "link", "head", "tail", "model" (what the model itself communicates), "bubble" (stages of a
            pipeline wait for each other) or "memory".
        advice: what would help, from formulas.
        waits: what compute waits for, longest first.
        critical_path: seconds of it by what they are: "compute", and the names of collectives and copies in their
            order. They follow each other without a gap from the begin of forward to the end of backward, so the step is
            as long as they are.
        slack: by bucket, seconds by which its collective could end later, because it began later or took longer, and
            the step would not, but for what it slows down beside it where the profile has contention.
        busy: share of the step in which compute, and each link ("node", "network"), is busy.
        regions: distinct regions, the most expensive first.
        formulas: of the step, if symbols were asked for.
        cost: of a training on so many tokens, if that was asked for.
        pipeline: of a mesh with a pipeline axis, the stages. Seconds are then those of the rank that is busy longest,
            and memory that of the one that needs the most. What is of one microbatch is of that rank's last one.
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
    waits: tuple[Wait, ...]
    critical_path: dict[str, float]
    slack: dict[str, float]
    busy: dict[str, float]
    regions: tuple[RegionCost, ...]
    _make: Callable[[], Inside] = field(repr=False, compare=False)
    formulas: Formulas | None = field(default=None, repr=False, compare=False)
    cost: TrainingCost | None = None
    pipeline: Pipelined | None = None

    @cached_property
    def _inside(self) -> Inside:
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
    def _memory(self) -> Memory:
        return self._inside.memory

    def numbers(self) -> Explanation:
        """Without the program behind it, for another process."""
        return replace(self, _make=_elsewhere)

    def made_by(self, explain: Callable[..., Explanation], *where: Any) -> Explanation:
        """With the program that `explain` makes again for the same place, once it is asked for."""
        return replace(self, _make=lambda: explain(*where)._inside)

    @property
    def num_ranks(self) -> int:
        """Ranks of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def step_tokens(self) -> int:
        """Of all ranks, in a step."""
        return self.tokens * self.data_ranks

    @property
    def seconds_per_token(self) -> float:
        """Of the mesh as a whole."""
        return self.step_time_s / self.step_tokens

    @property
    def model_comm_s(self) -> float:
        """Compute waits for what the model itself communicates; a part of `exposed_comm_s`."""
        if self.pipeline:
            return self.pipeline.model_comm_s
        return self.microbatches * sum(wait.seconds for wait in self.waits if wait.why == "model")

    @property
    def bubble_s(self) -> float:
        """Stages of a pipeline wait for each other."""
        return self.pipeline.bubble_s if self.pipeline else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.step_tokens / self.step_time_s

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Of one rank of the mesh."""
        return self.tokens_per_second / self.num_ranks

    def __str__(self) -> str:
        """The table."""
        table = Table(box=None, show_header=False)
        for name, value in self._facts():
            table.add_row(name, Text(value))
        lines = [f"* {line}" for line in self.advice] + list(self._formulas())
        return "\n".join([plain_table(table), *lines])

    def _formulas(self) -> Iterator[str]:
        """How the step grows around here, and from where communication is hidden."""
        if self.formulas is None:
            return
        here = ", ".join(f"{name} {value}" for name, value in self.formulas.at.items())
        yield f"formulas around {here}:"
        for name in ("compute_s", "communication_s", "saved_bytes", "state_bytes"):
            yield f"  {name} = {self.formulas.smooth(name)}"
        symbol = next(iter(self.formulas.at))
        crossover = self.formulas.crossover(symbol)
        if crossover is not None:
            yield f"  communication_s <= compute_s from {symbol} {crossover.value} on: {crossover.formula}"

    def _facts(self) -> list[tuple[str, str]]:
        mesh = ", ".join(f"{name} {size}" for name, size in self.mesh.items())
        memory = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.memory.items())
        exposed = f"exposed {format_seconds(self.exposed_comm_s)} ({self.exposed_comm_s / self.step_time_s:.1%}; "
        exposed += f"head {format_seconds(self.head_s)}, tail {format_seconds(self.tail_s)})"
        step = f"{format_seconds(self.step_time_s)}{self._between()}"
        speed = f"{self.tokens_per_second:,.0f} tokens/s, {self.tokens_per_second_per_gpu:,.0f} per GPU"
        return [
            ("model", f"{self.model}{f' ({self.label})' if self.label else ''}, {self.tokens} tokens per rank"),
            ("mesh", mesh),
            ("hardware", f"{self.hardware}, network {self.network}, profile {self.profile_hash[:12]}"),
            ("step", f"{step}, {speed}, MFU {self.mfu:.1%}"),
            ("compute", f"{format_seconds(self.compute_s)}, optimizer {format_seconds(self.optimizer_s)}"),
            ("communication", f"{format_seconds(self.communication_s)}, {exposed}"),
            ("longest waits", ", ".join(map(str, self.waits[:_WAITS])) or "none"),
            ("critical path", _path(self.critical_path)),
            ("slack", _slack(self.slack)),
            ("busy", ", ".join(f"{_LINKS.get(name, name)} {share:.1%}" for name, share in self.busy.items())),
            ("lower bound", f"{format_seconds(self.lower_bound_s)}, gap {self.gap:.1%}{self._stopped()}"),
            (
                "memory",
                f"{format_bytes(self.peak_memory_bytes)} of {format_bytes(self.memory_capacity_bytes)}: {memory}",
            ),
            *([("pipeline", str(self.pipeline))] if self.pipeline else []),
            ("limited by", self.limit),
            *([("training", str(self.cost))] if self.cost else []),
        ]

    def _between(self) -> str:
        """The range that follows from assumed constants, if there is one."""
        low, high = self.step_range_s
        return f" ({format_seconds(low)} to {format_seconds(high)})" if low < high else ""

    def _stopped(self) -> str:
        return ", as the search for a shorter plan ended at its budget" if self.search_stopped else ""

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report with timeline, memory curve, buckets and regions: one file that needs no network."""
        write_given("path", path, render(report_of(self._program, costs=self._costs, files=False)))

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline for ui.perfetto.dev or chrome://tracing (Trace Event Format, JSON)."""
        title = f"{self.model} on {self.num_ranks} x {self.hardware}"
        write_given("path", path, json.dumps(trace_events(self._timeline, self._memory, title)))

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain data."""
        shown = (field.name for field in dataclasses.fields(self) if not field.name.startswith("_"))
        data = {name: write(getattr(self, name)) for name in shown if name != "formulas"}
        formulas = str(self.formulas) if self.formulas else None
        return {**data, "formulas": formulas, "tokens_per_second": self.tokens_per_second}

    def to_json(self) -> str:
        """All numbers as JSON."""
        return json.dumps(self.to_dict(), indent=1)


def _elsewhere() -> Inside:
    raise AssertionError("the program is in another process")


def _path(seconds: Mapping[str, float]) -> str:
    """Compute and the longest of the rest, as shares."""
    whole = sum(seconds.values())
    rest = sorted((name for name in seconds if name != "compute"), key=lambda name: -seconds[name])
    shown = [name for name in ("compute", *rest[:_WAITS]) if name in seconds]
    parts = [f"{name} {seconds[name] / whole:.1%}" for name in shown]
    if more := rest[_WAITS:]:
        parts.append(f"{len(more)} more {sum(seconds[name] for name in more) / whole:.1%}")
    return ", ".join(parts) or "nothing"


def _slack(seconds: Mapping[str, float]) -> str:
    """How many buckets have none, and who has the least and the most."""
    loose = sorted((name for name in seconds if seconds[name]), key=lambda name: seconds[name])
    tight = f"none for {len(seconds) - len(loose)} of {len(seconds)} buckets"
    if not loose:
        return tight
    least, most = (f"{format_seconds(seconds[name])} for {name}" for name in (loose[0], loose[-1]))
    return f"{tight}, {least}" + (f" to {most}" if len(loose) > 1 else "")
