"""Answers about a predicted step, the result of `graphshard.what_if`: as numbers, tables, JSON and an HTML page.

The page is for readers who decide: no scripts, no network, and it prints. Its numbers are texts with units; bars of
gains and the curve of scaling are CSS and SVG, made here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from graphshard.debug.html_report import template_environment
from graphshard.predict.explanation import Explanation, shown_mesh
from graphshard.predict.search import seconds_by_part
from graphshard.predict.step_prediction import EARLIER_GRADIENTS, OPTIMIZER_STATE
from graphshard.predict.training_config import TrainingCost
from graphshard.utils.argument_validation import path_of, write_given
from graphshard.utils.json_dataclasses import write
from graphshard.utils.text import format_amount, format_bytes, format_count, format_seconds, plain_table

# Size of the drawing of scaling in its own units, and its margins for labels.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 480, 230, 62, 22, 26, 34
# Differences below this share of a step are not mentioned, nor more parts than these.
_NEGLIGIBLE, _MOST_PARTS = 0.001, 3


@dataclass(frozen=True)
class Outcome:
    """The main numbers of a predicted step; those not described here are as in `Explanation`.

    Attributes:
        batch: sequences of one rank in a microbatch; None if inputs have no batch.
        state_bytes: at the peak, the part that shrinks with the number of ranks.
    """

    mesh: dict[str, int]
    hardware: str
    network: str
    batch: int | None
    microbatches: int
    step_tokens: int
    step_time_s: float
    tokens_per_second_per_gpu: float
    mfu: float
    exposed_comm_s: float
    peak_memory_bytes: int
    state_bytes: int
    memory_capacity_bytes: float
    num_ranks: int
    cost: TrainingCost | None

    @staticmethod
    def of(found: Explanation, batch: int | None) -> Outcome:
        """Take the main numbers of a prediction."""
        state = sum(found.memory.get(what, 0) for what in ("shards", OPTIMIZER_STATE, EARLIER_GRADIENTS))
        own: dict[str, Any] = {"batch": batch, "state_bytes": state}
        names = [field.name for field in dataclasses.fields(Outcome) if field.name not in own]
        return Outcome(**own, **{name: getattr(found, name) for name in names})

    @property
    def fits(self) -> bool:
        """Whether the step fits into a GPU's memory."""
        return self.peak_memory_bytes <= self.memory_capacity_bytes

    @property
    def memory(self) -> str:
        """The peak and the capacity, in words."""
        return f"{format_bytes(self.peak_memory_bytes)} of {format_bytes(self.memory_capacity_bytes)}"

    @property
    def change_cells(self) -> dict[str, str]:
        """Cells of a table of changes, by heading."""
        hours = {"GPU hours": format_amount(self.cost.gpu_hours)} if self.cost else {}
        return {**self._speed_cells, "memory": format_bytes(self.peak_memory_bytes), **hours}

    @property
    def scaling_cells(self) -> dict[str, str]:
        """Cells of a table of numbers of ranks, by heading."""
        return {
            **self._speed_cells,
            "exposed": format_seconds(self.exposed_comm_s),
            "MFU": f"{self.mfu:.1%}",
            "memory": format_bytes(self.peak_memory_bytes),
            **({"days": format_amount(self.cost.days)} if self.cost else {}),
        }

    @property
    def _speed_cells(self) -> dict[str, str]:
        step, speed = format_seconds(self.step_time_s), f"{self.tokens_per_second_per_gpu:,.0f}"
        return {"step": step, "tokens/s per GPU": speed}


@dataclass(frozen=True)
class Answer:
    """The effect of one change.

    Attributes:
        about: the kind of change.
        change: its name.
        gain: in tokens per second per GPU, as a share: 0.1 is ten per cent more.
        outcome: the step with the change.
        reason: which parts of the time per token get longer and shorter.
    """

    about: str
    change: str
    gain: float
    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class Scaled:
    """The step on another number of ranks; `efficiency` is in tokens per second per GPU, relative to the given mesh."""

    ranks: int
    outcome: Outcome
    efficiency: float


