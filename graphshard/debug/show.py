"""`graphshard show` and `diff`: stages of dumps, summaries of dumps and of exported files, and lists of dumps.

Nothing here imports torch before a program has to be made again (`--full`, a .json, a .pt2): these commands answer at
once.

A stage has two files: `NN-name.txt`, its folded text, and `NN-name.json`, from which the program is made again.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from graphshard.codec.stage_format import plan_of
from graphshard.debug._dump_summary import EXPORTED, EXPORTED_TEXT, SUMMARY, DumpSummary, read_summary
from graphshard.errors import ArgumentError
from graphshard.ir.collapse_repeats import fold
from graphshard.ir.plan import Plan
from graphshard.utils.archive import read_archive
from graphshard.utils.argument_validation import path_of
from graphshard.utils.files import read_file
from graphshard.utils.text import brief, new_table, say, styled

if TYPE_CHECKING:
    from graphshard.ir.program import Program

_SUFFIXES = (".txt", ".json")
# A stage of a large model has some megabytes.
_MOST_BYTES = 1 << 30
_STEM = re.compile(r"(\d+)-(.+)")
_DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}
_SHOWN_DUMPS = 50
# Limits of the search for dumps: levels below a directory, and directories.
_LEVELS, _MOST_DIRECTORIES = 6, 20_000


@dataclass(frozen=True)
class StageFile:
    """One stage of a dump; `path` is one of its two files."""

    path: Path

    @staticmethod
    def at(path: str | Path) -> StageFile:
        """Return the stage of a path, which may leave out the suffix or all that follows the number: "dump/07"."""
        found = _existing(path_of("a stage", path, "a file of a dump"))
        if found.is_dir():
            raise ArgumentError(f"{found} is a directory: give one of its stages, such as {found / '00-capture.txt'}")
        if found.suffix not in _SUFFIXES:
            raise ArgumentError(f"{found} is not a stage: give a file NN-name.txt or NN-name.json of a dump")
        return StageFile(found)

    @property
    def name(self) -> str:
        """The pass that made the stage; "" if the file is not named as in a dump."""
        match = _STEM.fullmatch(self.path.stem)
        return match[2] if match else ""

    @property
    def _number(self) -> int | None:
        match = _STEM.fullmatch(self.path.stem)
        return int(match[1]) if match else None

    def neighbor(self, step: int) -> StageFile | None:
        """Return the stage that many stages later in the same directory."""
        if self._number is None:
            return None
        wanted = self._number + step
        return next((stage for stage in _stages_in(self.path.parent) if stage._number == wanted), None)

    def json(self) -> str:
        """Return the content of the JSON file."""
        path = self.path.with_suffix(".json")
        if not path.exists():
            raise ArgumentError(f"{self.path} has no {path.name} next to it to make the program again")
        return _read_text(path)

    def program(self) -> Program:
        """Make the program of this stage again."""
        from graphshard.codec.program_format import program_from_json

        text = self.json()
        try:
            return program_from_json(text)
        except ArgumentError as error:
            raise ArgumentError(f"{self.path.with_suffix('.json')}: {error}") from error

    def text(self, *, full: bool = False) -> str:
        """Return the stage's text, folded unless `full`; the dump has the folded one."""
        if not full and self.path.suffix == ".txt":
            return _read_text(self.path)
        text = self.printed(self.program())
        return text if full else fold(text)

    def printed(self, program: Program) -> str:
        """Return the text of a program that was made again."""
        from graphshard.ir.printer import print_program

        try:
            return print_program(program)
        except Exception as error:  # a forged graph may fail anywhere
            what = f"{type(error).__name__}: {error}"
            raise ArgumentError(f"{self.path} holds no program that can be printed ({what})") from error


def _stages_in(directory: Path) -> list[StageFile]:
    """Return the stages of a dump in order; their text files where these exist."""
    paths = (path for path in sorted(_entries(directory)) if path.suffix in _SUFFIXES and _STEM.fullmatch(path.stem))
    by_stem = {path.stem: path for path in paths}  # .txt sorts after .json
    return sorted(map(StageFile, by_stem.values()), key=lambda stage: stage._number or 0)


def _existing(path: Path) -> Path:
    """Return a path that exists, or the one stage that it abbreviates; the error suggests another."""
    if path.exists():
        return path
    if not path.parent.is_dir():
        raise ArgumentError(f"no such file: {path} ({path.parent} is no directory)")
    stages = _stages_in(path.parent)
    matching = [stage for stage in stages if path.name in (stage.path.stem, stage.path.stem.partition("-")[0])]
    if len(matching) == 1:
        return matching[0].path
    close = difflib.get_close_matches(path.name, [entry.name for entry in _entries(path.parent)], 1, cutoff=0.5)
    hint = f"; did you mean {path.with_name(close[0])}?" if close else ""
    raise ArgumentError(f"no such file: {path}{hint}")


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError as error:
        raise ArgumentError(f"{directory} cannot be read: {error.strerror}") from None


