"""Write every stage of a program to a directory, file by file, so that a crash leaves all stages up to it.

DIR/rank0/Llama-0/
  index.html                 the report: open it in a browser
  00-exported.pt2            the captured program as an ExportedProgram; exported.txt is its text
  00-capture.txt             a stage, repeated blocks folded; `graphshard show --full` unfolds
  00-capture.json            the stage for `graphshard repro`
  01-insert-collectives.txt .diff .json ...
  plan.json  saved.txt  forward.py  backward.py  regions/region_0.py  regions/region_0.kernels.py ...
  summary.json  error.txt    what `graphshard show` reads; the error that ended compilation
"""

from __future__ import annotations

import difflib
import itertools
import os
import shutil
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from graphshard.codec.stage import program_to_json
from graphshard.debug.stage_files import EXPORTED, EXPORTED_TEXT
from graphshard.debug.standalone import executor_source, region_source
from graphshard.debug.summary import SUMMARY, Regions, StageSummary, Summary, read_summary
from graphshard.errors import ArgumentError, GraphshardError, visible
from graphshard.ir.aid import Aid
from graphshard.ir.files import file_name, replacing, write_text
from graphshard.ir.given import path_of
from graphshard.ir.program import Program, Stage
from graphshard.ir.text import brief
from graphshard.lower.regions import RegionCall
from graphshard.passes import Pass
from graphshard.pipeline.observe import Recorder
from graphshard.report.content import report_of
from graphshard.report.page import render

_NO_KERNELS: Mapping[str, Sequence[str]] = MappingProxyType({})


def dump_directory(dump: str | os.PathLike[str] | None, rank: int) -> Path | None:
    """Where this rank dumps: below `dump`, or GRAPHSHARD_DUMP, if GRAPHSHARD_DUMP_RANKS ("0", "0,3", "all") has it.

    Raises:
        ArgumentError: `dump` is no directory, or GRAPHSHARD_DUMP_RANKS no list of ranks.
    """
    root = dump if dump is not None else os.environ.get("GRAPHSHARD_DUMP") or None
    ranks = os.environ.get("GRAPHSHARD_DUMP_RANKS", "0")
    if root is None:
        return None
    name = "dump" if dump is not None else "GRAPHSHARD_DUMP"
    directory = path_of(name, root, "a directory")
    above = next((path for path in (directory, *directory.parents) if path.exists()), None)
    if above is not None and not above.is_dir():
        raise ArgumentError(f"{name} must be a directory, got {brief(str(root))}, but {above} is a file.")
    try:
        chosen = ranks == "all" or rank in {int(r) for r in ranks.split(",")}
    except ValueError:
        raise ArgumentError(
            f"GRAPHSHARD_DUMP_RANKS must be 'all' or ranks such as '0,3', got {brief(ranks)}."
        ) from None
    return directory / f"rank{rank}" if chosen else None


def recorder(directory: Path | None) -> Callable[[str], Recorder | None]:
    """What makes the dump of a program by its name; nothing is written without a directory, or after an OSError."""
    aid = Aid(f"the dump to {directory}")

    def make(name: str) -> Recorder | None:
        dump = None if directory is None else aid(Dump, directory / _folder(name))
        return None if dump is None else _Careful(dump, aid)

    return make


def _folder(name: str) -> Path:
    """Of a program, whatever its module is called; that of a further backward is inside it."""
    program, _, backward = name.rpartition("/backward-")
    return Path(file_name(program)) / file_name(f"backward-{backward}") if program else Path(file_name(name))


@dataclass(frozen=True)
class _Careful:
    """A dump whose errors are the disk's, and not the program's."""

    dump: Dump
    aid: Aid

    def stage(self, program: Program, stage: Stage, next_pass: Pass | None) -> None:
        self.aid(self.dump.stage, program, stage, next_pass)

    def failed(self, program: Program, name: str, error: Exception) -> None:
        self.aid(self.dump.failed, program, name, error)

    def finished(self, program: Program, compiled: dict[str, RegionCall]) -> None:
        self.aid(self.dump.finished, program, compiled)


