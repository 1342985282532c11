"""Answers in the words and numbers of the page for those who decide (`graphshard.report.summary`)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from graphshard.explain.answers import Answer, Answers, Outcome, shown_mesh
from graphshard.explain.explanation import Explanation
from graphshard.explain.training import TrainingCost
from graphshard.ir.text import format_amount, format_bytes, format_count, format_seconds
from graphshard.report.summary import Point, Row, Summary, Tile


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
