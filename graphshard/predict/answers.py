"""The result of `graphshard.what_if`: as numbers, tables, JSON, and an HTML page without scripts that prints."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from graphshard.debug.html_report import template_environment
from graphshard.predict.explanation import Explanation, shown_mesh
from graphshard.predict.search import CELLS, seconds_by_part
from graphshard.predict.step_prediction import EARLIER_GRADIENTS, OPTIMIZER_STATE
from graphshard.predict.training_config import TrainingCost
from graphshard.utils.argument_validation import path_of, write_given
from graphshard.utils.json_dataclasses import write
from graphshard.utils.text import format_amount, format_bytes, format_count, format_seconds, new_table, plain_table

# Size of the drawing of scaling in its own units, and its margins for labels.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 480, 230, 62, 22, 26, 34
# Differences below this share of a step are not mentioned, nor more parts than these.
_NEGLIGIBLE, _MOST_PARTS = 0.001, 3


@dataclass(frozen=True)
class Outcome:
    """The main numbers of a predicted step, as in `Explanation`.

    `batch` are sequences of one rank in a microbatch; None if inputs have no batch. `state_bytes` is the part of the
    peak that shrinks with the number of ranks.
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
        return self._cells("step", "tokens/s per GPU", "memory", "GPU hours")

    @property
    def scaling_cells(self) -> dict[str, str]:
        """Cells of a table of numbers of ranks, by heading."""
        return self._cells("step", "tokens/s per GPU", "exposed", "MFU", "memory", "days")

    def _cells(self, *headings: str) -> dict[str, str]:
        return {name: CELLS[name](self) for name in headings if self.cost or name not in ("GPU hours", "days")}


@dataclass(frozen=True)
class Answer:
    """The effect of one change of a kind, `about`.

    `gain` is in tokens per second per GPU, as a share: 0.1 is ten percent more. `reason` says which parts of the time
    per token get longer and shorter.
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
    """The largest or smallest setting that fits into memory; prints as a sentence.

    `what` is "the largest batch", the same with another policy of activations, or "the smallest mesh". `why` says why
    there is no outcome, or why it may not be the last one.
    """

    what: str
    outcome: Outcome | None
    why: str

    def __str__(self) -> str:
        what, outcome = f"{self.what[0].upper()}{self.what[1:]}", self.outcome
        if outcome is None:
            return f"{what}: {self.why}."
        number = shown_mesh(outcome.mesh) if "mesh" in self.what else f"{outcome.batch} for each rank"
        speed = f"{outcome.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
        return f"{what} is {number}: {outcome.memory}, {speed}{f'; {self.why}' if self.why else ''}."


@dataclass(frozen=True)
class WhatIf:
    """A predicted step, and answers about it; prints as a table for each question.

    Attributes:
        base, here: the step as it is, and its main numbers.
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
        parts = [str(self.base), "", "what if", self._change_table(), "", "what fits"]
        parts += [f"* {fit}" for fit in self.fits]
        if self.scaling:
            parts += ["", "scaling", self._scaling_table()]
        return "\n".join([*parts, *(f"* left out: {reason}" for reason in self.left_out)])

    def _change_table(self) -> str:
        step, speed, *rest = self.here.change_cells
        table = new_table(["change"], [step, speed, "gain", *rest])
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
        table = new_table(["mesh"], [step, speed, "efficiency", *rest])
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
        """Write a summary page, and the step's timeline for engineers, at the same path with ".timeline" inserted."""
        page = path_of("path", path, "a file to write")
        timeline = page.with_name(f"{page.stem}.timeline{page.suffix or '.html'}")
        base = self.base
        count = format_count(sum(math.prod(row.shape) for row in base._program.params))
        title = f"{base.model}, {count} parameters, on {base.num_ranks:,} x {base.hardware}"
        write_given("path", page, render_summary(self, timeline.name, title))
        base.save_html(timeline)


def reason_of(base: Explanation, found: Explanation, *, gain: float, note: str = "", price: float | None = None) -> str:
    """Say which parts of the time per token change, as shares of it, the largest first.

    `price` is of one of the base's GPUs for an hour, if the change is another GPU.
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


def render_summary(found: WhatIf, timeline: str, title: str) -> str:
    """Return the page as the text of one HTML file; `timeline` is a relative link to the report for engineers."""
    env = template_environment()
    env.filters |= {"heading": lambda text: f"{text[:1].upper()}{text[1:]}", "amount": format_amount}
    env.filters |= {"time": format_seconds, "size": format_bytes, "count": format_count, "mesh": shown_mesh}
    most = max((abs(row.gain) for row in found.changes), default=0.0)
    widths = [round(100 * abs(row.gain) / most) if most else 0 for row in found.changes]
    drawing = drawing_of(found.scaling, found.here.num_ranks)
    page = env.get_template("summary.html.j2")
    return page.render(found=found, base=found.base, title=title, timeline=timeline, widths=widths, drawing=drawing)


def drawing_of(rows: Sequence[Scaled], given: int) -> dict[str, Any] | None:
    """Return the curve of speed over the logarithm of ranks, with marks, ticks and the line of an ideal network."""
    if len(rows) < 2:
        return None
    logs = [math.log2(row.ranks) for row in rows]
    speeds = {row.ranks: row.outcome.tokens_per_second_per_gpu for row in rows}
    here, fastest = speeds.get(given, speeds[rows[0].ranks]), max(speeds.values())
    power = 10.0 ** math.floor(math.log10(fastest / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= fastest / 4 * 0.999)
    top = step * math.ceil(fastest / step)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def y(speed: float) -> float:
        return round(bottom - (bottom - _TOP) * speed / top, 1)

    marks = [
        {
            "x": round(_LEFT + 24 + (right - _LEFT - 48) * (log - logs[0]) / ((logs[-1] - logs[0]) or 1), 1),
            "y": y(speeds[row.ranks]),
            "ranks": f"{row.ranks:,}",
            "efficiency": f"{row.efficiency:.0%}",
            "here": row.ranks == given,
        }
        for row, log in zip(rows, logs)
    ]
    ticks = [(y(step * count), f"{step * count:,.0f}") for count in range(round(top / step) + 1)]
    edges = {"width": _WIDTH, "height": _HEIGHT, "left": _LEFT, "right": right, "bottom": bottom}
    return {**edges, "ideal": y(here), "marks": marks, "ticks": ticks}
