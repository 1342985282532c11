"""Stages as files of a dump: find them, read them, compare them. Every error names the file and what to do.

A stage has two files: `NN-name.txt`, its folded text, and `NN-name.json`, from which the program is made again.
"""

from __future__ import annotations

import difflib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from graphshard.codec.stage import program_from_json
from graphshard.errors import ArgumentError
from graphshard.ir.files import read_file
from graphshard.ir.fold import fold
from graphshard.ir.given import path_of
from graphshard.ir.printer import print_program
from graphshard.ir.program import Program
from graphshard.ir.terminal import say, styled

# What capture returned as torch's `ExportedProgram`, and its text, which is not a stage that passes have made.
EXPORTED, EXPORTED_TEXT = "00-exported.pt2", "exported.txt"
_ENDINGS = (".txt", ".json")
# A stage of a large model has some megabytes.
_MOST_BYTES = 1 << 30
_STEM = re.compile(r"(\d+)-(.+)")
_STYLES = {"+": "green", "-": "red", "@": "cyan"}


@dataclass(frozen=True)
class StageFile:
    """One stage of a dump; `path` is one of its two files."""

    path: Path

    @staticmethod
    def at(path: str | Path) -> StageFile:
        """The stage of a path, which may leave out the ending or all behind the number: "dump/07".

        Raises:
            ArgumentError: there is no such file, or it is no stage.
        """
        found = existing(path_of("a stage", path, "a file of a dump"))
        if found.is_dir():
            raise ArgumentError(f"{found} is a directory: give one of its stages, such as {found / '00-capture.txt'}")
        if found.suffix not in _ENDINGS:
            raise ArgumentError(f"{found} is not a stage: give a file NN-name.txt or NN-name.json of a dump")
        return StageFile(found)

    @property
    def name(self) -> str:
        """The pass that made the stage; "" if the file has another name than a dump gives it."""
        match = _STEM.fullmatch(self.path.stem)
        return match[2] if match else ""

    def neighbor(self, step: int) -> StageFile | None:
        """The stage that many stages after this one, in the same directory."""
        if self._number is None:
            return None
        wanted = self._number + step
        return next((stage for stage in stages_in(self.path.parent) if stage._number == wanted), None)

    def json(self) -> str:
        """Content of the JSON file."""
        path = self.path.with_suffix(".json")
        if not path.exists():
            raise ArgumentError(f"{self.path} has no {path.name} beside it, from which the program could be made again")
        return _read(path)

    def program(self) -> Program:
        """The program at this stage."""
        text = self.json()
        try:
            return program_from_json(text)
        except ArgumentError as error:
            raise ArgumentError(f"{self.path.with_suffix('.json')}: {error}") from error

    def text(self, *, full: bool = False) -> str:
        """The stage's text, folded or not; the dump holds the folded one."""
        if not full and self.path.suffix == ".txt":
            return _read(self.path)
        text = self.printed(self.program())
        return text if full else fold(text)

    def printed(self, program: Program) -> str:
        """The text of a program that was made again.

        Raises:
            ArgumentError: what the file says of it does not fit together.
        """
        try:
            return print_program(program)
        except Exception as error:  # whatever comes of a graph that no dump has
            what = f"{type(error).__name__}: {error}"
            raise ArgumentError(f"{self.path} holds no program that can be printed ({what})") from error

    @property
    def _number(self) -> int | None:
        match = _STEM.fullmatch(self.path.stem)
        return int(match[1]) if match else None


def stages_in(directory: Path) -> list[StageFile]:
    """The stages of a dump in order; of each its text, if that is there."""
    paths = (path for path in sorted(_entries(directory)) if path.suffix in _ENDINGS and _STEM.fullmatch(path.stem))
    by_stem = {path.stem: path for path in paths}  # .txt sorts behind .json
    return sorted(map(StageFile, by_stem.values()), key=lambda stage: stage._number or 0)


def existing(path: Path) -> Path:
    """A path that is there, or the one stage it means; others get a hint."""
    if path.exists():
        return path
    if not path.parent.is_dir():
        raise ArgumentError(f"no such file: {path} ({path.parent} is no directory)")
    stages = stages_in(path.parent)
    matching = [stage for stage in stages if path.name in (stage.path.stem, stage.path.stem.partition("-")[0])]
    if len(matching) == 1:
        return matching[0].path
    close = difflib.get_close_matches(path.name, [entry.name for entry in _entries(path.parent)], 1, cutoff=0.5)
    hint = f"; did you mean {path.with_name(close[0])}?" if close else ""
    raise ArgumentError(f"no such file: {path}{hint}")


def print_diff(before: str, after: str, before_name: str, after_name: str) -> bool:
    """Print the unified difference of two texts, in colour on a terminal; whether there is one."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), before_name, after_name, lineterm="")
    console = Console(soft_wrap=True, highlight=False) if sys.stdout.isatty() else None
    differ = False
    for line in lines:
        differ = True
        if console:
            console.print(styled(line, _STYLES.get(line[0], "")))
        else:
            say(line)
    return differ


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError as error:
        raise ArgumentError(f"{directory} cannot be read: {error.strerror}") from None


def _read(path: Path) -> str:
    try:
        return read_file(path, _MOST_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise ArgumentError(f"{path} is not text") from None
