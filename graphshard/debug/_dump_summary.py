"""Summary of a dump, which `graphshard show` prints without importing torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from graphshard.errors import ArgumentError
from graphshard.utils.files import read_file
from graphshard.utils.json_dataclasses import read

SUMMARY = "summary.json"
# The captured program as torch's `ExportedProgram`, and its text; neither is a stage.
EXPORTED, EXPORTED_TEXT = "00-exported.pt2", "exported.txt"
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class StageSummary:
    """One stage of a dump, as in `graphshard.ir.program.Stage`; `file` is its text."""

    name: str
    rewrites: int
    seconds: float
    nodes: int
    exact: bool
    file: str


@dataclass(frozen=True)
class RegionCounts:
    """How many regions are called, and how many of them are distinct."""

    calls: int
    distinct: int


@dataclass(frozen=True)
class DumpSummary:
    """Contents of `summary.json`, which `graphshard show` prints without reading programs.

    Attributes:
        pid: the process; the first summary of a dump has nothing else.
        regions: None before lowering.
        communication: one line per collective.
        kernels: one line per region and kind of GPU, with the most registers and the like that its kernels take.
        error: of the pass that failed.
    """

    pid: int | None = None
    title: str = ""
    reason: str = ""
    torch: str = ""
    axes: dict[str, int] = field(default_factory=dict)
    stages: tuple[StageSummary, ...] = ()
    regions: RegionCounts | None = None
    communication: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    error: str = ""


def read_summary(path: Path) -> DumpSummary:
    """Read a summary; raise ArgumentError for a file that is none."""
    try:
        return read(json.loads(read_file(path, _MOST_BYTES)), DumpSummary)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is not the summary of a dump: {error}") from None