@dataclass(frozen=True)
class Fit:
    """The largest or smallest setting that fits into memory.

    Attributes:
        what: "the largest batch", the same with another policy of activations, or "the smallest mesh".
        outcome: the step with it; None if nothing fits or it is not known.
        why: why there is none, or why it may not be the last one.
    """

    what: str
    outcome: Outcome | None
    why: str

    def __str__(self) -> str:
        """One sentence."""
        what, outcome = f"{self.what[0].upper()}{self.what[1:]}", self.outcome
        if outcome is None:
            return f"{what}: {self.why}."
        number = shown_mesh(outcome.mesh) if "mesh" in self.what else f"{outcome.batch} for each rank"
        speed = f"{outcome.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
        return f"{what} is {number}: {outcome.memory}, {speed}{f'; {self.why}' if self.why else ''}."


@dataclass(frozen=True)
class WhatIf:
    """A predicted step, and answers about it; prints as tables.

    Attributes:
        base: the step as it is.
        here: its main numbers.
        changes: the effect of each change: fitting ones by their gain, then the others.
        fits: the largest batch of a rank, and the fewest ranks, by halves or doubles.
        scaling: the same step on more and fewer ranks.
        left_out: settings that could not be predicted, and why.
    """

    base: Explanation
    here: Outcome
    changes: tuple[Answer, ...]
    fits: tuple[Fit, ...]
    scaling: tuple[Scaled, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        """The step, and a table for each question."""
        parts = [str(self.base), "", "what if", self._change_table(), "", "what fits"]
        parts += [f"* {fit}" for fit in self.fits]
        if self.scaling:
            parts += ["", "scaling", self._scaling_table()]
        return "\n".join([*parts, *(f"* left out: {reason}" for reason in self.left_out)])

    def _change_table(self) -> str:
        step, speed, *rest = self.here.change_cells
        table = _right_aligned("change", step, speed, "gain", *rest)
        for heading in ("fits", "because"):
            table.add_column(heading)
        rows = [("as it is", None, self.here, ""), *((a.change, a.gain, a.outcome, a.reason) for a in self.changes)]
        for name, gain, outcome, reason in rows:
            step, speed, *rest = outcome.change_cells.values()
            gained = "" if gain is None else f"{gain:+.1%}"
            table.add_row(Text(name), step, speed, gained, *rest, "yes" if outcome.fits else "no", Text(reason))
        return plain_table(table)

    def _scaling_table(self) -> str:
        step, speed, *rest = self.here.scaling_cells
        table = _right_aligned("mesh", step, speed, "efficiency", *rest)
        for row in self.scaling:
            step, speed, *rest = row.outcome.scaling_cells.values()
            table.add_row(shown_mesh(row.outcome.mesh), step, speed, f"{row.efficiency:.1%}", *rest)
        return plain_table(table)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers as plain data."""
        names = [each.name for each in dataclasses.fields(self) if each.name != "base"]
        return {"base": self.base.to_dict(), **{name: write(getattr(self, name)) for name in names}}

    def to_json(self) -> str:
        """Return all numbers as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write a summary page, and the step's timeline for engineers next to it.

        The page is at `path`, and links to the other, at the same path with ".timeline" before its suffix.
        """
        page = path_of("path", path, "a file to write")
        timeline = page.with_name(f"{page.stem}.timeline{page.suffix or '.html'}")
        write_given("path", page, render_summary(_summary_of(self), timeline.name))
        self.base.save_html(timeline)


def _right_aligned(first: str, *headings: str) -> Table:
    table = Table(first, box=None)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def reason_of(base: Explanation, found: Explanation, *, gain: float, note: str = "", price: float | None = None) -> str:
    """Say which parts of the time per token change, as shares of it, the largest first.

    Args:
        gain: in tokens per second per GPU.
        note: another effect of the change.
        price: of one of the base's GPUs for an hour, if the change is another GPU.
    """
    before, after = seconds_by_part(base), seconds_by_part(found)
    ranks, whole = found.num_ranks / base.num_ranks, base.seconds_per_token
    shares = {what: (after[what] * ranks - before[what]) / whole for what in before}
    told = sorted((what for what in shares if abs(shares[what]) >= _NEGLIGIBLE), key=lambda what: -abs(shares[what]))
    parts = [f"{what} {shares[what]:+.1%}" for what in told[:_MOST_PARTS]]
    words = [f"per token {', '.join(parts)}" if parts else "per token nothing changes by 0.1%"]
    if note:
        words.append(note)
    if found.step_tokens != base.step_tokens:
        words.append(f"{found.step_tokens / base.step_tokens:g} times the tokens in a step")
    if price is not None:
        words.append(f"the same money per token at {price * (1 + gain):,.2f} for a GPU hour")
    return "; ".join(words)


def _summary_of(found: WhatIf) -> Summary:
    base = found.base
    count = format_count(sum(math.prod(row.shape) for row in base._program.params))
    return Summary(
        title=f"{base.model}, {count} parameters, on {base.num_ranks:,} x {base.hardware}",
        lead=tuple(_lead(found)),
        tiles=tuple(_tiles(base)),
        headings=tuple(found.here.change_cells),
        changes=tuple(
            SummaryRow(a.change, a.gain, a.outcome.fits, tuple(a.outcome.change_cells.values()), a.reason)
            for a in found.changes
        ),
        fits=tuple(map(str, found.fits)),
        scaling_headings=tuple(found.here.scaling_cells),
        scaling=tuple(
            SummaryPoint(
                each.ranks,
                each.outcome.tokens_per_second_per_gpu,
                each.efficiency,
                each.ranks == base.num_ranks,
                tuple(each.outcome.scaling_cells.values()),
            )
            for each in found.scaling
        ),
        assumptions=tuple(_assumptions(base)),
        left_out=found.left_out,
    )


def _lead(found: WhatIf) -> Iterator[str]:
    base, cost = found.base, found.base.cost
    low, high = base.step_range_s
    between = f", and lies between {format_seconds(low)} and {format_seconds(high)} in four of five cases"
    yield (
        f"A step of {base.step_tokens:,} tokens takes {format_seconds(base.step_time_s)}"
        f"{between if low < high else ''}. Of it {base.compute_s / base.step_time_s:.1%} are compute, "
        f"{base.exposed_comm_s / base.step_time_s:.1%} waiting for communication, and the rest the optimizer."
    )
    if not found.here.fits:
        yield f"It does not fit: {found.here.memory}."
    if cost is not None:
        tokens = format_count(round(cost.tokens))
        money = "" if cost.money is None else f", which are {format_amount(cost.money)} at {cost.price:,.2f} each"
        yield f"{tokens} tokens take {cost.days_in_words}, and {format_amount(cost.gpu_hours)} GPU hours{money}."
    better = [each for each in found.changes if each.gain > 0 and each.outcome.fits]
    if better:
        best = ", ".join(f"{each.change} ({each.gain:+.1%})" for each in better[:3])
        yield f"Single changes that gain the most: {best}."
    elif found.changes:
        yield "None of the changes gains anything."


def _tiles(base: Explanation) -> Iterator[tuple[str, str, str]]:
    """Yield headline numbers: name, value, and a note below it."""
    low, high = base.step_range_s
    slowest, fastest = (base.tokens_per_second_per_gpu * base.step_time_s / seconds for seconds in (high, low))
    speed = f"{slowest:,.0f} to {fastest:,.0f}" if low < high else ""
    yield "Step", format_seconds(base.step_time_s), base.range_in_words
    yield "Tokens/s per GPU", f"{base.tokens_per_second_per_gpu:,.0f}", speed
    yield "MFU", f"{base.mfu:.1%}", f"of the data sheet's peak of {base.hardware}"
    cost = base.cost
    if cost is not None:
        yield "Days", format_amount(cost.days), cost.between(cost.days)
        yield "GPU hours", format_amount(cost.gpu_hours), cost.between(cost.gpu_hours)
        if cost.money is not None:
            money = cost.between(cost.money)
            price = f"at {cost.price:,.2f} for a GPU hour"
            yield "Money", format_amount(cost.money), f"{money}, {price}" if money else price
    room, peak = base.memory_capacity_bytes, base.peak_memory_bytes
    yield "Memory of a GPU", format_bytes(peak), f"of {format_bytes(room)}{'' if peak <= room else ': it does not fit'}"


def _assumptions(base: Explanation) -> Iterator[str]:
    yield (
        f"Nothing was run. The step is predicted from the model's own operators, the schedule that graphshard plans "
        f"for them on {shown_mesh(base.mesh)}, and the profile of {base.hardware} ({base.profile_hash[:12]}) with the "
        f'network model "{base.network}".'
    )
    phases = "forward and backward" if base.microbatches == 1 else "forwards and backwards"
    yield (
        f"A step is {base.microbatches} {phases} and one optimizer step. Loading of data, checkpoints, evaluation and "
        "failures are not in it."
    )
    if base.range_in_words:
        yield (
            "Ranges are from the tenth to the ninetieth percentile, as far as constants of the machine are not known "
            "well. What the model of the machine leaves out is not in them."
        )
    yield "Memory is that of values which are alive at the same time, without what drivers and libraries take."
    yield "Another batch, or more microbatches, are other numbers of tokens in a step: training must allow that."
    if base.cost is not None:
        yield "Days and GPU hours are those of steps, one after the other."


class SummaryRow(NamedTuple):
    """A change: its gain as a share, and the cells of further columns."""

    name: str
    gain: float
    fits: bool
    cells: tuple[str, ...]
    reason: str


class SummaryPoint(NamedTuple):
    """A number of ranks: tokens per second per GPU, also relative to the given mesh, which is `here`."""

    ranks: int
    speed: float
    efficiency: float
    here: bool
    cells: tuple[str, ...]


class Summary(NamedTuple):
    """Contents of the page: sentences, headline numbers (name, value, note) and tables with their headings."""

    title: str
    lead: tuple[str, ...]
    tiles: tuple[tuple[str, str, str], ...]
    headings: tuple[str, ...]
    changes: tuple[SummaryRow, ...]
    fits: tuple[str, ...]
    scaling_headings: tuple[str, ...]
    scaling: tuple[SummaryPoint, ...]
    assumptions: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def render_summary(data: Summary, timeline: str) -> str:
    """Return the page as the text of one HTML file.

    Args:
        timeline: relative link to the report for engineers.
    """
    env = template_environment()
    env.filters["heading"] = lambda text: f"{text[:1].upper()}{text[1:]}"
    most = max((abs(row.gain) for row in data.changes), default=0.0)
    widths = [round(100 * abs(row.gain) / most) if most else 0 for row in data.changes]
    page = env.get_template("summary.html.j2")
    return page.render(summary=data, timeline=timeline, widths=widths, drawing=drawing_of(data.scaling))


def drawing_of(points: Sequence[SummaryPoint]) -> dict[str, Any] | None:
    """Return the curve of several points over the logarithm of their ranks; None for less than two.

    It has marks, the line that an ideal network would give, and ticks of speed.
    """
    if len(points) < 2:
        return None
    logs = [math.log2(point.ranks) for point in points]
    here = next((point.speed for point in points if point.here), points[0].speed)
    fastest = max(here, *(point.speed for point in points))
    step = _round_step(fastest / 4)
    top = step * math.ceil(fastest / step)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def y(speed: float) -> float:
        return round(bottom - (bottom - _TOP) * speed / top, 1)

    marks = [
        {
            "x": round(_LEFT + 24 + (right - _LEFT - 48) * (log - logs[0]) / ((logs[-1] - logs[0]) or 1), 1),
            "y": y(point.speed),
            "ranks": f"{point.ranks:,}",
            "efficiency": f"{point.efficiency:.0%}",
            "here": point.here,
        }
        for point, log in zip(points, logs)
    ]
    ticks = [(y(step * count), f"{step * count:,.0f}") for count in range(round(top / step) + 1)]
    edges = {"width": _WIDTH, "height": _HEIGHT, "left": _LEFT, "right": right, "bottom": bottom}
    return {**edges, "ideal": y(here), "marks": marks, "ticks": ticks}


def _round_step(value: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * 0.999)
