"""Answers about a predicted step, as numbers: what `graphshard.what_if` finds out."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from graphshard.debug.summary_page import Point, Row, Summary, Tile, render_summary
from graphshard.ir.plain import write
from graphshard.predict.explanation import Explanation
from graphshard.predict.search import seconds_by_part
from graphshard.predict.training_config import TrainingCost
from graphshard.utils.argument_validation import path_of, write_given
from graphshard.utils.text import format_amount, format_bytes, format_count, format_seconds, plain_table

# Shares of a step below which a difference is not worth a word, and how many parts have one.
_NEGLIGIBLE, _PARTS = 0.001, 3


@dataclass(frozen=True)
class Outcome:
    """A predicted step in short; what is not explained here is as in `Explanation`.

    Attributes:
        batch: sequences of one rank in a microbatch; None if inputs have no batch.
        step_tokens: of all ranks, in a step.
        state_bytes: at the peak, what a rank holds less of if there are more.
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

    @property
    def fits(self) -> bool:
        """Whether a GPU has so much memory."""
        return self.peak_memory_bytes <= self.memory_capacity_bytes

    @property
    def memory(self) -> str:
        """Of how much there is, in words."""
        return f"{format_bytes(self.peak_memory_bytes)} of {format_bytes(self.memory_capacity_bytes)}"