@dataclass
class Dump:
    """The dump of one program. Every file is complete or not there; `summary.json` and `index.html` grow with it.

    Args:
        directory: made, or emptied if an earlier dump is there.
    """

    directory: Path
    _errors: list[str] = field(default_factory=list, init=False)
    _kernels: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self.directory = _unused(self.directory)
        if (self.directory / SUMMARY).exists():
            shutil.rmtree(self.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        if any(self.directory.iterdir()):
            raise ArgumentError(f"dump: {self.directory} holds files that are no dump. Choose another directory.")
        self._write(SUMMARY, Summary(os.getpid()).to_json())

    def stage(self, program: Program, stage: Stage, next_pass: Pass | None = None) -> None:
        """Write the newest stage: its text, its difference from the one before, and its serialised form."""
        index = len(program.history) - 1
        stem = stem_of(index, stage)
        self._write(f"{stem}.txt", stage.folded)
        if not index:
            self._export(program)
        if index:
            before = program.history[index - 1]
            names = f"{stem_of(index - 1, before)}.txt", f"{stem}.txt"
            lines = (before.folded.splitlines(keepends=True), stage.folded.splitlines(keepends=True))
            self._write(f"{stem}.diff", "".join(difflib.unified_diff(*lines, *names)))
        if not program.regions:
            self._write(f"{stem}.json", program_to_json(program, next_pass=next_pass))
        self._summarize(program)

    def _export(self, program: Program) -> None:
        """Write the program that no pass has seen as torch's, or why that cannot be."""
        try:
            exported = program.exported
        except GraphshardError as error:
            self._write(EXPORTED_TEXT, f"# {error}\n")
            return
        self._write(EXPORTED_TEXT, visible(str(exported)) + "\n")
        with replacing(self.directory / EXPORTED) as temporary, temporary.open("wb") as file:
            torch.export.save(exported, file)

    def failed(self, program: Program, name: str, error: Exception) -> None:
        """Write the error with which a pass ended, and a report of what there is."""
        text = "".join(traceback.format_exception(error))
        self._errors.append(f"{name}: {error}")
        self._write("error.txt", text)
        self._summarize(program)
        self._report(program, text)

    def finished(self, program: Program, compiled: dict[str, RegionCall]) -> None:
        """Write what runs: executors, regions and their kernels, the plan, and the report."""
        if program.plan is not None:
            self._write("plan.json", program.plan.to_json())
        if program.saved:
            self._write("saved.txt", program.saved_table() + "\n")
        kernels: dict[str, tuple[str, ...]] = {}
        for name, key in program.region_names.items():
            self._write(f"regions/{name}.py", region_source(program.regions[key], name))
            if source := compiled[key].source:
                self._write(f"regions/{name}.kernels.py", source)
                kernels[name] = tuple(map(str, compiled[key].codes))
        for phase_name in program.phases:
            self._write(f"{phase_name}.py", executor_source(program, phase_name))
        self._kernels = tuple(f"{name}, {text}" for name, texts in kernels.items() for text in texts)
        self._summarize(program)
        self._report(program, "", kernels)

    def _report(self, program: Program, error: str, kernels: Mapping[str, Sequence[str]] = _NO_KERNELS) -> None:
        self._write("index.html", render(report_of(program, error=error, kernels=kernels)))

    def _summarize(self, program: Program) -> None:
        stages = tuple(
            StageSummary(s.name, s.rewrites, s.seconds, s.num_nodes, s.exact, f"{stem_of(index, s)}.txt")
            for index, s in enumerate(program.history)
        )
        summary = Summary(
            pid=os.getpid(),
            title=program.title,
            reason=program.reason,
            torch=str(torch.__version__),
            axes={axis.name: axis.size for axis in program.mesh.every_axis},
            stages=stages,
            regions=Regions(program.num_regions, program.num_distinct_regions) if program.regions else None,
            communication=tuple(program.communication),
            kernels=self._kernels,
            error="\n".join(self._errors),
        )
        self._write(SUMMARY, summary.to_json())

    def _write(self, name: str, text: str) -> None:
        write_text(self.directory / name, text)


def _unused(directory: Path) -> Path:
    """The directory, or with a number behind it if this process has dumped a model of the same name there."""
    for number in itertools.count(2):
        marker = directory / SUMMARY
        if not marker.exists() or read_summary(marker).pid != os.getpid():
            return directory
        directory = directory.with_name(f"{directory.name.partition('.')[0]}.{number}")
    raise AssertionError


def stem_of(index: int, stage: Stage) -> str:
    """File name of a stage without its ending: "09-bucket"."""
    return f"{index:02d}-{file_name(stage.name)}"
