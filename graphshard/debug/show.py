"""What `graphshard show` prints: a stage, the summary of a dump, or a list of dumps."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphshard.codec.stage import plan_of
from graphshard.debug.stage_files import StageFile, existing, stages_in
from graphshard.ir.errors import ArgumentError
from graphshard.ir.plan import Plan

SUMMARY = "summary.json"
_SHOWN_DUMPS = 50


def show_path(path: Path, *, full: bool) -> None:
    """Print what is there.

    Raises:
        ArgumentError: nothing is there, or it cannot be read.
    """
    found = existing(path)
    if not found.is_dir():
        print(StageFile.at(found).text(full=full), end="")
    elif (found / SUMMARY).exists():
        _show_dump(found, _console())
    else:
        _show_dumps(found, _console())


def _console() -> Console:
    """As wide as the terminal; wide enough for any table elsewhere."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)


def _show_dump(directory: Path, console: Console) -> None:
    summary = _summary(directory / SUMMARY)
    title = ": ".join(filter(None, [summary.get("title", directory.name), summary.get("reason")]))
    console.print(Text(title, "bold"))
    axes = summary.get("axes", {"?": "?"}).items()
    versions = [f"{name} {summary[name]}" for name in ("torch", "graphshard") if name in summary]
    console.print(Text(", ".join([*(f"{size} ranks on axis {axis!r}" for axis, size in axes), *versions])))
    console.print(_stage_table(summary))
    plan = _plan(directory)
    if plan is not None:
        console.print(Text(_describe_plan(plan)))
    if regions := summary.get("regions"):
        console.print(Text(f"regions: {regions['calls']} calls of {regions['distinct']} distinct ones"))
    if summary.get("error"):
        console.print(Text(f"error: {summary['error']}", "red"))


def _stage_table(summary: dict[str, Any]) -> Table:
    table = Table(box=None)
    for heading in ("stage", "pass"):
        table.add_column(heading)
    for heading in ("rewrites", "nodes", "seconds"):
        table.add_column(heading, justify="right")
    table.add_column("numerics")
    for index, stage in enumerate(summary.get("stages", [])):
        numbers = str(stage["rewrites"]), str(stage["nodes"]), f"{stage['seconds']:.3f}"
        numerics = "exact" if stage["exact"] else "may change"
        table.add_row(f"{index:02d}", Text(stage["name"]), *numbers, numerics)
    return table


def _plan(directory: Path) -> Plan | None:
    """The plan of the last stage that has one."""
    for stage in reversed(stages_in(directory)):
        path = stage.path.with_suffix(".json")
        if path.exists():
            try:
                return plan_of(stage.json())
            except ArgumentError as error:
                raise ArgumentError(f"{path}: {error}") from error
    return None


def _describe_plan(plan: Plan) -> str:
    """One line per kind of collective and phase."""
    groups: dict[tuple[str, str], list[int]] = {}
    for bucket in plan.buckets:
        groups.setdefault((bucket.kind, bucket.phase), []).append(bucket.num_bytes)
    lines = []
    for (kind, phase), sizes in groups.items():
        plural = "s" if len(sizes) > 1 else ""
        lines.append(f"  {phase}: {len(sizes)} {kind} bucket{plural}, {sum(sizes):,} bytes, the largest {max(sizes):,}")
    return "\n".join([f"plan: {len(plan.buckets)} buckets", *lines])


def _show_dumps(directory: Path, console: Console) -> None:
    """The dumps below a directory, newest first."""
    found = sorted(directory.rglob(SUMMARY), key=lambda path: path.stat().st_mtime, reverse=True)
    if not found:
        raise ArgumentError(f"{directory} holds no dump: there is no {SUMMARY} in it or below it")
    table = Table(box=None)
    for heading in ("dump", "title", "stages", "last pass", "written", "error"):
        table.add_column(heading)
    for path in found[:_SHOWN_DUMPS]:
        summary = _summary(path)
        stages = summary.get("stages", [])
        written = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M:%S")
        error = str(summary.get("error") or "").partition("\n")[0][:80]
        last = stages[-1]["name"] if stages else ""
        cells = (str(path.parent), str(summary.get("title", "")), str(len(stages)), last, written, error)
        table.add_row(*map(Text, cells))
    console.print(table)
    if len(found) > _SHOWN_DUMPS:
        console.print(Text(f"and {len(found) - _SHOWN_DUMPS} older ones"))


def _summary(path: Path) -> dict[str, Any]:
    """Content of a summary, of which every key may be missing but those of a stage may not."""
    keys = {"name", "rewrites", "seconds", "nodes", "exact"}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or not all(keys <= set(stage) for stage in data.get("stages", [])):
            raise ValueError("it has other keys than a summary")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ArgumentError(f"{path} is not the summary of a dump: {error}") from None
    return data
