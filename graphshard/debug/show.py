"""What `graphshard show` prints: a stage, the summary of a dump, or a list of dumps."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from graphshard.codec.stage import plan_of
from graphshard.debug.stage_files import EXPORTED, EXPORTED_TEXT, StageFile, existing, stages_in
from graphshard.debug.summary import SUMMARY, Summary, read_summary
from graphshard.errors import ArgumentError
from graphshard.exported.pt2_reader import read_program
from graphshard.ir.plan import Plan
from graphshard.ir.terminal import say, styled

_SHOWN_DUMPS = 50
# Where dumps are looked for: levels below a directory, and how many directories at most.
_LEVELS, _MOST_DIRECTORIES = 6, 20_000


def show_path(path: Path, *, full: bool) -> None:
    """Print what is there.

    Raises:
        ArgumentError: nothing is there, or it cannot be read.
    """
    found = existing(path)
    if found.suffix == ".pt2":
        say(str(read_program(found)))
    elif not found.is_dir():
        say(StageFile.at(found).text(full=full), end="")
    elif (found / SUMMARY).exists():
        _show_dump(found, _console())
    else:
        _show_dumps(found, _console())


def _console() -> Console:
    """As wide as the terminal; wide enough for any table elsewhere."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)


def _show_dump(directory: Path, console: Console) -> None:
    summary = read_summary(directory / SUMMARY)
    console.print(styled(": ".join(filter(None, [summary.title or directory.name, summary.reason])), "bold"))
    axes = [f"{size} ranks on axis {axis!r}" for axis, size in summary.axes.items()]
    versions = [f"torch {summary.torch}"] if summary.torch else []
    console.print(styled(", ".join([*axes, *versions])))
    if (directory / EXPORTED).exists():
        console.print(styled(f"captured: {EXPORTED}, an ExportedProgram of torch; {EXPORTED_TEXT} is its text"))
    console.print(_stage_table(summary))
    plan = _plan(directory)
    if plan is not None:
        console.print(styled(_describe_plan(plan)))
    if regions := summary.regions:
        console.print(styled(f"regions: {regions.calls} calls of {regions.distinct} distinct ones"))
    for line in summary.kernels:
        console.print(styled(f"  {line}"))
    if summary.error:
        console.print(styled(f"error: {summary.error}", "red"))


def _stage_table(summary: Summary) -> Table:
    table = Table(box=None)
    for heading in ("stage", "pass"):
        table.add_column(heading)
    for heading in ("rewrites", "nodes", "seconds"):
        table.add_column(heading, justify="right")
    table.add_column("numerics")
    for index, stage in enumerate(summary.stages):
        numbers = str(stage.rewrites), str(stage.nodes), f"{stage.seconds:.3f}"
        table.add_row(f"{index:02d}", styled(stage.name), *numbers, "exact" if stage.exact else "may change")
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
    found = sorted(((path.stat().st_mtime, path) for path in _dumps_below(directory)), reverse=True)
    if not found:
        raise ArgumentError(f"{directory} holds no dump: there is no {SUMMARY} in it or below it")
    table = Table(box=None)
    for heading in ("dump", "title", "stages", "last pass", "written", "error"):
        table.add_column(heading)
    for seconds, path in found[:_SHOWN_DUMPS]:
        try:
            summary = read_summary(path)
        except ArgumentError:  # one that is damaged does not hide the others
            summary = Summary(error=f"{path.name} cannot be read")
        written = datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
        error = summary.error.partition("\n")[0][:80]
        last = summary.stages[-1].name if summary.stages else ""
        cells = (str(path.parent), summary.title, str(len(summary.stages)), last, written, error)
        table.add_row(*map(styled, cells))
    console.print(table)
    if len(found) > _SHOWN_DUMPS:
        console.print(styled(f"and {len(found) - _SHOWN_DUMPS} older ones"))


def _dumps_below(directory: Path) -> Iterator[Path]:
    """The summaries in a directory and below it.

    Raises:
        ArgumentError: there are too many directories to look into.
    """
    for seen, (where, inside, files) in enumerate(os.walk(directory)):
        if seen >= _MOST_DIRECTORIES:
            raise ArgumentError(
                f"{directory} has more than {_MOST_DIRECTORIES} directories below it. Give that of the dumps."
            )
        if len(Path(where).relative_to(directory).parts) >= _LEVELS:
            inside.clear()
        if SUMMARY in files and (Path(where) / SUMMARY).is_file():
            yield Path(where) / SUMMARY
