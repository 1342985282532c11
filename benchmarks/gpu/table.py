"""Results of parts: rows, one JSON object per line while parts run, one Markdown table and one JSON file at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One result; numbers that do not apply or could not be measured are None.

    Attributes:
        part: that found it.
        setting: sizes and ranks.
        variant: measured object: a way to train, a region, a test.
        step: seconds of a step, or of a region.
        predicted: seconds of the same.
        peak: peak bytes of tensors.
        predicted_peak: bytes of the same.
        first: seconds from the model to the end of its first step.
        kernels: run on the device in a step.
        failed: whether something that should have worked did not.
        note: free text.
    """

    part: str
    setting: str = ""
    variant: str = ""
    step: float | None = None
    predicted: float | None = None
    peak: int | None = None
    predicted_peak: int | None = None
    first: float | None = None
    kernels: int | None = None
    failed: bool = False
    note: str = ""


Emit = Callable[[Row], None]


def appending(path: Path) -> Emit:
    """Return a function that appends each row to a file of lines at once."""

    def emit(row: Row) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    return emit


def rows_in(path: Path) -> list[Row]:
    """Return the rows that a part has written; the last line may be truncated if the part was ended."""
    known = {field.name for field in fields(Row)}
    rows = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows.append(Row(**{name: value for name, value in found.items() if name in known}))
    return rows


_HEADINGS = (
    *("part", "setting", "what", "step ms", "to FSDP2", "predicted ms"),
    *("peak GiB", "predicted GiB", "first step s", "kernels", ""),
)
# Baseline of the comparison in the same setting.
BASE = "FSDP2"


def markdown(rows: Iterable[Row]) -> str:
    """Return all rows as one table."""
    rows = list(rows)
    base = {(row.part, row.setting): row.step for row in rows if row.variant == BASE}
    lines = ["| " + " | ".join(_HEADINGS) + " |", "|--" * 3 + "|--:" * 7 + "|--|"]
    lines += ["| " + " | ".join(_cells(row, base.get((row.part, row.setting)))) + " |" for row in rows]
    return "\n".join(lines)


def _cells(row: Row, base: float | None) -> Iterator[str]:
    yield from (_escaped(text) for text in (row.part, row.setting, row.variant))
    yield _number(row.step, 1e3, 2)
    yield _number(row.step / base if row.step is not None and base else None, 1, 2)
    yield _number(row.predicted, 1e3, 2)
    yield _number(row.peak, 2**-30, 2)
    yield _number(row.predicted_peak, 2**-30, 2)
    yield _number(row.first, 1, 1)
    yield _number(row.kernels, 1, 0)
    yield _escaped(f"**failed**: {row.note}" if row.failed else row.note)


def _number(value: float | None, scale: float, digits: int) -> str:
    return "" if value is None else f"{value * scale:.{digits}f}"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