@dataclass(frozen=True)
class Answer:
    """What a change would do.

    Attributes:
        about: the kind of change.
        change: what is changed.
        gain: of tokens per second per GPU, as a share: 0.1 is ten per cent more.
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
    """The step on another number of ranks; `efficiency` is of tokens per second per GPU, beside the given mesh."""

    ranks: int
    outcome: Outcome
    efficiency: float


@dataclass(frozen=True)
class Fit:
    """What fits into memory.

    Attributes:
        what: "the largest batch", the same with another policy of activations, or "the smallest mesh".
        outcome: the step with it; None if nothing fits or it is not known.
        why: there is none, or it may not be the last one.
    """

    what: str
    outcome: Outcome | None
    why: str


@dataclass(frozen=True)
class Answers:
    """A predicted step, and answers about it.

    Attributes:
        base: the step as it is.
        here: the same in short.
        changes: what each would do: those that fit by their gain, then those that do not.
        fits: the largest batch of a rank, and the fewest ranks, by halves or doubles.
        scaling: the same step on more and fewer ranks.
        left_out: what could not be predicted, and why.
    """

    base: Explanation
    here: Outcome
    changes: tuple[Answer, ...]
    fits: tuple[Fit, ...]
    scaling: tuple[Scaled, ...]
    left_out: tuple[str, ...]


def outcome_of(found: Explanation, batch: int | None) -> Outcome:
    """A prediction in short."""
    held = ("shards", "optimizer state", "gradients of earlier microbatches")
    return Outcome(
        mesh=found.mesh,
        hardware=found.hardware,
        network=found.network,
        batch=batch,
        microbatches=found.microbatches,
        step_tokens=found.step_tokens,
        step_time_s=found.step_time_s,
        tokens_per_second_per_gpu=found.tokens_per_second_per_gpu,
        mfu=found.mfu,
        exposed_comm_s=found.exposed_comm_s,
        peak_memory_bytes=found.peak_memory_bytes,
        state_bytes=sum(found.memory.get(what, 0) for what in held),
        memory_capacity_bytes=found.memory_capacity_bytes,
        num_ranks=found.num_ranks,
        cost=found.cost,
    )


def reason_of(base: Explanation, found: Explanation, *, gain: float, note: str = "", price: float | None = None) -> str:
    """What of the time per token changes, as shares of it, the largest first.

    Args:
        gain: of tokens per second per GPU.
        note: what else it does.
        price: of one of the base's GPUs for an hour, if the change is another GPU.
    """
    before, after = seconds_by_part(base), seconds_by_part(found)
    ranks, whole = found.num_ranks / base.num_ranks, base.seconds_per_token
    shares = {what: (after[what] * ranks - before[what]) / whole for what in before}
    told = sorted((what for what in shares if abs(shares[what]) >= _NEGLIGIBLE), key=lambda what: -abs(shares[what]))
    parts = [f"{what} {shares[what]:+.1%}" for what in told[:_PARTS]]
    words = [f"per token {', '.join(parts)}" if parts else "per token nothing changes by 0.1%"]
    if note:
        words.append(note)
    if found.step_tokens != base.step_tokens:
        words.append(f"{found.step_tokens / base.step_tokens:g} times the tokens in a step")
    if price is not None:
        words.append(f"the same money per token at {price * (1 + gain):,.2f} for a GPU hour")
    return "; ".join(words)


def shown_mesh(mesh: Mapping[str, int]) -> str:
    """Axes and sizes: "replicate 8, shard 8"."""
    return ", ".join(f"{name} {size}" for name, size in mesh.items())


def summary_of(found: Answers) -> Summary:
    """What the page shows."""
    base, cost = found.base, found.base.cost
    count = format_count(sum(math.prod(row.shape) for row in base._program.params))
    return Summary(
        title=f"{base.model}, {count} parameters, on {base.num_ranks:,} x {base.hardware}",
        lead=tuple(_lead(found)),
        tiles=tuple(_tiles(base)),
        headings=("Step", "Tokens/s per GPU", "Memory", *(["GPU hours"] if cost else [])),
        changes=tuple(_row(each) for each in found.changes),
        fits=tuple(fits_in_words(found)),
        scaling_headings=("Step", "Tokens/s per GPU", "Exposed", "MFU", "Memory", *(["Days"] if cost else [])),
        scaling=tuple(
            Point(
                each.ranks,
                each.outcome.tokens_per_second_per_gpu,
                each.efficiency,
                each.ranks == base.num_ranks,
                scaled_cells(each.outcome),
            )
            for each in found.scaling
        ),
        assumptions=tuple(_assumptions(base)),
        left_out=found.left_out,
    )


def fits_in_words(found: Answers) -> Iterator[str]:
    """The largest batch and the smallest mesh, a sentence each."""
    for fit in found.fits:
        what, outcome = f"{fit.what[0].upper()}{fit.what[1:]}", fit.outcome
        if outcome is not None:
            number = shown_mesh(outcome.mesh) if "mesh" in fit.what else f"{outcome.batch} for each rank"
            speed = f"{outcome.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
            yield f"{what} is {number}: {outcome.memory}, {speed}{f'; {fit.why}' if fit.why else ''}."
        else:
            yield f"{what}: {fit.why}."


def _lead(found: Answers) -> Iterator[str]:
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
        yield f"{_tokens(cost)} take {_days(cost)}, and {format_amount(cost.gpu_hours)} GPU hours{_money(cost)}."
    better = [each for each in found.changes if each.gain > 0 and each.outcome.fits]
    if better:
        best = ", ".join(f"{each.change} ({each.gain:+.1%})" for each in better[:3])
        yield f"Single changes that gain the most: {best}."
    elif found.changes:
        yield "None of the changes gains anything."


def _tiles(base: Explanation) -> Iterator[Tile]:
    low, high = base.step_range_s
    cost = base.cost
    between = f"{format_seconds(low)} to {format_seconds(high)}" if low < high else ""
    yield Tile("Step", format_seconds(base.step_time_s), between)
    slowest, fastest = (base.tokens_per_second_per_gpu * base.step_time_s / seconds for seconds in (high, low))
    yield Tile(
        "Tokens/s per GPU",
        f"{base.tokens_per_second_per_gpu:,.0f}",
        f"{slowest:,.0f} to {fastest:,.0f}" if low < high else "",
    )
    yield Tile("MFU", f"{base.mfu:.1%}", f"of the data sheet's peak of {base.hardware}")
    if cost is not None:
        short, long = cost.range
        spread = short < long
        days = f"{format_amount(cost.days * short)} to {format_amount(cost.days * long)}" if spread else ""
        yield Tile("Days", format_amount(cost.days), days)
        hours = f"{format_amount(cost.gpu_hours * short)} to {format_amount(cost.gpu_hours * long)}" if spread else ""
        yield Tile("GPU hours", format_amount(cost.gpu_hours), hours)
        if cost.money is not None:
            money = f"{format_amount(cost.money * short)} to {format_amount(cost.money * long)}, " if spread else ""
            yield Tile("Money", format_amount(cost.money), f"{money}at {cost.price:,.2f} for a GPU hour")
    room = base.memory_capacity_bytes
    yield Tile(
        "Memory of a GPU",
        format_bytes(base.peak_memory_bytes),
        f"of {format_bytes(room)}" + ("" if base.peak_memory_bytes <= room else ": it does not fit"),
    )


def _row(answer: Answer) -> Row:
    return Row(answer.change, answer.gain, answer.outcome.fits, changed_cells(answer.outcome), answer.reason)


def changed_cells(outcome: Outcome) -> tuple[str, ...]:
    """Step, tokens per second, memory, and GPU hours if they are asked for."""
    return (
        format_seconds(outcome.step_time_s),
        f"{outcome.tokens_per_second_per_gpu:,.0f}",
        format_bytes(outcome.peak_memory_bytes),
        *([format_amount(outcome.cost.gpu_hours)] if outcome.cost else []),
    )


def scaled_cells(outcome: Outcome) -> tuple[str, ...]:
    """Step, tokens per second, exposed, MFU, memory, and days if they are asked for."""
    return (
        format_seconds(outcome.step_time_s),
        f"{outcome.tokens_per_second_per_gpu:,.0f}",
        format_seconds(outcome.exposed_comm_s),
        f"{outcome.mfu:.1%}",
        format_bytes(outcome.peak_memory_bytes),
        *([format_amount(outcome.cost.days)] if outcome.cost else []),
    )


def _assumptions(base: Explanation) -> Iterator[str]:
    yield (
        f"Nothing was run. The step is predicted from the model's own operators, the schedule that graphshard plans "
        f"for them on {shown_mesh(base.mesh)}, and the profile of {base.hardware} ({base.profile_hash[:12]}) with the "
        f'network model "{base.network}".'
    )
    yield (
        f"A step is {base.microbatches} forward and backward and one optimizer step."
        if base.microbatches == 1
        else f"A step is {base.microbatches} forwards and backwards and one optimizer step."
    ) + " Loading of data, checkpoints, evaluation and failures are not in it."
    if base.step_range_s[0] < base.step_range_s[1]:
        yield (
            "Ranges are from the tenth to the ninetieth percentile, as far as constants of the machine are not known "
            "well. What the model of the machine leaves out is not in them."
        )
    yield ("Memory is that of values which are alive at the same time, without what drivers and libraries take.")
    yield "Another batch, or more microbatches, are other numbers of tokens in a step: training must allow that."
    if base.cost is not None:
        yield "Days and GPU hours are those of steps, one after the other."


def _tokens(cost: TrainingCost) -> str:
    return f"{format_count(round(cost.tokens))} tokens"


def _days(cost: TrainingCost) -> str:
    low, high = cost.range
    between = f" ({format_amount(cost.days * low)} to {format_amount(cost.days * high)})" if low < high else ""
    return f"{format_amount(cost.days)} days{between}"


def _money(cost: TrainingCost) -> str:
    return "" if cost.money is None else f", which are {format_amount(cost.money)} at {cost.price:,.2f} each"


@dataclass(frozen=True)
class WhatIf(Answers):
    """Answers about a predicted step, for people; its attributes are those of `Answers`."""

    def __str__(self) -> str:
        """The step, and a table for each question."""
        parts = [
            str(self.base),
            "",
            "what if",
            _changes(self.changes, self.here),
            "",
            "what fits",
            *(f"* {line}" for line in fits_in_words(self)),
        ]
        if self.scaling:
            parts += ["", "scaling", _scaling(self.scaling)]
        return "\n".join([*parts, *(f"* left out: {reason}" for reason in self.left_out)])

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain data."""
        names = [each.name for each in dataclasses.fields(self) if each.name != "base"]
        return {"base": self.base.to_dict(), **{name: write(getattr(self, name)) for name in names}}

    def to_json(self) -> str:
        """All numbers as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page for those who decide, and the step's timeline for engineers beside it.

        The page is at `path`, and links to the other, at the same path with ".timeline" before its ending.
        """
        page = path_of("path", path, "a file to write")
        timeline = timeline_beside(page)
        write_given("path", page, render_summary(summary_of(self), timeline.name))
        self.base.save_html(timeline)


