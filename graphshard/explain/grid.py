"""Several predictions side by side; which is the best, and why: by time per token, and what makes the difference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from graphshard.explain.explanation import Explanation
from graphshard.ir.terminal import plain_table
from graphshard.ir.text import format_amount, format_bytes, format_seconds

# Columns of a training, if it was asked what one costs.
_COST = ("days", "GPU hours", "money")
# A column of pipelines, if there are any.
_STAGED = ("bubble",)


@dataclass(frozen=True)
class Grid:
    """Several predictions side by side.

    Attributes:
        left_out: what there is no prediction for, and why: it does not fit, or the mesh is larger than the batch.
    """

    rows: tuple[Explanation, ...]
    left_out: tuple[str, ...] = ()

    def ranking(self, most: int = 5) -> str:
        """The best few by time per token, why the first is first, and what was left out for which reason."""
        return _ranking(self.rows, self.left_out, most)

    @property
    def best(self) -> Explanation:
        """Most tokens per second of those that fit into memory, or of all if none does."""
        fitting = [row for row in self.rows if row.limit != "memory"]
        return max(fitting or self.rows, key=lambda row: row.tokens_per_second)

    def __str__(self) -> str:
        """One line for each."""
        table = Table(box=None)
        headings = ("step", "compute", "exposed", "bound", "gap", "tokens/s", "MFU", "memory")
        for heading in ("setting", "mesh", "hardware", "network"):
            table.add_column(heading)
        costed, staged = any(row.cost for row in self.rows), any(row.pipeline for row in self.rows)
        for heading in (*headings, *(_STAGED if staged else ()), *(_COST if costed else ())):
            table.add_column(heading, justify="right")
        table.add_column("limited by")
        for row in self.rows:
            table.add_row(
                *map(Text, (row.label, " x ".join(map(str, row.mesh.values())), row.hardware, row.network)),
                format_seconds(row.step_time_s),
                format_seconds(row.compute_s),
                format_seconds(row.exposed_comm_s),
                format_seconds(row.lower_bound_s),
                f"{row.gap:.1%}",
                f"{row.tokens_per_second:,.0f}",
                f"{row.mfu:.1%}",
                format_bytes(row.peak_memory_bytes),
                *((format_seconds(row.bubble_s),) if staged else ()),
                *(_cost_cells(row) if costed else ()),
                row.limit,
            )
        return plain_table(table)

    def to_json(self) -> str:
        """All numbers as JSON."""
        return json.dumps([row.to_dict() for row in self.rows], indent=1)


def ranked(rows: Sequence[Explanation]) -> list[Explanation]:
    """Those that fit into memory, the least time per token of all ranks first."""
    return sorted((row for row in rows if row.limit != "memory"), key=lambda row: row.seconds_per_token)


def name_of(row: Explanation) -> str:
    """What a prediction is for: "dp 32, tp 8 (keep)"."""
    axes = ", ".join(f"{name} {size}" for name, size in row.mesh.items())
    return f"{axes}{f' ({row.label})' if row.label else ''}"


def _ranking(rows: Sequence[Explanation], left_out: Sequence[str], most: int) -> str:
    """The best few as a table, why the first is first, and what does not fit."""
    best = ranked(rows)
    lines = [_table(best[:most])] if best else []
    if len(best) > 1:
        lines.append(f"* {name_of(best[0])} is best, because {_because(best[0], best[1], 'the next one')}")
    lines += [f"* {_because(best[0], other)}" for other in best[2:most]]
    if best:
        lines += [f"* {advice}" for advice in best[0].advice[:1]]
    lines += [f"* left out: {reason}" for reason in [*_too_large(rows), *left_out]]
    return "\n".join(lines)


def _table(rows: Sequence[Explanation]) -> str:
    table = Table(box=None)
    for heading in ("mesh", "hardware", "network"):
        table.add_column(heading)
    costed = any(row.cost for row in rows)
    staged = any(row.pipeline for row in rows)
    headings = ("per token", "step", "microbatches", "compute", "exposed", "of the model", "MFU", "memory")
    for heading in (*headings, *(_STAGED if staged else ()), *(_COST if costed else ())):
        table.add_column(heading, justify="right")
    table.add_column("limited by")
    for row in rows:
        table.add_row(
            *map(Text, (name_of(row), row.hardware, row.network)),
            format_seconds(row.seconds_per_token),
            format_seconds(row.step_time_s),
            str(row.microbatches),
            format_seconds(row.compute_s),
            format_seconds(row.exposed_comm_s),
            format_seconds(row.model_comm_s),
            f"{row.mfu:.1%}",
            format_bytes(row.peak_memory_bytes),
            *((format_seconds(row.bubble_s),) if staged else ()),
            *(_cost_cells(row) if costed else ()),
            row.limit,
        )
    return plain_table(table)


def _cost_cells(row: Explanation) -> tuple[str, ...]:
    """As `_COST` says; a row of a setting without tokens has none."""
    if row.cost is None:
        return "", "", ""
    money = "" if row.cost.money is None else format_amount(row.cost.money)
    return format_amount(row.cost.days), format_amount(row.cost.gpu_hours), money


def seconds_by_part(row: Explanation) -> dict[str, float]:
    """What a step consists of: seconds for each token of all ranks."""
    parts = {
        "compute": row.compute_s,
        "waiting for parameters and gradients": row.exposed_comm_s - row.model_comm_s,
        "the model's own collectives": row.model_comm_s,
        "the optimizer": row.optimizer_s,
        "the bubble": row.bubble_s,
    }
    return {what: seconds / row.step_tokens for what, seconds in parts.items()}


def _because(best: Explanation, other: Explanation, which: str = "") -> str:
    """What the second one spends more time on, for each token, and what less.

    Args:
        which: it is, in words.
    """
    whole, mine, others = other.seconds_per_token, seconds_by_part(best), seconds_by_part(other)
    shares = {what: (others[what] - mine[what]) / whole for what in mine}
    more = [f"{share:.1%} {what}" for what, share in sorted(shares.items(), key=lambda s: -s[1]) if share > 0.0005]
    less = [f"{-share:.1%} {what}" for what, share in sorted(shares.items(), key=lambda s: s[1]) if share < -0.0005]
    if not more:
        return f"{name_of(other)} is no faster: {format_seconds(whole)} per token"
    saved = f", and saves {', '.join(less)}" if less else ""
    named = f"{name_of(other)}, {which} ({format_seconds(whole)} per token)," if which else name_of(other)
    return f"{named} spends of {'that' if which else 'its'} time {', '.join(more)} more{saved}"


def _too_large(rows: Sequence[Explanation]) -> list[str]:
    large = [row for row in rows if row.limit == "memory"]
    return [
        f"{name_of(row)} on {row.hardware}: {format_bytes(row.peak_memory_bytes)} are needed, "
        f"{format_bytes(row.memory_capacity_bytes)} are there"
        for row in large
    ]
