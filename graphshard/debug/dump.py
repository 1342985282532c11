"""Dump of every stage of a program, file by file, so that a crash leaves all stages up to it.

DIR/rank0/Llama-0/
  index.html                 the report: open it in a browser
  00-exported.pt2            the captured program as an ExportedProgram; exported.txt is its text
  00-capture.txt             a stage, repeated blocks folded; `graphshard show --full` unfolds
  00-capture.json            the stage for `graphshard repro`
  01-insert-collectives.txt .diff .json ...
  plan.json  saved.txt  forward.py  backward.py  regions/region_0.py  regions/region_0.kernels.py ...
  summary.json  error.txt    the input of `graphshard show`; the error that ended compilation

The Python files run by themselves, with made-up inputs:

python forward.py                           one process, collectives that return at once
torchrun --nproc-per-node 8 forward.py      real collectives
python regions/region_0.py                  one region
"""

from __future__ import annotations

import copy
import difflib
import functools
import itertools
import json
import os
import re
import shutil
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch.fx import Node

from graphshard.codec.program_format import program_to_json
from graphshard.debug._dump_summary import (
    EXPORTED,
    EXPORTED_TEXT,
    SUMMARY,
    DumpSummary,
    RegionCounts,
    StageSummary,
    read_summary,
)
from graphshard.debug.html_report import render, report_of, stage_stem, template_environment
from graphshard.errors import ArgumentError, GraphshardError, visible
from graphshard.ir.graph import OWN
from graphshard.ir.program import Program, Region, Stage
from graphshard.ir.recompute import RANDOM_STATE
from graphshard.lower.executor import lines_of, print_lines
from graphshard.lower.regions import RegionCall
from graphshard.passes import Pass
from graphshard.pipeline.instrumentation import Recorder
from graphshard.runtime.process_groups import bind_groups
from graphshard.torch_compat.aot_autograd import run_with_rng_state
from graphshard.torch_compat.symbolic_sizes import hint
from graphshard.utils.argument_validation import path_of
from graphshard.utils.files import BestEffort, file_name, replacing, write_text
from graphshard.utils.json_dataclasses import write
from graphshard.utils.text import brief


def dump_directory(dump: str | os.PathLike[str] | None, rank: int) -> Path | None:
    """Return this rank's directory below `dump` or GRAPHSHARD_DUMP; None without one.

    GRAPHSHARD_DUMP_RANKS ("0", "0,3", "all") says which ranks dump.
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
    """Return what makes the dump of a program by its name; a full disk ends dumps, and not training."""
    aid = BestEffort(f"the dump to {directory}")

    def make(name: str) -> Recorder | None:
        # A further backward is inside of the folder of its program, whatever the module is called.
        program, _, backward = name.rpartition("/backward-")
        folders = [file_name(program), file_name(f"backward-{backward}")] if program else [file_name(name)]
        dump = None if directory is None else aid(Dump, directory.joinpath(*folders))
        return None if dump is None else cast(Recorder, _BestEffortDump(dump, aid))

    return make


@dataclass(frozen=True)
class _BestEffortDump:
    """Recorder that ignores errors of the disk."""

    dump: Dump
    aid: BestEffort

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self.aid, getattr(self.dump, name))


@dataclass
class Dump:
    """Dump of one program to a directory, which is created, or emptied if an earlier dump is there.

    Every file is complete or missing; `summary.json` and `index.html` grow with it.
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
        self._write_summary(pid=os.getpid())

    def stage(self, program: Program, stage: Stage, next_pass: Pass | None = None) -> None:
        """Write the newest stage: its text, its difference from the one before, and its serialized form."""
        index = len(program.history) - 1
        stem = stage_stem(index, stage)
        self._write(f"{stem}.txt", stage.folded)
        if index:
            before = program.history[index - 1]
            lines = (before.folded.splitlines(keepends=True), stage.folded.splitlines(keepends=True))
            diff = difflib.unified_diff(*lines, f"{stage_stem(index - 1, before)}.txt", f"{stem}.txt")
            self._write(f"{stem}.diff", "".join(diff))
        else:
            self._export(program)
        if not program.regions:
            self._write(f"{stem}.json", program_to_json(program, next_pass=next_pass))
        self._summarize(program)

    def _export(self, program: Program) -> None:
        """Write the captured program in torch's format, or the reason why that cannot be."""
        try:
            exported = program.exported
        except GraphshardError as error:
            self._write(EXPORTED_TEXT, f"# {error}\n")
            return
        self._write(EXPORTED_TEXT, visible(str(exported)) + "\n")
        with replacing(self.directory / EXPORTED) as temporary, temporary.open("wb") as file:
            torch.export.save(exported, file)

    def failed(self, program: Program, name: str, error: Exception) -> None:
        """Write the error that ended a pass, and a report of the stages before it."""
        text = "".join(traceback.format_exception(error))
        self._errors.append(f"{name}: {error}")
        self._write("error.txt", text)
        self._summarize(program)
        self._write("index.html", render(report_of(program, error=text)))

    def finished(self, program: Program, compiled: dict[str, RegionCall]) -> None:
        """Write the lowered program: executors, regions and their kernels, the plan, and the report."""
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
        self._write("index.html", render(report_of(program, kernels=kernels)))

    def _summarize(self, program: Program) -> None:
        stages = tuple(
            StageSummary(s.name, s.rewrites, s.seconds, s.num_nodes, s.exact, f"{stage_stem(index, s)}.txt")
            for index, s in enumerate(program.history)
        )
        regions = RegionCounts(program.num_regions, program.num_distinct_regions) if program.regions else None
        self._write_summary(
            pid=os.getpid(),
            title=program.title,
            reason=program.reason,
            torch=str(torch.__version__),
            axes={axis.name: axis.size for axis in program.mesh.every_axis},
            stages=stages,
            regions=regions,
            communication=tuple(program.communication),
            kernels=self._kernels,
            error="\n".join(self._errors),
        )

    def _write_summary(self, **facts: Any) -> None:
        self._write(SUMMARY, json.dumps(write(DumpSummary(**facts)), indent=1) + "\n")

    def _write(self, name: str, text: str) -> None:
        write_text(self.directory / name, text)