def timeline_beside(page: Path) -> Path:
    """Where the timeline of a page is: "plan.html" has "plan.timeline.html"."""
    return page.with_name(f"{page.stem}.timeline{page.suffix or '.html'}")


def _changes(changes: tuple[Answer, ...], here: Outcome) -> str:
    table = Table(box=None)
    priced = here.cost is not None
    table.add_column("change")
    for heading in ("step", "tokens/s per GPU", "gain", "memory", *(["GPU hours"] if priced else [])):
        table.add_column(heading, justify="right")
    for heading in ("fits", "because"):
        table.add_column(heading)
    rows = [("as it is", None, here, ""), *((each.change, each.gain, each.outcome, each.reason) for each in changes)]
    for name, gain, outcome, reason in rows:
        step, speed, *rest = changed_cells(outcome)
        gained = "" if gain is None else f"{gain:+.1%}"
        table.add_row(Text(name), step, speed, gained, *rest, "yes" if outcome.fits else "no", Text(reason))
    return plain_table(table)


def _scaling(scaling: tuple[Scaled, ...]) -> str:
    table = Table(box=None)
    priced = any(row.outcome.cost for row in scaling)
    table.add_column("mesh")
    headings = ("step", "tokens/s per GPU", "efficiency", "exposed", "MFU", "memory", *(["days"] if priced else []))
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in scaling:
        step, speed, *rest = scaled_cells(row.outcome)
        table.add_row(shown_mesh(row.outcome.mesh), step, speed, f"{row.efficiency:.1%}", *rest)
    return plain_table(table)