def _read_text(path: Path) -> str:
    try:
        return read_file(path, _MOST_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise ArgumentError(f"{path} is not text") from None


def run_show(args: argparse.Namespace) -> int:
    """Run `graphshard show PATH` for a stage, a dump, or a directory of dumps."""
    import_all(args.imports)
    show_path(path_of("PATH", args.path, "a stage of a dump, a directory, or a .gshard file"), full=args.full)
    return 0


def run_diff(args: argparse.Namespace) -> int:
    """Run `graphshard diff A B`, or A with the stage before it; return 1 if they differ."""
    import_all(args.imports)
    a = StageFile.at(args.a)
    if args.previous:
        before = a.neighbor(-1)
        if before is None:
            raise ArgumentError(f"{a.path} has no stage before it")
        a, b = before, a
    else:
        b = StageFile.at(args.b)
    return int(print_diff(a.text(full=args.full), b.text(full=args.full), str(a.path), str(b.path)))


def import_all(modules: Sequence[str]) -> None:
    """Import the modules named by --import."""
    for module in modules:
        import_module(module, "--import")


def import_module(name: str, option: str) -> object:
    """Import a module named on the command line; the current directory is searched, too."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise ArgumentError(f"{option}: cannot import {brief(name)}: {failure(error)}") from None


def failure(error: BaseException) -> str:
    """Return the text of an error raised by a user's module, cut short."""
    text = str(error)[:300]
    return text if isinstance(error, ImportError) else f"{type(error).__name__}: {text}"


def print_diff(before: str, after: str, before_name: str, after_name: str) -> bool:
    """Print the unified difference of two texts, in color on a terminal; return whether they differ."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), before_name, after_name, lineterm="")
    console = Console(soft_wrap=True, highlight=False) if sys.stdout.isatty() else None
    differ = False
    for line in lines:
        differ = True
        if console:
            console.print(styled(line, _DIFF_STYLES.get(line[0], "")))
        else:
            say(line)
    return differ


def show_path(path: Path, *, full: bool) -> None:
    """Print a stage, the summary of a dump, or the list of dumps below a directory."""
    found = _existing(path)
    # Off a terminal, wide enough for any table.
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
    if found.suffix == ".pt2":
        from graphshard.exported.exported_program import read_program

        say(str(read_program(found)))
    elif found.suffix in (".gshard", ".gscache"):
        say(read_archive(found).text("summary.txt"), end="")
    elif not found.is_dir():
        say(StageFile.at(found).text(full=full), end="")
    elif (found / SUMMARY).exists():
        _show_dump(found, console)
    else:
        _show_dumps(found, console)


def _show_dump(directory: Path, console: Console) -> None:
    summary = read_summary(directory / SUMMARY)
    console.print(styled(": ".join(filter(None, [summary.title or directory.name, summary.reason])), "bold"))
    axes = [f"{size} ranks on axis {axis!r}" for axis, size in summary.axes.items()]
    versions = [f"torch {summary.torch}"] if summary.torch else []
    console.print(styled(", ".join([*axes, *versions])))
    if (directory / EXPORTED).exists():
        console.print(styled(f"captured: {EXPORTED}, an ExportedProgram of torch; {EXPORTED_TEXT} is its text"))
    table = new_table(("stage", "pass"), ("rewrites", "nodes", "seconds"))
    table.add_column("numerics")
    for index, stage in enumerate(summary.stages):
        numbers = str(stage.rewrites), str(stage.nodes), f"{stage.seconds:.3f}"
        table.add_row(f"{index:02d}", styled(stage.name), *numbers, "exact" if stage.exact else "may change")
    console.print(table)
    plan = _last_plan(directory)
    if plan is not None:
        console.print(styled("\n".join(_plan_lines(plan))))
    if regions := summary.regions:
        console.print(styled(f"regions: {regions.calls} calls of {regions.distinct} distinct ones"))
    for line in summary.kernels:
        console.print(styled(f"  {line}"))
    if summary.error:
        console.print(styled(f"error: {summary.error}", "red"))


def _last_plan(directory: Path) -> Plan | None:
    for stage in reversed(_stages_in(directory)):
        path = stage.path.with_suffix(".json")
        if path.exists():
            try:
                return plan_of(stage.json())
            except ArgumentError as error:
                raise ArgumentError(f"{path}: {error}") from error
    return None


def _plan_lines(plan: Plan) -> Iterator[str]:
    yield f"plan: {len(plan.buckets)} buckets"
    groups: dict[tuple[str, str], list[int]] = {}
    for bucket in plan.buckets:
        groups.setdefault((bucket.kind, bucket.phase), []).append(bucket.num_bytes)
    for (kind, phase), sizes in groups.items():
        plural = "s" if len(sizes) > 1 else ""
        yield f"  {phase}: {len(sizes)} {kind} bucket{plural}, {sum(sizes):,} bytes, the largest {max(sizes):,}"


def _show_dumps(directory: Path, console: Console) -> None:
    """Print the dumps below a directory, newest first."""
    found = sorted(((path.stat().st_mtime, path) for path in _dumps_below(directory)), reverse=True)
    if not found:
        raise ArgumentError(f"{directory} holds no dump: there is no {SUMMARY} in it or below it")
    table = new_table(("dump", "title", "stages", "last pass", "written", "error"))
    for seconds, path in found[:_SHOWN_DUMPS]:
        try:
            summary = read_summary(path)
        except ArgumentError:  # a damaged dump does not hide the others
            summary = DumpSummary(error=f"{path.name} cannot be read")
        written = datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
        error = summary.error.partition("\n")[0][:80]
        last = summary.stages[-1].name if summary.stages else ""
        cells = (str(path.parent), summary.title, str(len(summary.stages)), last, written, error)
        table.add_row(*map(styled, cells))
    console.print(table)
    if len(found) > _SHOWN_DUMPS:
        console.print(styled(f"and {len(found) - _SHOWN_DUMPS} older ones"))


def _dumps_below(directory: Path) -> Iterator[Path]:
    for seen, (where, inside, files) in enumerate(os.walk(directory)):
        if seen >= _MOST_DIRECTORIES:
            raise ArgumentError(
                f"{directory} has more than {_MOST_DIRECTORIES} directories below it. Give the directory of the dumps."
            )
        if len(Path(where).relative_to(directory).parts) >= _LEVELS:
            inside.clear()
        if SUMMARY in files and (Path(where) / SUMMARY).is_file():
            yield Path(where) / SUMMARY