def _unused(directory: Path) -> Path:
    """Return the directory, with a number if this process has dumped another model of the same name there."""
    for number in itertools.count(2):
        marker = directory / SUMMARY
        if not marker.exists() or read_summary(marker).pid != os.getpid():
            return directory
        directory = directory.with_name(f"{directory.name.partition('.')[0]}.{number}")
    raise AssertionError


def region_source(region: Region, name: str) -> str:
    """Return a file with a region's operators as a function `name`."""
    code = re.sub(r"def forward\(self(, )?", f"def {name}(", region.module.code)
    inputs = list(_inputs(region.module.graph.find_nodes(op="placeholder")))
    page = template_environment(html=False).get_template("region.py.j2")
    return page.render(key=region.key, code=code.strip(), name=name, inputs=inputs)


def executor_source(program: Program, phase_name: str) -> str:
    """Return a file with the code of an executor as it runs; it imports the files of its regions."""
    phase, mesh = program.phases[phase_name], program.mesh
    graph = copy.deepcopy(phase.module.graph)
    bind_groups(graph, {axis.name: _Verbatim(f"self.groups[{axis.name!r}]") for axis in mesh.every_axis})
    # Process groups along each axis, whose ranks need not be adjacent.
    rows = "{}.movedim({}, -1).reshape(-1, {})"
    groups = {repr(axis.name): rows.format("ranks", mesh.place(axis), axis.size) for axis in mesh.axes}
    if (experts := mesh.experts) is not None:  # on all ranks, or one mesh for each part of them
        ranks = f"ranks.view(-1, {', '.join(map(str, experts.shape.values()))})"
        own = [axis for axis in experts.axes if axis not in mesh.axes]
        groups |= {repr(axis.name): rows.format(ranks, experts.place(axis) + 1, axis.size) for axis in own}
    title = visible(program.title, lines=False).translate({ord('"'): "'", ord("\\"): "/"})  # must not end the text
    return (
        template_environment(html=False)
        .get_template("executor.py.j2")
        .render(
            phase=phase_name,
            title=title,
            own=any(node.target in OWN for node in graph.nodes),
            regions=list(dict.fromkeys(str(n.target) for n in graph.find_nodes(op="call_module"))),
            code=textwrap.indent(print_lines(lines_of(graph)).strip(), "    "),
            inputs=list(_inputs(phase.placeholders, list(map(str, phase.inputs)))),
            size=mesh.size,
            shape=[*mesh.shape.values()],
            groups=groups,
            outputs=list(map(str, phase.outputs)),
        )
    )


class _Verbatim(str):
    """Text that is written into code verbatim."""

    def __repr__(self) -> str:
        return str(self)


def _inputs(placeholders: Sequence[Node], labels: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield code and labels of inputs of the traced shapes, strides and dtypes: zeros, or small random numbers."""
    for node, label in itertools.zip_longest(placeholders, labels, fillvalue=""):
        assert isinstance(node, Node)
        val = node.meta["val"]
        if node.meta.get(RANDOM_STATE) or any(user.target is run_with_rng_state for user in node.users):
            code = "torch.get_rng_state()"
        elif isinstance(val, torch.SymInt):
            code = str(hint(val))
        else:
            fill = ".normal_(std=0.02)" if val.is_floating_point() else ".zero_()"
            shape, stride = (tuple(map(hint, sizes)) for sizes in (val.shape, val.stride()))
            code = f"torch.empty_strided({shape}, {stride}, dtype={val.dtype}, device={val.device.type!r}){fill}"
        yield code, visible(str(label), lines=False)
