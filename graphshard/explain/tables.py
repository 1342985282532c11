"""What `graphshard.what_if` returns: answers as tables, as JSON, and as a page for those who decide."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from graphshard.explain.answers import Answer, Answers, Outcome, Scaled, shown_mesh
from graphshard.explain.summary import changed_cells, fits_in_words, scaled_cells, summary_of
from graphshard.ir.given import path_of, write_given
from graphshard.ir.plain import write
from graphshard.ir.terminal import plain_table
from graphshard.report.summary import render_summary


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
